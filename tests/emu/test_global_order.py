"""What the judge says of clusters that meet in global memory (ffi/emu/judge/global_order.h): every missing step of the
patterns below is an error under every seed, whatever the order of execution was."""

import ctypes

import numpy as np
import pytest
from emu import emulated

from jax_fa4 import emulator


@pytest.fixture(scope="module", autouse=True)
def _library():
    emulated.require_library()


def run(body: str, seed: int, ctas: int = 2, strict: bool = False) -> np.ndarray:
    """Words: 0 to 7 are data, 8 a flag or ticket, 16 + CTA what each makes of it. One thread a CTA; r9: its number."""
    text = f""".version 8.8
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry main(.param .u64 out)
{{
.reg .pred p<8>; .reg .b32 r<32>; .reg .b64 d<8>;
ld.param.u64 d0, [out]; mov.u32 r0, smem; mov.u32 r9, %ctaid.x; setp.ne.u32 p0, r9, 0;
mov.u32 r1, 1; add.u32 r2, r9, 1; shl.b32 r3, r9, 2; cvt.u64.u32 d1, r3; add.u64 d1, d0, d1; mov.u32 r4, 0;
{body}
}}
"""
    out = np.zeros(32, np.uint32)
    emulator.load(b"", text, "").launch_kernel(
        "main", (ctas, 1, 1), (1, 1, 1), [ctypes.c_uint64(out.ctypes.data)], [out], shared_bytes=1024,
        settings=emulator.Settings(seed=seed, strict=strict),
    )  # fmt: skip
    return out


def missed(body: str, message: str) -> None:
    for seed in range(6):
        with pytest.raises(emulator.EmulationError, match=message):
            run(body, seed)


FIRST_WRITER = """
st.shared.v4.b32 [r0], {r2, r2, r2, r2}; fence.proxy.async.shared::cta;
@p0 bra SECOND;
cp.async.bulk.global.shared::cta.bulk_group [d0], [r0], 16; cp.async.bulk.commit_group;
WAIT
RELEASE
ret;
SECOND:
L: ACQUIRE setp.eq.u32 p1, r5, 0; @p1 bra L;
PROXY
cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [d0], [r0], 16; cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
ret;
"""
"""CTA 0 stores, CTA 1 adds when CTA 0's flag says so."""
RIGHT = {
    "WAIT": "cp.async.bulk.wait_group 0;", "RELEASE": "st.release.gpu.global.b32 [d0+32], r1;",
    "ACQUIRE": "ld.acquire.gpu.global.b32 r5, [d0+32];", "PROXY": "fence.proxy.async.global;",
}  # fmt: skip


def filled(body: str, **changed: str) -> str:
    for name, text in (RIGHT | changed).items():
        body = body.replace(name, text)
    return body


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"PROXY": "fence.proxy.async;"},
        {"RELEASE": "red.release.gpu.global.add.u32 [d0+32], r1;"},
        {"RELEASE": "fence.acq_rel.gpu; st.relaxed.gpu.global.b32 [d0+32], r1;"},
        {"RELEASE": "membar.gl; st.volatile.global.b32 [d0+32], r1;"},
        {"RELEASE": "st.release.gpu.global.b32 [d0+32], r4; st.relaxed.gpu.global.b32 [d0+32], r1;"},
        {"RELEASE": "atom.release.gpu.global.cas.b32 r6, [d0+32], r4, r1;"},
        {"ACQUIRE": "ld.relaxed.gpu.global.b32 r5, [d0+32]; fence.acq_rel.gpu;"},
        {"ACQUIRE": "atom.acquire.gpu.global.add.u32 r5, [d0+32], r4;"},
    ],
)
def test_a_first_writer_and_one_that_adds(changed):
    for seed in range(12):
        np.testing.assert_array_equal(run(filled(FIRST_WRITER, **changed), seed)[:4], 3)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"WAIT": ""}, "an addition to .* in cluster 0: its thread has not waited|a write of .* no release"),
        ({"WAIT": "cp.async.bulk.wait_group.read 0;"}, "its thread has not waited .*without .read|no release"),
        ({"WAIT": "cp.async.bulk.wait_group 1;"}, "its thread has not waited|no release"),
        ({"PROXY": ""}, "missing fence.proxy.async between the acquire and this bulk copy"),
        ({"PROXY": "fence.proxy.async.shared::cta;"}, "missing fence.proxy.async"),
        ({"PROXY": "", "ACQUIRE": "fence.proxy.async.global;" + RIGHT["ACQUIRE"]}, "missing fence.proxy.async"),
        ({"ACQUIRE": "ld.relaxed.gpu.global.b32 r5, [d0+32];"}, "no release by that cluster and acquire by this one"),
        ({"RELEASE": "st.relaxed.gpu.global.b32 [d0+32], r1;"}, "no release"),
        ({"RELEASE": "fence.acq_rel.cluster; st.relaxed.gpu.global.b32 [d0+32], r1;"}, "no release"),
        ({"WAIT": "", "RELEASE": RIGHT["RELEASE"] + RIGHT["WAIT"]}, "its thread has not waited|no release"),
    ],
)
def test_steps_of_it_that_are_missing(changed, message):
    missed(filled(FIRST_WRITER, **changed), message)


