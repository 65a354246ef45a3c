"""Warps, barriers, scheduling and errors of the software GPU."""

import ctypes

import numpy as np
import pytest
from emu import emulated

from jax_fa4 import emulator


@pytest.fixture(scope="module", autouse=True)
def _library():
    emulated.require_library()


def ptx(body, registers="", parameters=".param .u64 out", target="sm_90a", prologue=""):
    """A kernel `main`; its body begins on line 9."""
    return f""".version 8.8
.target {target}
.address_size 64
{prologue}
.visible .entry main({parameters})
{{
.reg .pred p<8>; .reg .b32 r<32>; .reg .b64 d<32>; .reg .f32 f<32>; {registers}
ld.param.u64 d0, [out];
{body}
}}
"""


def launch(text, out=None, *, grid=1, block=32, cluster=1, shared=0, more=(), **settings):
    arrays = [] if out is None else [out]
    parameters = [ctypes.c_uint64(a.ctypes.data) for a in arrays] or [ctypes.c_uint64(0)]
    return emulator.load(b"", text, "").launch_kernel(
        "main", (grid, 1, 1), (block, 1, 1), [*parameters, *more], arrays, cluster=(cluster, 1, 1), shared_bytes=shared,
        settings=emulator.Settings(**settings),
    )  # fmt: skip


STORE = """
mov.u32 r30, %tid.x; mov.u32 r29, %ctaid.x; mov.u32 r28, %ntid.x; mad.lo.s32 r30, r29, r28, r30;
mul.wide.u32 d30, r30, 4; add.s64 d31, d0, d30; st.global.b32 [d31], r20; ret;
"""
DYNAMIC = ".extern .shared .align 1024 .b8 smem[];"


def failure(text, *arguments, **settings):
    with pytest.raises(emulator.EmulationError) as caught:
        launch(text, *arguments, **settings)
    return str(caught.value)


# ---- divergence ----


def test_lanes_leave_a_loop_one_by_one_and_meet_again():
    body = """
    mov.u32 r1, %tid.x; mov.u32 r20, 0; mov.u32 r2, 0;
    LOOP: setp.ge.u32 p1, r2, r1; @p1 bra DONE;
    add.u32 r20, r20, r2; add.u32 r2, r2, 1; bra LOOP;
    DONE: shfl.sync.idx.b32 r20, r20, 31, 31, -1;
    """
    out = np.zeros(32, np.uint32)
    report = launch(ptx(body + STORE), out)
    np.testing.assert_array_equal(out, sum(range(31)))
    # The shuffle and what follows it are executed once, by the whole warp.
    assert report.kernels[0]["units"]["shuffle"] == 1


def test_nested_branches_reconverge_at_the_nearest_point():
    body = """
    mov.u32 r1, %tid.x; and.b32 r2, r1, 1; and.b32 r3, r1, 2; mov.u32 r20, 0;
    setp.eq.u32 p1, r2, 0; setp.eq.u32 p2, r3, 0;
    @p1 bra EVEN;
    @p2 bra ODD0;
    add.u32 r20, r20, 1000; bra ODDEND;
    ODD0: add.u32 r20, r20, 100;
    ODDEND: add.u32 r20, r20, 10; bra END;
    EVEN: add.u32 r20, r20, 1;
    END: activemask.b32 r4; popc.b32 r5, r4; mul.lo.u32 r5, r5, 10000; add.u32 r20, r20, r5;
    """
    out = np.zeros(32, np.uint32)
    launch(ptx(body + STORE), out)
    lane = np.arange(32)
    expected = np.where(lane % 2 == 0, 1, np.where(lane & 2, 1010, 110)) + 320000
    np.testing.assert_array_equal(out, expected)


