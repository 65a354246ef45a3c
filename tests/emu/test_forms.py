"""What our kernels ask of the software GPU was asked of it before, by a kernel known to be right or a small test."""

import ctypes

import numpy as np
import pytest
from emu import emulated, forms, ptx_cases
from emu.our_calls import Call

from jax_fa4 import cases, emulator, errors, plan


@pytest.fixture(scope="module", autouse=True)
def _library():
    emulated.require_library()


SMALL = """
.version 8.8
.target sm_90a
.address_size 64
.extern .shared .align 8 .b8 smem[];
.visible .entry main(.param .u64 out) {
.reg .pred p<4>; .reg .b16 h<4>; .reg .b32 r<8>; .reg .b64 d<4>; .reg .f32 f<2>;
ld.param.u64 d0, [out]; mov.u32 r0, %tid.x; mov.u32 r1, smem; mul.wide.u32 d1, r0, 4; add.s64 d0, d0, d1;
cvt.u16.u32 h0, r0; sub.s16 h1, h0, 10;
setp.eq.b16 p0, h0, 3; selp.b32 r2, 1, 0, p0;
setp.lt.s16 p1, h1, 0; selp.b32 r3, 2, 0, p1; or.b32 r2, r2, r3;
setp.eq.u32 p2, r0, 0; @p2 mbarrier.init.shared.b64 [r1], 32; bar.warp.sync -1;
mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 p3, [r1], 0; selp.b32 r3, 4, 0, p3; or.b32 r2, r2, r3;
bar.warp.sync -1; mbarrier.arrive.shared.b64 d2, [r1]; bar.warp.sync -1;
mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 p3, [r1], 0; selp.b32 r3, 8, 0, p3; or.b32 r2, r2, r3;
cvt.s32.s16 r4, h1; cvt.s64.s32 d3, r4; setp.ge.s64 p1, d3, 0; selp.b32 r3, 16, 0, p1; or.b32 r2, r2, r3;
shl.b64 d3, d3, 32; setp.lt.s64 p1, d3, 0; selp.b32 r3, 64, 0, p1; or.b32 r2, r2, r3;
setp.ne.b64 p1, d3, 0; selp.b32 r3, 128, 0, p1; or.b32 r2, r2, r3;
mul.lo.u32 r5, r0, 9; cvt.s8.s32 r5, r5; setp.lt.s32 p1, r5, 0; selp.b32 r3, 32, 0, p1; or.b32 r2, r2, r3;
setp.gt.u16 p1, h1, 21; selp.b32 r3, 256, 0, p1; or.b32 r2, r2, r3;
setp.lt.u16 p1, h1, 21; selp.b32 r3, 512, 0, p1; or.b32 r2, r2, r3;
ld.param.u64 d3, [out]; mov.f32 f0, 0f3F800000; mov.f32 f1, 0fC0000000;
red.relaxed.gpu.global.add.v2.f32 [d3+128], {f0, f1};
st.global.b32 [d0], r2; exit;
}
"""
"""Forms of our kernels that neither a known-right kernel nor another test here executes."""


def check_small() -> None:
    out = np.zeros(34, np.uint32)
    emulator.load(b"", SMALL, "").launch_kernel(
        "main", (1, 1, 1), (32, 1, 1), [ctypes.c_uint64(out.ctypes.data)], [out], shared_bytes=64
    )
    lane = np.arange(32)
    negative = (9 * lane).astype(np.int8) < 0
    flags = (lane == 3) + 66 * (lane < 10) + 8 + 16 * (lane >= 10) + 32 * negative + 128 * (lane != 10)
    less = (lane - 10).astype(np.uint16)
    flags += 256 * (less > 21) + 512 * (less < 21)
    np.testing.assert_array_equal(out[:32], flags)
    np.testing.assert_array_equal(out[32:].view(np.float32), [32, -64])


def forms_of_small_kernels() -> set[str]:
    with forms.collected() as reports:
        check_small()
        for case in ptx_cases.cases():
            case.check(emulated.run(case))
    return forms.of_reports(reports)


def test_forms_of_ours_alone():
    check_small()


def test_known_forms_are_recorded():
    known = forms.known()
    assert {"ex2.approx.ftz.f32", "setmaxnreg.inc.sync.aligned.u32"} <= known
    assert any(form.startswith("tcgen05.mma instruction") for form in known)
    assert any(form.startswith("wgmma shape") for form in known)


CALLS = [Call(case.name, pass_, arch) for arch in ("sm_90a", "sm_100a") for pass_ in plan.PASSES
         for case in cases.select(without=("empty",))]
# Kernels that other fast tests compile too.
FAST = {("sm_90a", "forward", "causal"), ("sm_90a", "backward", "causal"), ("sm_100a", "forward", "d128"),
        ("sm_100a", "backward", "full")}


@pytest.fixture(scope="module")
def shown():
    return forms.known() | forms_of_small_kernels()


@pytest.mark.parametrize("call", [
    pytest.param(call, id=f"{call.arch}-{call.name}",
                 marks=() if (call.arch, call.pass_, call.case) in FAST else pytest.mark.slow) for call in CALLS])
def test_our_kernels_use_known_forms(call, shown):
    try:
        artifact = call.compiled()
    except errors.Unsupported as error:
        pytest.skip(str(error))
    executed = forms.of_reports([call.emulate(artifact, call.inputs())[1]])
    unknown = executed - shown
    print(f"{call.arch} {call.name}: {len(executed)} forms, {len(unknown)} of them new:", *sorted(unknown), sep="\n  ")
    assert not unknown
