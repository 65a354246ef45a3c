"""Memory that was never written: an error where its value reaches a store, branch or address, not where it is read."""

import ctypes

import numpy as np
import pytest
from emu import emulated

from jax_fa4 import emulator

HEAD = """.version 8.8
.target sm_100a
.address_size 64
.shared .align 128 .b8 tile[1024];
.visible .entry main(.param .u64 results) {
.reg .b32 at, a, b, c, d, e, f, tid, taddr; .reg .b64 out, offset, wide; .reg .b16 h; .reg .pred p, q, first;
ld.param.u64 out, [results];
mov.u32 tid, %tid.x;
mul.wide.u32 offset, tid, 4;
add.s64 out, out, offset;
mov.b32 at, tile;
mov.b32 b, 7;
setp.eq.u32 first, tid, 0;
"""
READ = "ld.shared.b32 a, [at+16];\n"
READ_TENSOR = """mov.b32 c, tile;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [c], 64;
tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
ld.shared.b32 taddr, [c];
tcgen05.st.sync.aligned.32x32b.x1.b32 [taddr], {b};
tcgen05.wait::st.sync.aligned;
tcgen05.ld.sync.aligned.32x32b.x2.b32 {e, a}, [taddr];
tcgen05.wait::ld.sync.aligned;
"""
FREE = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 taddr, 64;\n"
STORE = "st.global.b32 [out], {};\n"


@pytest.fixture(scope="module", autouse=True)
def _library():
    emulated.require_library()


def run(body: str, warps: int = 1) -> np.ndarray:
    out = np.zeros(32 * warps, np.uint32)
    emulator.load(b"", HEAD + body + "ret; }", "").launch_kernel(
        "main", (1, 1, 1), (32 * warps, 1, 1), [ctypes.c_uint64(out.ctypes.data)], [out]
    )
    return out


HARMLESS = {
    "read and forgotten": READ + STORE.format("b"),
    "overwritten": READ + "add.s32 c, a, 1;\nmov.b32 c, b;\n" + STORE.format("c"),
    "not selected": READ + "setp.eq.u32 p, b, 7;\nselp.b32 c, b, a, p;\n" + STORE.format("c"),
    "written before": "st.shared.b32 [at+16], b;\n" + READ + STORE.format("a"),
    "another part of a vector": "st.shared.b32 [at+16], b;\nld.shared.v2.b32 {a, c}, [at+16];\n" + STORE.format("a"),
    "another register of a tensor load": READ_TENSOR + STORE.format("e") + FREE,
}


@pytest.mark.parametrize("body", HARMLESS.values(), ids=HARMLESS)
def test_what_is_not_used_is_no_error(body):
    assert run(body).tolist() == [7] * 32


USES = {
    "a store": STORE.format("a"),
    "a store of what was computed from it": "add.s32 c, a, 1;\nxor.b32 c, c, b;\n" + STORE.format("c"),
    "a store to shared memory": "st.shared.b32 [at+64], a;\n",
    "a store, through a pair": "mov.b64 wide, {b, a};\nshr.u64 wide, wide, 32;\nst.global.b64 [out], wide;\n",
    "a store, selected": "setp.eq.u32 p, b, 7;\nselp.b32 c, a, b, p;\n" + STORE.format("c"),
    "a store, selected by it": "setp.eq.u32 p, a, 7;\nselp.b32 c, b, 1, p;\n" + STORE.format("c"),
    "a store, written under its condition": "setp.eq.u32 p, a, 7;\nmov.b32 c, 1;\n@p mov.b32 c, 2;\n"
    + STORE.format("c"),
    "a store, of one lane's": "mov.b32 c, 1;\n@first mov.b32 c, a;\n" + STORE.format("c"),
    "a store, through a shuffle": "shfl.sync.idx.b32 c, a, 3, 31, -1;\n" + STORE.format("c"),
    "a branch": "setp.eq.u32 p, a, 0;\n@p bra done;\n" + STORE.format("b") + "done:\n",
    "a branch, through a vote": "setp.eq.u32 p, a, 0;\nvote.sync.any.pred q, p, -1;\n@q bra done;\n"
    + STORE.format("b") + "done:\n",
    "an address": "and.b32 a, a, 124;\nadd.s32 c, at, a;\nld.shared.b32 d, [c];\n",
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_where_it_is_used_is_named(use):
    kind = next(name for name, text in USES.items() if text == use).split(",")[0].split(" of ")[0].split(" to ")[0]
    line = HEAD.count("\n") + 1
    shared = rf"shared memory: nothing was ever written at 0x410, .* at PTX line {line}; the value reaches {kind}"
    with pytest.raises(emulator.EmulationError, match=shared):
        run(READ + use)
    tensor = r"tensor memory: nothing was ever written at 0x0, .* the value reaches " + kind
    with pytest.raises(emulator.EmulationError, match=tensor):
        run(READ_TENSOR + use)


def test_other_warps_and_lanes_are_not_concerned():
    # One lane reads what was never written, and only the others store.
    body = "st.shared.b32 [at], b;\n@first add.s32 at, at, 16;\nld.shared.b32 a, [at];\n@!first " + STORE.format("a")
    assert run(body).tolist() == [0] + [7] * 31
    # The first warp reads it and forgets it; the second stores what it had before.
    first = "mov.b32 a, 7;\nsetp.lt.u32 p, tid, 32;\n@!p bra others;\n" + READ + "mov.b32 a, b;\nothers:\n"
    body = first + STORE.format("a")
    assert run(body, warps=2).tolist() == [7] * 64


def test_asynchronous_readers_are_refused_at_once():
    body = "@first cp.async.bulk.global.shared::cta.bulk_group [out], [at], 128;\ncp.async.bulk.commit_group;\n"
    with pytest.raises(emulator.EmulationError, match="nothing was ever written at 0x400"):
        run(body + "cp.async.bulk.wait_group 0;\n")