def test_lanes_that_exit_are_not_waited_for():
    body = """
    mov.u32 r1, %tid.x; setp.lt.u32 p1, r1, 5; @p1 ret;
    mov.u32 r20, 7; bar.warp.sync -1; vote.sync.ballot.b32 r20, p1, -1; not.b32 r20, r20;
    """
    out = np.zeros(32, np.uint32)
    launch(ptx(body + STORE), out)
    np.testing.assert_array_equal(out, [0] * 5 + [0xFFFFFFFF] * 27)


def test_diverged_lanes_wait_for_each_other_before_a_warp_wide_instruction():
    body = """
    mov.u32 r1, %tid.x; setp.lt.u32 p1, r1, 16; mov.u32 r20, 3;
    @p1 bra LOW;
    mov.u32 r20, 4;
    LOW: shfl.sync.bfly.b32 r20, r20, 16, 31, -1;
    """
    out = np.zeros(32, np.uint32)
    launch(ptx(body + STORE), out)
    np.testing.assert_array_equal(out, [4] * 16 + [3] * 16)


def test_a_member_mask_that_names_lanes_elsewhere():
    body = """
    mov.u32 r1, %tid.x; setp.lt.u32 p1, r1, 16; mov.u32 r2, 65535;
    @!p1 bra HIGH;
    shfl.sync.idx.b32 r20, r1, 0, 31, 131071;
    HIGH:
    """
    assert "member mask is 0x0001ffff, but only lanes 0x0000ffff" in failure(ptx(body + STORE), np.zeros(32, np.uint32))


# ---- barriers ----


def test_named_barriers_order_producers_and_consumers():
    # Warps 0 and 1 fill 64 words, warps 2 and 3 read them the other way round.
    body = """
    mov.u32 r1, %tid.x; mov.u32 r10, smem; setp.ge.u32 p1, r1, 64; mov.u32 r20, 0;
    @p1 bra CONSUMER;
    shl.b32 r2, r1, 2; add.u32 r2, r2, r10; mul.lo.u32 r3, r1, 3; st.shared.b32 [r2], r3;
    bar.arrive 1, 128; bra END;
    CONSUMER: bar.sync 1, 128;
    sub.u32 r2, 127, r1; shl.b32 r2, r2, 2; add.u32 r2, r2, r10; ld.shared.b32 r20, [r2];
    END:
    """
    for seed in range(10):
        out = np.zeros(128, np.uint32)
        launch(ptx(body + STORE, prologue=DYNAMIC), out, block=128, shared=1024, seed=seed)
        np.testing.assert_array_equal(out[64:], 3 * np.arange(63, -1, -1))


MISSING_ARRIVE = """
mov.u32 r10, smem; mov.u32 r1, %tid.x; setp.ne.u32 p1, r1, 0;
@p1 bra WAIT;
mbarrier.init.shared.b64 [r10], 2; mbarrier.arrive.shared.b64 d5, [r10];
WAIT: bar.sync 0;
L: mbarrier.try_wait.parity.shared.b64 p2, [r10], 0;
@!p2 bra L;
ret;
"""


def test_deadlock_report_names_line_barrier_and_phase():
    message = failure(ptx(MISSING_ARRIVE, prologue=DYNAMIC), block=64, shared=64)
    assert "deadlock" in message
    for warp in (0, 1):
        assert f"warp {warp} lanes 0xffffffff: PTX line 14, waits for mbarrier, phase (0x400, 0)" in message


def test_a_try_wait_that_nobody_answers_gives_up_once():
    """Code that only looks whether a phase is complete goes on."""
    body = """
    mov.u32 r10, smem; mov.u32 r20, 5; elect.sync r1|p3, -1;
    @p3 mbarrier.init.shared.b64 [r10], 1;
    bar.warp.sync -1;
    mbarrier.try_wait.parity.shared.b64 p2, [r10], 0; @p2 mov.u32 r20, 6;
    @p3 mbarrier.arrive.shared.b64 d5, [r10];
    mbarrier.try_wait.parity.shared.b64 p2, [r10], 0; @p2 add.u32 r20, r20, 10;
    """
    out = np.zeros(32, np.uint32)
    report = launch(ptx(body + STORE, prologue=DYNAMIC), out, shared=64)
    np.testing.assert_array_equal(out, 15)
    assert report.kernels[0]["poll_retries"] == 1


