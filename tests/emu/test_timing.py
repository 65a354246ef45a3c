"""Timed runs: the clock follows the published rates."""

import ctypes

import numpy as np
import pytest
from emu import emulated

from jax_fa4 import emulator, estimate


@pytest.fixture(scope="module", autouse=True)
def _library():
    emulated.require_library()


def timed(instruction: str, count: int, warps: int, target: str = "sm_100a") -> dict:
    """`count` of the instruction, each on registers of its own, in `warps` warps of one CTA."""
    lines = [instruction.format(a=i, b=i + count) for i in range(count)]
    text = f""".version 8.8
.target {target}
.address_size 64
.visible .entry main(.param .u64 out) {{
.reg .f32 f<{2 * count + 1}>; .reg .b64 d<{2 * count + 1}>; .reg .b32 r<{2 * count + 1}>;
{" ".join(lines)}
ret; }}"""
    out = np.zeros(1, np.uint32)
    report = emulator.load(b"", text, "").launch_kernel(
        "main", (1, 1, 1), (32 * warps, 1, 1), [ctypes.c_uint64(out.ctypes.data)], [out],
        settings=emulator.Settings(timing=True),
    )  # fmt: skip
    return report.kernels[0]


@pytest.mark.parametrize(
    "instruction, cycles",
    [
        ("ex2.approx.ftz.f32 f{b}, f{a};", 8),  # 16 lanes a cycle and multiprocessor
        ("fma.rn.f32 f{b}, f{a}, f{a}, f{a};", 1),
        ("fma.rn.f32x2 d{b}, d{a}, d{a}, d{a};", 2),
        ("xor.b32 r{b}, r{a}, r{a};", 2),
    ],
)
def test_throughput_of_a_quarter(instruction, cycles):
    count = 400
    one = timed(instruction, count, 1)["cluster_cycles"][0]
    window = 310  # arithmetic still queued when the last instruction has issued
    assert cycles * count - window <= one <= cycles * count + 20
    # Warps 0 to 3 have a quarter each; the fifth shares the first's.
    assert timed(instruction, count, 4)["cluster_cycles"][0] == one
    assert timed(instruction, count, 5)["cluster_cycles"][0] >= 2 * cycles * count - window


def test_a_timed_run_repeats():
    kernels = [timed("ex2.approx.ftz.f32 f{b}, f{a};", 50, 8) for _ in range(2)]
    assert kernels[0] == kernels[1]
    assert estimate.estimate(kernels[0], 100, 148).cycles == kernels[0]["cluster_cycles"][0] + estimate.LAUNCH_CYCLES


def test_clusters_are_laid_onto_the_multiprocessors_in_order():
    start = estimate.LAUNCH_CYCLES
    assert estimate.launch_cycles([100] * 4, 4) == start + 100
    assert estimate.launch_cycles([100] * 5, 4) == 2 * (start + 100)
    assert estimate.launch_cycles([1000, 10, 10, 10], 2) == 2 * start + 1010  # the last one follows the long one


def test_whoever_is_done_first_takes_the_next_piece_of_work():
    text = """.version 8.8
.target sm_100a
.address_size 64
.visible .entry main(.param .u64 taken) {
.reg .b64 a, mine, offset; .reg .b32 t, n, left, cta; .reg .f32 x; .reg .pred p;
ld.param.u64 a, [taken];
mov.u32 cta, %ctaid.x;
mul.wide.u32 offset, cta, 4;
add.s64 mine, a, offset;
setp.eq.u32 p, cta, 0;
selp.b32 n, 4000, 400, p;
mov.f32 x, 0f3F000000;
next:
atom.global.add.u32 t, [a+16], 1;
setp.ge.u32 p, t, 22;
@p bra done;
red.global.add.u32 [mine], 1;
mov.b32 left, n;
work:
ex2.approx.ftz.f32 x, x;
sub.s32 left, left, 1;
setp.gt.s32 p, left, 0;
@p bra work;
bra next;
done:
ret; }"""
    taken = np.zeros(8, np.uint32)
    module = emulator.load(b"", text, "")
    module.launch_kernel("main", (2, 1, 1), (1, 1, 1), [ctypes.c_uint64(taken.ctypes.data)], [taken],
                         settings=emulator.Settings(timing=True))  # fmt: skip
    assert taken[:2].tolist() in ([2, 20], [3, 19])  # the first CTA takes ten times as long for a piece
