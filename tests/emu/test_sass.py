"""Machine code, counted through the assembler's line table."""

import collections
import ctypes

import numpy as np
import pytest
from emu import emulated

from jax_fa4 import counting, emulator, plan, sass, spec
from jax_fa4.kernels.common.abi import Dims

LISTING = """\
//--------------------- .text.other  --------------------------
\t.section\t.text.other,"ax",@progbits
.text.other:
\t//## File ".nv_debug_ptx_txt", line 3
        /*0000*/                   MUFU.EX2 R1, R2 ;
//--------------------- .text.main  --------------------------
\t.section\t.text.main,"ax",@progbits
.text.main:
\t//## File ".nv_debug_ptx_txt", line 10
        /*0000*/                   S2R R3, SR_TID.X ;
.L_x_0:
\t//## File ".nv_debug_ptx_txt", line 12
        /*0010*/                   LDS R1, [R3] ;
\t//## File ".nv_debug_ptx_txt", line 10
        /*0020*/                   IADD3 R4, PT, PT, R3, 0x1, RZ ;
\t//## File ".nv_debug_ptx_txt", line 13
        /*0030*/              @!P0 FFMA2 R6, R6, R8, R10 ;
        /*0040*/               @P0 BRA `(.L_x_0) ;
\t//## File ".nv_debug_ptx_txt", line 20
        /*0050*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R0 ;
        /*0060*/                   EXIT ;
.L_x_1:
        /*0070*/                   NANOSLEEP 0x14 ;
        /*0080*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R0 ;
        /*0090*/                   BRA `(.L_x_1) ;
"""
KERNEL = {"kernel": "main", "ctas": 2, "lines": [[10, 8], [12, 100], [13, 100], [20, 8]],
          "line_warps": [0b1111, 0b0010, 0b0010, 0b1111], "votes": [[12, 100, 7]]}  # fmt: skip


@pytest.fixture
def listed(monkeypatch):
    monkeypatch.setattr(sass, "disassemble", lambda cubin: LISTING)


def test_blocks_run_as_often_as_their_lines(listed):
    found = sass.work(b"", KERNEL, {"load": range(1), "compute": range(1, 2)})
    # The addition was moved into the loop; the loop's load says how often it ran there. The retry's block is left out.
    assert found.executed["compute"] == {"LDS": 100, "IADD3": 100, "FFMA2": 100, "BRA": 100}
    assert found.executed["load, compute, other warps"] == {"S2R": 8, "SYNCS": 8, "EXIT": 8}
    assert found.pipes("compute") == {"shared_memory": 100, "alu": 100, "fma_packed": 100, "control": 100}
    assert found.pipes()["barrier"] == 8 and found.agreement == pytest.approx(1 - 100 / 424)
    # 100 warp instructions of the packed pipe, 64 lanes a cycle, on two multiprocessors.
    assert found.bound_cycles(100, 148)["fma"] == 32 * 100 / 64 / 2
    assert "fma packed" in str(found)


def test_refusals(listed):
    with pytest.raises(ValueError, match="no kernel absent"):
        sass.work(b"", KERNEL | {"kernel": "absent"})
    with pytest.raises(ValueError, match="--generate-line-info"):
        sass.blocks(".text.main:\n        /*0000*/                   EXIT ;\n", "main")
    with pytest.raises(ValueError, match="not of the same kernel"):
        sass.line_map("mov.u32 a, b;\n", ".loc 1 2 3\nmov.u32 a, c;\n")


def test_lines_with_and_without_the_table():
    assert sass.line_map("a;\nb;\n\nc;", ".file 1 x\na;\n.loc 1 2 3\n\nb;\nc;\n.section x {}\n") == {1: 2, 2: 5, 4: 6}


def test_votes_are_counted():
    emulated.require_library()
    text = """.version 8.8
.target sm_90a
.address_size 64
.visible .entry main(.param .u64 out) {
.reg .b32 t; .reg .pred p, q;
mov.u32 t, %tid.x;
setp.lt.u32 p, t, 40;
vote.sync.any.pred q, p, -1;
vote.sync.all.pred q, p, -1;
vote.sync.all.pred q, !p, -1;
.loc 1 20 0
{
.reg .b32 t;
mov.u32 t, 1;
}
ret; }"""
    out = np.zeros(1, np.uint32)
    report = emulator.load(b"", text, "").launch_kernel(
        "main", (2, 1, 1), (96, 1, 1), [ctypes.c_uint64(out.ctypes.data)], [out]
    )
    (kernel,) = report.kernels
    assert kernel["votes"] == [[8, 6, 4], [9, 6, 2], [10, 6, 2]]
    roles = {"first": range(1), "second": range(1, 2)}
    assert counting.votes(kernel, roles) == {"first, second, other warps": [(8, 6, 4), (9, 6, 2), (10, 6, 2)]}
    shuffles = {role: units["shuffle"] for role, units in counting.by_role(kernel, roles).items()}
    assert shuffles == {"first": 6, "second": 6, "other warps": 6}
    assert "first, second, other warps: 4 of 6 votes came out true (PTX line 8)" in counting.role_table(kernel, roles)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_what_the_assembler_keeps_is_counted_alike(arch):
    pytest.importorskip("cutlass")
    emulated.require_library()
    try:
        sass.nvdisasm()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    rows, width, size = 512, 128, plan.SizeClass.MANY_TILES
    what = spec.AttentionSpec("bfloat16", width, width, scale=width**-0.5)
    artifact = sass.compile_with_lines(what, arch, size, "forward")
    dims = Dims(1, rows, rows, 1, 1, 4)
    rng = np.random.default_rng(0)
    arrays = {b.name: rng.standard_normal(b.dims(dims), np.float32).astype(np.dtype(b.dtype)) for b in artifact.buffers
              if b.kind != "scratch"}  # fmt: skip
    report = emulator.launch(artifact, arrays, dims, sm_count=4)
    (kernel,) = report.kernels
    found = sass.work(artifact.cubin, kernel, plan.choose_plan(what, arch, size, "forward").roles)
    opcodes = sum(found.executed.values(), start=collections.Counter())
    products = sum(kernel["mma"].values())
    assert opcodes["UTCHMMA" if arch == "sm_100a" else "HGMMA"] == products * (1 if arch == "sm_100a" else 4)
    assert opcodes["LDTM"] == kernel["units"]["tensor_memory_load"]
    assert opcodes["STTM"] == kernel["units"]["tensor_memory_store"]
    # Integer divisions take a reciprocal each: a few in the prologue of a tile.
    assert kernel["units"]["mufu"] <= opcodes["MUFU"] <= 1.02 * kernel["units"]["mufu"]
    assert found.agreement > 0.97
    assert sum(found.pipes().values()) < kernel["instructions"]  # moves are gone
    # The same run as if it had been of the kernel without line info.
    plain = "\n".join(line for line in artifact.ptx.splitlines() if sass._is_code(line))
    lines = sass.line_map(plain, artifact.ptx)
    back = {new: old for old, new in lines.items()}
    moved = kernel | {"lines": [[back[line], n] for line, n in kernel["lines"]],
                      "votes": [[back[line], n, m] for line, n, m in kernel["votes"]]}  # fmt: skip
    assert sass.work(artifact.cubin, moved, None, lines).pipes() == found.pipes()