@pytest.mark.parametrize(
    "body, message",
    [
        ("mbarrier.arrive.shared.b64 d5, [r10];", "has not been initialised"),
        ("mbarrier.init.shared.b64 [r10], 0;", "count 0, allowed 1 to"),
        ("mbarrier.init.shared.b64 [r10], 1; mbarrier.arrive.shared.b64 d5, [r10], 2;", "2 arrivals, but only 1 of 1"),
        ("mbarrier.init.shared.b64 [r10+4], 1;", "not aligned to 8 bytes"),
        ("mbarrier.init.shared.b64 [r10+4096], 1;", "access to 8 bytes at 0x1400"),
        ("bar.sync 1, 33;", "33 threads, allowed are multiples of 32"),
        ("st.shared.b32 [r10+2], r20;", "not aligned to 4 bytes"),
        ("st.global.b32 [d0+4096], r20;", "4096 bytes into an array of 128 bytes"),
        ("ld.global.b64 d3, [d0+4];", "not aligned to 8 bytes"),
        ("setmaxnreg.dec.sync.aligned.u32 64; setmaxnreg.inc.sync.aligned.u32 24;", "inc to 24, the warp has 64"),
        ("trap;", "executed a trap"),
        ("mapa.shared::cluster.u32 r3, r10, 1; st.shared::cluster.b32 [r3], r20;", "names CTA 1 of a cluster of 1"),
    ],
)
def test_errors_carry_the_line(body, message):
    text = ptx("mov.u32 r10, smem; mov.u32 r20, 1; elect.sync r1|p1, -1; @!p1 bra END;\n" + body + "\nEND: ret;",
               prologue=DYNAMIC)  # fmt: skip
    if "sync" in body:  # instructions of a whole warp
        text = ptx("mov.u32 r10, smem;\n" + body + "\nret;", prologue=DYNAMIC)
    got = failure(text, np.zeros(32, np.uint32), shared=256)
    assert message in got and "PTX line 10]" in got and "CTA (0, 0, 0), warp 0" in got


def test_a_loop_without_end_is_stopped():
    assert "hang" in failure(ptx("L: add.u32 r1, r1, 1; bra L; ret;"))


@pytest.mark.slow  # a hundred million instructions
def test_a_loop_without_end_that_stores_is_stopped():
    body = "mov.u32 r10, smem; L: st.shared.b32 [r10], r10; bra L; ret;"
    assert "hang" in failure(ptx(body, prologue=DYNAMIC), shared=64)


@pytest.mark.parametrize("timing", [False, True])
def test_a_cluster_stops_at_its_limit(timing):
    body = "mov.u32 r10, smem; L: st.shared.b32 [r10], r10; bra L; ret;"
    got = failure(ptx(body, prologue=DYNAMIC), shared=64, limit=1000, timing=timing)
    assert "limit: more than 1000 instructions" in got and "PTX line" in got
    launch(ptx("ret;"), limit=1000, timing=timing)


# ---- what the loader refuses ----


