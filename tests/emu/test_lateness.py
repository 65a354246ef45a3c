"""Seeds that hold operations back (ffi/emu/async/lateness.h), and what follows a late operation."""

import ctypes

import numpy as np
import pytest
from emu import emulated

from jax_fa4 import emulator


@pytest.fixture(scope="module", autouse=True)
def _library():
    emulated.require_library()


def run(body: str, out: np.ndarray, seed: int, warps: int = 1) -> emulator.Report:
    text = f""".version 8.8
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry main(.param .u64 out)
{{
.reg .pred p<8>; .reg .b32 r<32>; .reg .b64 d<8>;
ld.param.u64 d0, [out]; mov.u32 r0, smem; mov.u32 r1, %tid.x; setp.eq.u32 p0, r1, 0;
{body}
}}
"""
    return emulator.load(b"", text, "").launch_kernel(
        "main", (1, 1, 1), (32 * warps, 1, 1), [ctypes.c_uint64(out.ctypes.data)], [out], shared_bytes=1024,
        settings=emulator.Settings(seed=seed),
    )  # fmt: skip


TWO_RACES = """
@!p0 ret;
mov.u32 r2, 1; mov.u32 r3, 0;
st.shared.v4.b32 [r0], {r2, r2, r2, r2}; st.shared.v4.b32 [r0+16], {r2, r2, r2, r2}; fence.proxy.async.shared::cta;
cp.async.bulk.global.shared::cta.bulk_group [d0], [r0], 16;
cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [d0+16], [r0+16], 16;
cp.async.bulk.commit_group;
L: add.u32 r3, r3, 1; setp.lt.u32 p1, r3, 200; @p1 bra L;
mov.u32 r2, 2;
st.shared.v4.b32 [r0], {r2, r2, r2, r2}; st.shared.v4.b32 [r0+16], {r2, r2, r2, r2}; fence.proxy.async.shared::cta;
cp.async.bulk.wait_group 0;
ret;
"""
"""A store and a reduction of ones, from memory that is overwritten with twos before the wait for them."""


@pytest.mark.parametrize("seed, stored, added", [(1, 2, 1), (3, 1, 2), (9, 2, 1), (11, 1, 2)])
def test_odd_seeds_hold_back_the_kinds_of_the_program_in_turn(seed, stored, added):
    out = np.zeros(8, np.uint32)
    run(TWO_RACES, out, seed)
    np.testing.assert_array_equal(out, [stored] * 4 + [added] * 4)


def test_the_second_round_holds_back_some_instructions_of_the_kind():
    seen = set()
    for seed in range(5, 101, 8):  # they would hold back the store
        out = np.zeros(8, np.uint32)
        run(TWO_RACES, out, seed)
        assert out[4] == 1
        seen.add(int(out[0]))
    assert seen == {1, 2}


SPIN = """
@p0 mbarrier.init.shared.b64 [r0+512], 1; fence.mbarrier_init.release.cluster; bar.sync 0;
@!p0 bra WAIT;
mbarrier.arrive.expect_tx.shared.b64 d1, [r0+512], 256;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [r0], [d0], 256, [r0+512];
WAIT: mbarrier.test_wait.parity.shared.b64 p1, [r0+512], 0; @!p1 bra WAIT;
shl.b32 r2, r1, 2; add.u32 r3, r2, r0; ld.shared.b32 r4, [r3]; add.u32 r4, r4, 5;
cvt.u64.u32 d1, r2; add.u64 d0, d0, d1; st.global.b32 [d0], r4;
ret;
"""


def test_warps_that_spin_for_a_late_operation_are_no_hang():
    for seed in range(8):
        out = np.arange(64, dtype=np.uint32)
        run(SPIN, out, seed, warps=2)
        np.testing.assert_array_equal(out, np.arange(64) + 5)


UNAWAITED = """
setp.eq.u32 p1, r1, 0; mov.u32 r2, 1; add.u32 r3, r0, 512; add.u32 r4, r0, 520;
@p1 mbarrier.init.shared.b64 [r3], 1; @p1 mbarrier.init.shared.b64 [r4], 1; fence.mbarrier_init.release.cluster;
bar.sync 0; @!p1 ret;
mbarrier.arrive.expect_tx.shared.b64 d1, [r3], 16; mbarrier.arrive.expect_tx.shared.b64 d1, [r4], 16;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [r0], [d0], 16, [FIRST];
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [r0+16], [d0], 16, [SECOND];
L: mbarrier.try_wait.parity.shared.b64 p2, [r3], 0; @!p2 bra L;
ld.shared.b32 r5, [r0+OTHER]; add.u32 r5, r5, 1; st.global.b32 [d0], r5;
M: mbarrier.try_wait.parity.shared.b64 p2, [r4], 0; @!p2 bra M;
ret;
"""


