"""The Hopper backward kernel where tiles are cut along their steps, so that no multiprocessor idles at the end."""

import dataclasses

import numpy as np
import pytest
from kernels.sm90_cases import ARCH, CASES, backward_inputs, reported

from jax_fa4 import accuracy, compile, emulator, masks
from jax_fa4.kernels.common import abi
from jax_fa4.kernels.common.planning import PieceCosts
from jax_fa4.kernels.sm90.bwd.plan import BackwardPlan, backward_plan
from jax_fa4.spec import Arguments, AttentionSpec, make_spec

cutlass = pytest.importorskip("cutlass", reason="needs the compiler: pip install nvidia-cutlass-dsl")
cute, Int32 = cutlass.cute, cutlass.Int32

from jax_fa4.kernels.common import key_tiles, last_wave  # noqa: E402
from jax_fa4.kernels.sm90.bwd import keys  # noqa: E402
from jax_fa4.kernels.sm90.bwd.kernel import Backward  # noqa: E402

PLAN = BackwardPlan(block_q=64, block_k=128, tile_d=64, tile_e=64, piece_costs=PieceCosts())
STEPS = 1009
SPEC = AttentionSpec("bfloat16", 64, 64)


class Listing:
    """Writes how many tiles are whole and in how many pieces the others are; then each number's tile and its steps."""

    buffers = (abi.Buffer("rows", "out", "int32", (("mul", 10, ("mul", "H", "T")), 5)),)

    @cute.jit
    def __call__(self, g, dims, stream):
        schedule = last_wave.cut(key_tiles.key_schedule(PLAN, SPEC, dims), PLAN, dims)
        self.kernel(g.rows, schedule).launch(grid=(schedule.count + 1, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, rows: cute.Tensor, schedule: last_wave.CutSchedule):
        number = cute.arch.block_idx()[0]
        if cute.arch.thread_idx()[0] == 0:
            if number == schedule.count:
                rows[0, 0], rows[0, 1], rows[0, 2] = schedule.count, schedule.whole, schedule.pieces
            else:
                tile, at = schedule.tile(number), number + 1
                rows[at, 0], rows[at, 1], rows[at, 2] = tile.head, tile.block, tile.slab
                rows[at, 3], rows[at, 4] = tile.part(Int32(STEPS))


@pytest.fixture(scope="module")
def listing(software_gpu):
    return compile.compile_kernel(Listing(), ARCH)


@pytest.mark.parametrize(
    "heads, blocks, steps, workers, whole, pieces",
    [
        (11, 3, 64, 32, 20, 8),  # one tile is left over, and twelve more are cut
        (11, 3, 39, 32, 33, 1),  # too short
        (8, 4, 64, 32, 32, 1),  # nothing is left over
        (2, 8, 16, 132, 0, 4),  # fewer tiles than workers
        (3, 8, 64, 132, 0, 5),
    ],
)
def test_tiles_that_are_cut(heads, blocks, steps, workers, whole, pieces, listing):
    dims = abi.Dims(1, 64 * steps, 128 * blocks, heads, heads, workers)
    rows = np.full(Listing.buffers[0].dims(dims), -1, np.int32)
    report = emulator.launch(listing, {"rows": rows}, dims, sm_count=workers)
    assert report.complaints == []
    count = whole + (heads * blocks - whole) * pieces
    assert rows[0, :3].tolist() == [count, whole, pieces]
    listed = rows[1 : count + 1].tolist()
    assert {(head, block) for head, block, *_ in listed} == {(h, b) for h in range(heads) for b in range(blocks)}
    assert [slab for _, _, slab, *_ in listed] == list(range(-whole, count - whole))
    assert all((skipped, steps) == (0, STEPS) for *_, skipped, steps in listed[:whole])
    bounds = [STEPS * i // pieces for i in range(pieces + 1)]
    for first in range(whole, count, pieces):
        tile = listed[first]
        parts = [[*tile[:2], tile[2] + i, bounds[i], bounds[i + 1] - bounds[i]] for i in range(pieces)]
        assert listed[first : first + pieces] == parts


class Heads:
    """Writes how many of 8 query heads that share a KV head a tile has."""

    buffers = (abi.Buffer("heads", "out", "int32", (1,)),)

    @cute.jit
    def __call__(self, g, dims, stream):
        plan = dataclasses.replace(PLAN, pairs_heads=True)
        self.kernel(g.heads, keys.tile_heads(plan, dims)).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, heads: cute.Tensor, number: Int32):
        heads[0] = number


def test_tiles_have_two_query_heads_where_tiles_are_many_and_short(software_gpu):
    artifact = compile.compile_kernel(Heads(), ARCH)
    for S, workers, expected in ((16384, 4, 2), (16385, 4, 1), (16384, 5, 1)):  # rows of 512 bytes, half of 32 MB
        heads = np.zeros(1, np.int32)
        emulator.launch(artifact, {"heads": heads}, abi.Dims(1, S, 512, 8, 1, workers))
        assert heads[0] == expected


def test_kernels_whose_tiles_differ_are_compiled_without_cutting():
    lengths = masks.Lengths(kv=True)
    equal, unequal = (masks.Full(), lengths), (masks.Causal(), masks.Window(64, None), lengths & masks.Segments())
    for mask in equal + unequal:
        spec = dataclasses.replace(SPEC, mask=masks.canonical(mask))
        plan = backward_plan(spec)
        buffers = {buffer.name for buffer in Backward(spec, plan).buffers}
        assert (plan.piece_costs is not None) == (mask in equal) == ("dk_slabs" in buffers)


def cut_up(case, **changes):
    """(spec, operands, given, cotangents, artifact) of a case whose kernel cuts tiles wherever that saves a step."""
    spec, operands = make_spec(Arguments(**case.make(seed=7)))
    spec = dataclasses.replace(spec, **changes)
    plan, free = backward_plan(spec), {"piece_costs": PieceCosts(tile=0, sums=0, slabs=1000, long=0)}
    plan = dataclasses.replace(plan, **free)
    cotangents, given = backward_inputs(spec, operands, 7)
    return spec, operands, given, cotangents, compile.compile_kernel(Backward(spec, plan), ARCH)


def in_all_forms():
    """(case, head dims, multiprocessors, sizes, changes of the spec)."""
    few, fixed = {"B": 1, "H": 3, "K": 3, "S": 300}, {"deterministic": True}
    one, lengths = {"B": 1, "H": 1, "K": 1}, {"H": 1, "K": 1, "S": 500, "T": 300}
    shared = {"B": 1, "H": 4, "K": 1, "S": 400, "T": 300}
    yield "full", 64, 64, 5, few, {}
    slow = [
        ("full", 64, 64, 4, few, fixed),
        ("full", 128, 128, 4, few, {}),
        ("full", 128, 128, 4, one | {"S": 2200, "T": 200}, {}),  # many steps a tile
        ("full", 128, 128, 3, one | {"S": 2200, "T": 200}, fixed),
        ("full", 256, 256, 5, few, {}),
        ("full", 256, 256, 5, few, fixed),
        ("full", 192, 128, 5, few, {"float32_out": True}),
        ("full", 64, 64, 5, few, {"float32_out": True}),
        ("cross", 192, 128, 5, few, fixed),
        ("kv-lengths", 64, 64, 31, lengths, {}),
        ("kv-lengths", 256, 256, 7, lengths, {}),
        ("no-keys", 128, 128, 5, few, fixed),
        ("score-function", 64, 64, 5, few, {}),
        ("mask-function", 128, 128, 5, few, {}),
        ("full", 64, 64, 5, shared, {}),
        ("full", 64, 64, 5, shared, fixed),
        ("full", 256, 256, 5, shared, {}),
    ]
    yield from (pytest.param(*case, marks=pytest.mark.slow) for case in slow)


@pytest.mark.parametrize("name, head_dim, value_head_dim, sm_count, sizes, changes", in_all_forms())
def test_gradients_of_cut_tiles(name, head_dim, value_head_dim, sm_count, sizes, changes, software_gpu):
    """Orders of warps and copies change nothing; a deterministic kernel's results are bitwise the same in each."""
    case = CASES[name].resized(D=head_dim, E=value_head_dim, **sizes)
    spec, operands, given, cotangents, artifact = cut_up(case, **changes)
    first = None
    for seed in range(3):
        gradients, report = reported(artifact, case.shape, operands, given, seed, sm_count, strict=True)
        assert [str(row) for row in accuracy.judge(gradients, spec, operands, cotangents) if not row.ok] == []
        sums = spec.group > 1 and not spec.deterministic  # to which query heads and pieces alike add
        added_up = any("add_up" in kernel["kernel"] for kernel in report.kernels)
        assert added_up != sums
        first = first or gradients
        assert not spec.deterministic or all(gradients[key].tobytes() == first[key].tobytes() for key in gradients)