@pytest.mark.parametrize(
    "line, message",
    [
        ("frobnicate.b32 r1, r2;", "frobnicate.b32: this instruction is not known"),
        ("add.rn.sat.magic.f32 f1, f2, f3;", "modifier .magic is not known"),
        ("add.s32 r1, r2, d3;", "operand d3 has 64 bits, expected 32"),
        ("add.s32 r1, r2, q7;", "unknown name q7"),
        ("add.s32 r1, r2;", "2 operands, expected 3"),
        ("bra NOWHERE;", "unknown label"),
        ("ld.shared.v2.b32 {r1, r2, r3}, [r4];", "3 registers, expected 2"),
        ("add.s32 r1, r2, ;", "expected an operand"),
        ("@r1 bra L;", "unknown predicate"),
        ("setmaxnreg.dec.sync.aligned.u32 20;", "20 registers, allowed are multiples of 8"),
        ("tcgen05.ld.sync.aligned.32x32b.x2.b32 {r1}, [r2];", "1 registers, expected 2"),
        ("wgmma.mma_async.sync.aligned.m64n12k16.f32.bf16.bf16 {f1}, d1, d2, 1, 1, 1, 0, 0;", "shape is not known"),
    ],
)
def test_unknown_forms_are_refused_with_their_line(line, message):
    with pytest.raises(emulator.EmulationError) as caught:
        emulator.load(b"", ptx(f"L: mov.u32 r1, 0;\n{line}\nret;"), "")
    assert message in str(caught.value) and "PTX line 10" in str(caught.value)


def test_damaged_objects_are_refused():
    text = ptx("ret;")
    for data in (b"x", b"\x7fELF" + bytes(60), b"\x7fELF\x02\x01\x01" + bytes(200)):
        with pytest.raises(emulator.EmulationError, match="host object"):
            emulator.load(data, text, "f")


@pytest.mark.parametrize("wait", [True, False])
def test_a_cta_must_not_end_before_its_shared_memory_has_been_read(wait):
    body = """
    mov.u32 r10, smem; mov.u32 r1, %tid.x; shl.b32 r2, r1, 2; add.u32 r2, r2, r10; st.shared.b32 [r2], r1;
    fence.proxy.async.shared::cta; bar.sync 0; elect.sync r3|p1, -1; @!p1 ret;
    cp.async.bulk.global.shared::cta.bulk_group [d0], [r10], 128; cp.async.bulk.commit_group;
    """ + ("cp.async.bulk.wait_group.read 0;" if wait else "")
    failures = 0
    for seed in range(10):
        out = np.zeros(32, np.uint32)
        try:
            launch(ptx(body + "ret;", prologue=DYNAMIC), out, shared=128, strict=True, seed=seed)
        except emulator.EmulationError as error:
            assert "may end before its shared memory has been read" in str(error)
            failures += 1
        else:
            np.testing.assert_array_equal(out, np.arange(32))
    assert (failures == 0) == wait


# ---- seeds and threads ----

TICKETS = """
mov.u32 r1, 1; elect.sync r2|p1, -1; mov.u32 r20, 0;
ld.param.u64 d1, [counter];
@p1 atom.global.add.u32 r20, [d1], 1;
shfl.sync.idx.b32 r20, r20, 0, 31, -1;
"""


def tickets(seed, threads):
    out = np.zeros((64, 32), np.uint32)
    counter = np.zeros(1, np.uint32)
    text = ptx(TICKETS + STORE, parameters=".param .u64 out, .param .u64 counter")
    report = emulator.load(b"", text, "").launch_kernel(
        "main", (64, 1, 1), (32, 1, 1), [ctypes.c_uint64(out.ctypes.data), ctypes.c_uint64(counter.ctypes.data)],
        [out, counter], settings=emulator.Settings(seed=seed, threads=threads),
    )  # fmt: skip
    assert counter[0] == 64
    return out[:, 0], report


def test_atomics_come_in_an_order_that_the_seed_fixes_at_any_thread_count():
    orders = []
    for seed in range(3):
        first, report = tickets(seed, 1)
        assert sorted(first) == list(range(64))
        for threads in (1, 2, 4):
            again, other = tickets(seed, threads)
            np.testing.assert_array_equal(first, again)
            assert other.kernels == report.kernels
        orders.append(tuple(first))
    assert len(set(orders)) == 3