LAST_ARRIVER = """
st.global.b32 [d1], r2;
BEFORE
TICKET
setp.ne.u32 p1, r5, 2; @p1 ret;
AFTER
ld.global.b32 r6, [d0]; ld.global.b32 r7, [d0+4]; ld.global.b32 r8, [d0+8];
add.u32 r6, r6, r7; add.u32 r6, r6, r8; st.global.b32 [d0+64], r6;
ret;
"""
"""Three CTAs write their part; the last of them adds up."""
TICKET = "atom.{}.gpu.global.add.u32 r5, [d0+32], r1;"


@pytest.mark.parametrize(
    "before, ticket, after, right",
    [
        ("", "acq_rel", "", True),
        ("fence.acq_rel.gpu;", "relaxed", "fence.acq_rel.gpu;", True),
        ("membar.gl;", "relaxed", "membar.gl;", True),
        ("", "release", "fence.acq_rel.gpu;", True),
        ("", "relaxed", "", False),
        ("", "acquire", "", False),
        ("", "release", "", False),
        ("fence.acq_rel.gpu;", "relaxed", "", False),
        ("", "relaxed", "fence.acq_rel.gpu;", False),
        ("fence.acq_rel.cta;", "relaxed", "fence.acq_rel.gpu;", False),
    ],
)
def test_the_last_to_arrive(before, ticket, after, right):
    body = LAST_ARRIVER.replace("BEFORE", before).replace("TICKET", TICKET.format(ticket)).replace("AFTER", after)
    for seed in range(8):
        if right:
            assert run(body, seed, ctas=3)[16] == 6
        else:
            with pytest.raises(emulator.EmulationError, match="a read of .* no release by that cluster and acquire"):
                run(body, seed, ctas=3)


ALL_ADD = """
st.shared.v4.b32 [r0], {r2, r2, r2, r2}; fence.proxy.async.shared::cta;
cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [d0], [r0], 16; cp.async.bulk.commit_group;
WAIT
atom.acq_rel.gpu.global.add.u32 r5, [d0+32], r1;
setp.ne.u32 p1, r5, 2; @p1 ret;
ld.global.b32 r6, [d0]; st.global.b32 [d0+64], r6;
ret;
"""


def test_additions_are_in_no_order_but_their_sum_is_read_after_all():
    for seed in range(8):
        assert run(ALL_ADD.replace("WAIT", "cp.async.bulk.wait_group 0;"), seed, ctas=3)[16] == 6
        with pytest.raises(emulator.EmulationError, match="race: .*(wait_group without .read|no release)"):
            run(ALL_ADD.replace("WAIT", "cp.async.bulk.wait_group.read 0;"), seed, ctas=3)


BOTH_WRITE = "st.global.b32 [d0], r2; READ ret;"


ADD = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [d0], [r0], 16; cp.async.bulk.commit_group;"
IN_ORDER = """
mov.u32 r2, 0f4b800000; st.shared.v4.b32 [r0], {r2, r2, r2, r2}; fence.proxy.async.shared::cta;
@p0 bra SECOND;
ADD
WAIT
RELEASE
ret;
SECOND:
L: ACQUIRE setp.eq.u32 p1, r5, 0; @p1 bra L;
mov.u32 r2, 0f3f800000; st.shared.v4.b32 [r0], {r2, r2, r2, r2}; fence.proxy.async;
ADD cp.async.bulk.wait_group 0;
ADD cp.async.bulk.wait_group 0;
ret;
""".replace("ADD", ADD)
"""CTA 0 adds 2^24, then CTA 1 adds one twice, to zero: 2^24; had CTA 1 been first, 2 more."""


def test_a_release_may_come_before_an_addition_that_nobody_waited_for():
    """The judge asks for no order of additions; who wants the same bits in every run does."""
    sums = {}
    for wait in ("", ".read"):
        body = filled(IN_ORDER, WAIT=f"cp.async.bulk.wait_group{wait} 0;")
        sums[wait] = {int(run(body, seed)[0]) for seed in range(20)}
    assert sums == {"": {0x4B800000}, ".read": {0x4B800000, 0x4B800001}}


def test_two_that_write_the_same_word():
    assert run(BOTH_WRITE.replace("READ", ""), 0)[0] in (1, 2)
    with pytest.raises(emulator.EmulationError, match="a write of .* no release"):
        run(BOTH_WRITE.replace("READ", ""), 0, strict=True)
    missed(BOTH_WRITE.replace("READ", "ld.global.b32 r3, [d0];"), "a (read|write) of .* no release")


REUSED = """
@p0 bra SECOND;
ld.global.b32 r5, [d0]; RELEASE
ret;
SECOND:
L: ACQUIRE setp.eq.u32 p1, r5, 0; @p1 bra L;
st.global.b32 [d0], r1;
ret;
"""


def test_what_others_still_read_is_not_overwritten():
    run(filled(REUSED), 0)
    relaxed = "ld.relaxed.gpu.global.b32 r5, [d0+32];"
    missed(filled(REUSED, ACQUIRE=relaxed), "a write of .* line [0-9]+ read in cluster 0: no release")


def test_words_of_their_own_and_old_contents_need_no_order():
    out = run("ld.global.b32 r5, [d0+32]; st.global.b32 [d1], r2; ret;", 0, ctas=8)
    np.testing.assert_array_equal(out[:8], np.arange(1, 9))