@pytest.mark.parametrize("first, second, other", [("r3", "r4", 16), ("r4", "r3", 0)])
def test_what_nobody_waits_for_happens_last(first, second, other):
    """Two loads, a wait for one of them, and the other's data are read: whichever was issued first."""
    text = UNAWAITED.replace("FIRST", first).replace("SECOND", second).replace("OTHER", str(other))
    for seed in (1, 5, 9):  # they hold back all loads
        with pytest.raises(emulator.EmulationError, match="nothing was ever written"):
            run(text, np.zeros(8, np.uint32), seed)


SLEPT_ON = """
setp.eq.u32 p1, r1, 0; setp.eq.u32 p3, r1, 32; add.u32 r3, r0, 512; add.u32 r4, r0, 520;
@p1 mbarrier.init.shared.b64 [r3], 1; @p1 mbarrier.init.shared.b64 [r4], 1; fence.mbarrier_init.release.cluster;
bar.sync 0; @p3 bra SLEEPER; @!p1 ret;
mbarrier.arrive.expect_tx.shared.b64 d1, [r3], 16; mbarrier.arrive.expect_tx.shared.b64 d1, [r4], 16;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [r0], [d0], 16, [r3];
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [r0+16], [d0], 16, [r4];
L: mbarrier.try_wait.parity.shared.b64 p2, [r4], 0; @!p2 bra L;
ld.shared.b32 r5, [r0]; add.u32 r5, r5, 1; st.global.b32 [d0+16], r5;
ret;
SLEEPER: mbarrier.try_wait.parity.shared.b64 p2, [r3], 0; @!p2 bra SLEEPER;
ret;
"""
"""One warp sleeps for the first of two loads; another reads it, but waits for the second alone."""


def test_an_operation_is_held_back_though_a_warp_sleeps_for_it():
    for first in range(2, 50, 16):  # four seeds take each origin once
        missed = []
        for seed in range(first, first + 16, 4):
            try:
                run(SLEPT_ON, np.zeros(8, np.uint32), seed, warps=2)
            except emulator.EmulationError as error:
                missed.append(str(error))
        assert missed and all("nothing was ever written" in message for message in missed)
    for seed in range(1, 50, 4):  # of the loads that they hold back the first goes first: it is slept for
        run(SLEPT_ON, np.zeros(8, np.uint32), seed, warps=2)


MOVED = """
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [r0], 32; ld.shared.b32 r10, [r0];
mov.u32 r2, 7; mov.u32 r3, 8;
tcgen05.st.sync.aligned.32x32b.x2.b32 [r10], {r2, r3}; tcgen05.wait::st.sync.aligned;
tcgen05.ld.sync.aligned.32x32b.x2.b32 {r4, r5}, [r10];
mov.b64 d1, {r4, r5}; mov.b64 {r6, r7}, d1; mov.u32 r4, r6;
WAIT
mov.u32 r2, 70; mov.u32 r3, 80;
tcgen05.st.sync.aligned.32x32b.x2.b32 [r10], {r2, r3}; tcgen05.wait::st.sync.aligned;
shl.b32 r8, r1, 3; cvt.u64.u32 d2, r8; add.u64 d0, d0, d2; st.global.v2.b32 [d0], {r4, r7};
tcgen05.dealloc.cta_group::1.sync.aligned.b32 r10, 32;
ret;
"""


@pytest.mark.parametrize("waits", [True, False])
def test_a_move_is_no_use_of_a_register_that_is_still_loaded(waits):
    """What is read after tensor memory was overwritten shows that the load had not been done when the moves were."""
    seen = set()
    for seed in range(12):
        out = np.zeros((32, 2), np.uint32)
        run(MOVED.replace("WAIT", "tcgen05.wait::ld.sync.aligned;" if waits else ""), out, seed)
        assert (out == out[0]).all()
        seen.add(tuple(out[0].tolist()))
    assert seen == ({(7, 8)} if waits else {(7, 8), (70, 80)})