def test_clusters_wait_for_each_other_through_global_memory():
    """Each CTA waits for the one before it: a chain of release and acquire."""
    body = """
    ld.param.u64 d1, [counter]; mov.u32 r1, %ctaid.x; elect.sync r2|p1, -1; @!p1 bra END;
    WAIT: ld.acquire.gpu.global.u32 r3, [d1]; setp.ne.u32 p2, r3, r1; @p2 bra WAIT;
    ld.global.u32 r4, [d0]; mul.lo.u32 r4, r4, 3; add.u32 r4, r4, r1; st.global.u32 [d0], r4;
    red.release.gpu.global.add.u32 [d1], 1;
    END: ret;
    """
    value = 1
    for i in range(20):
        value = (value * 3 + i) % 2**32
    for seed in range(3):
        out, counter = np.ones(1, np.uint32), np.zeros(1, np.uint32)
        emulator.load(b"", ptx(body, parameters=".param .u64 out, .param .u64 counter"), "").launch_kernel(
            "main", (20, 1, 1), (32, 1, 1), [ctypes.c_uint64(out.ctypes.data), ctypes.c_uint64(counter.ctypes.data)],
            [out, counter], settings=emulator.Settings(seed=seed),
        )  # fmt: skip
        assert out[0] == value


def test_distributed_shared_memory():
    body = """
    mov.u32 r10, smem; mov.u32 r1, %cluster_ctarank; mov.u32 r2, %tid.x; shl.b32 r3, r2, 2; add.u32 r3, r3, r10;
    add.u32 r4, r1, 1; and.b32 r4, r4, 3; mapa.shared::cluster.u32 r5, r3, r4;
    barrier.cluster.arrive; barrier.cluster.wait;
    mad.lo.u32 r6, r1, 100, r2; st.shared::cluster.u32 [r5], r6;
    barrier.cluster.arrive; barrier.cluster.wait;
    ld.shared.u32 r20, [r3];
    """
    out = np.zeros((8, 32), np.uint32)
    launch(ptx(body + STORE, prologue=DYNAMIC), out, grid=8, cluster=4, shared=128)
    expected = 100 * ((np.arange(8) + 3) % 4)[:, None] + np.arange(32)
    np.testing.assert_array_equal(out, expected)


# ---- tensor memory ----

TENSOR = """
mov.u32 r10, smem; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [r10], 32;
ld.shared.b32 r11, [r10]; mov.u32 r1, %tid.x; mul.lo.u32 r1, r1, 5;
tcgen05.st.sync.aligned.32x32b.x1.b32 [r11], {r1}; tcgen05.wait::st.sync.aligned;
tcgen05.ld.sync.aligned.32x32b.x1.b32 {r20}, [r11];
WAIT
add.u32 r20, r20, 1;
FREE
"""
FREE = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 r11, 32;"


def tensor(wait="tcgen05.wait::ld.sync.aligned;", free=FREE):
    return ptx(TENSOR.replace("WAIT", wait).replace("FREE", free) + STORE, target="sm_100a", prologue=DYNAMIC)


def test_a_strict_run_reports_a_missing_wait_for_a_tensor_memory_load():
    for strict in (False, True):
        out = np.zeros(32, np.uint32)
        launch(tensor(), out, shared=64, strict=strict)
        np.testing.assert_array_equal(out, 5 * np.arange(32) + 1)
    out = np.zeros(32, np.uint32)
    launch(tensor(wait=""), out, shared=64)  # hardware interlocks the registers
    np.testing.assert_array_equal(out, 5 * np.arange(32) + 1)
    for seed in range(5):
        assert "before tcgen05.wait::ld" in failure(tensor(wait=""), out, shared=64, strict=True, seed=seed)


def test_tensor_memory_leaks_and_double_frees():
    out = np.zeros(32, np.uint32)
    assert "32 columns allocated" in failure(tensor(free=""), out, shared=64)
    assert "PTX line" in failure(tensor(free=FREE + FREE), out, shared=64)
