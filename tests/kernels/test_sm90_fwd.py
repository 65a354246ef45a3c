"""The Hopper forward kernel: plans, machine code, and every case on the software GPU and on a real one."""

import dataclasses

import jax
import numpy as np
import pytest
from kernels.sm90_cases import CASES, FAST, kernel_of, reported, run, slow_unless

import jax_fa4
from jax_fa4 import accuracy, cases, compile, errors, masks
from jax_fa4.kernels.common.planning import Cutting
from jax_fa4.kernels.sm90 import plans
from jax_fa4.spec import Arguments, AttentionSpec, make_spec


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_head_dim_has_a_plan_within_the_budgets(dtype):
    for head_dim in range(8, 257, 8):
        for value_head_dim in (8, 64, head_dim, 256):
            for group in (1, 3, 4, 7):
                spec = AttentionSpec(dtype, head_dim, value_head_dim, group)
                chosen = plans.forward_plan(spec)
                assert chosen.tile_dim >= head_dim and chosen.value_tile_dim >= value_head_dim
                assert chosen.packed_heads in (1, group)
                assert chosen.shared_bytes <= plans.SHARED_BYTES


def test_a_plan_over_its_budget_says_both_numbers():
    chosen = plans.forward_plan(AttentionSpec("bfloat16", 128, 128))
    with pytest.raises(ValueError, match=rf"needs \d+ bytes of shared memory, a block has {plans.SHARED_BYTES}"):
        dataclasses.replace(chosen, stages=8)
    with pytest.raises(ValueError, match="block_k=24"):
        dataclasses.replace(chosen, block_k=24)


@pytest.mark.parametrize(
    "head_dim, value_head_dim, group, buffered",
    [(64, 64, 1, True), (128, 128, 16, True), (64, 64, 48, True), (64, 64, 3, False), (96, 96, 1, False),
     (192, 128, 1, False), (256, 256, 1, False)],
)  # fmt: skip
def test_output_has_a_buffer_where_there_is_room_and_a_warps_rows_are_a_box(head_dim, value_head_dim, group, buffered):
    chosen = plans.forward_plan(AttentionSpec("bfloat16", head_dim, value_head_dim, group))
    assert chosen.buffers_output == buffered
    if buffered:
        rows, _ = chosen.store_tile
        heads, positions = (1, rows) if chosen.packed_heads == 1 else rows
        assert heads * positions == 16 and chosen.packed_heads % heads == 0


@pytest.mark.parametrize(
    "mask, longest_first",
    [
        (masks.Full(), False),
        (masks.Causal(), True),
        (masks.Window(None, 100), True),
        (masks.Window(100, 0), False),
        (masks.Causal() & masks.Window(100, None), False),
        (masks.Causal() & masks.Lengths(True, True), True),
    ],
)
def test_tiles_of_unequal_length_are_handed_out_longest_first(mask, longest_first):
    spec = AttentionSpec("bfloat16", 128, 128, mask=masks.canonical(mask))
    assert plans.forward_plan(spec).longest_first == longest_first


def emulate(case: cases.Case, seed: int, sm_count: int = 3, order: int = 0, strict: bool = False):
    """(spec, operands, results) of one run on the software GPU; `order` seeds the order of execution."""
    spec, operands, artifact = kernel_of(case, "forward", seed)
    return spec, operands, run(artifact, case.shape, operands, {}, order, sm_count, strict)


@pytest.mark.parametrize("name", slow_unless(FAST))
def test_case_on_the_software_gpu(name, software_gpu):
    spec, operands, results = emulate(CASES[name], seed=1)
    assert [str(row) for row in accuracy.judge(results, spec, operands) if not row.ok] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "segments", "lengths-causal"])
def test_results_do_not_depend_on_the_order_of_execution(name, software_gpu):
    """Warps and asynchronous copies take another order, and tiles other CTAs."""
    case = CASES[name]
    first = emulate(case, seed=3)[2]
    for order, sm_count in ((1, 3), (2, 1), (3, 64)):
        other = emulate(case, 3, sm_count, order)[2]
        for key, value in first.items():
            assert value.tobytes() == other[key].tobytes()


@pytest.mark.parametrize("name", slow_unless(FAST))
def test_strict_runs_have_no_complaint(name, software_gpu):
    for order in range(4):
        emulate(CASES[name], 3, sm_count=1 + order, order=order, strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("group, head_dim", [(16, 128), (48, 64), (128, 256)])
def test_many_heads_in_a_tile(group, head_dim, software_gpu):
    """A warp's rows hold as many heads of a position, or a part of them."""
    shape = cases.Shape(B=1, S=11, T=150, H=group, K=1, D=head_dim, E=head_dim)
    case = dataclasses.replace(CASES["causal"], name="many-heads", shape=shape)
    spec, operands, results = emulate(case, seed=5)
    assert [str(row) for row in accuracy.judge(results, spec, operands) if not row.ok] == []


CUT = {
    "full": cases.Shape(B=1, S=150, T=700, H=2, K=2, D=128, E=128),
    "causal": cases.Shape(B=2, S=1, T=1500, H=8, K=2, D=64, E=64),  # decoding
    "sinks": cases.Shape(B=2, S=40, T=600, H=6, K=2, D=64, E=64),
    "d256": cases.Shape(B=1, S=200, T=400, H=2, K=1, D=256, E=256),
    "d192-e128": cases.Shape(B=1, S=130, T=500, H=2, K=2, D=192, E=128),
}
"""Lengths with which tiles are cut into several pieces; with those of other cases there are more pieces than blocks."""

SHORT_CUT = (
    "lengths-window-sinks", "lengths-causal", "segments", "segments-unsorted", "window-runtime", "sinks-no-keys",
    "no-keys", "positions-window", "mask-operands", "kitchen-sink", "odd-group", "d64-e32", "one-key",
)  # fmt: skip


def cut_wherever_possible(plan: plans.ForwardPlan) -> plans.ForwardPlan:
    return dataclasses.replace(plan.few or plan, cutting=Cutting(least_blocks=1, gain_blocks=1))


@pytest.mark.parametrize("float32_out", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ("full", "causal") else pytest.mark.slow) for n in (*CUT, *SHORT_CUT)]
)
def test_tiles_are_cut_along_the_keys(name, float32_out, software_gpu):
    """Outputs and scratch are poisoned; whatever the number of multiprocessors, several runs are bitwise equal."""
    fwd = pytest.importorskip("jax_fa4.kernels.sm90.fwd", reason="needs the compiler: pip install nvidia-cutlass-dsl")
    case = dataclasses.replace(CASES[name], shape=CUT.get(name, CASES[name].shape))
    spec, operands = make_spec(Arguments(**case.make(7)))
    spec = dataclasses.replace(spec, float32_out=float32_out)
    kernel = fwd.Forward(spec, cut_wherever_possible(plans.forward_plan(spec)))
    artifact = compile.compile_kernel(kernel, "sm_90a")
    for sm_count in (3, 5, 32):
        first = run(artifact, case.shape, operands, {}, 0, sm_count, strict=True)
        assert [str(row) for row in accuracy.judge(first, spec, operands) if not row.ok] == []
        for order in (1, 3):
            again = run(artifact, case.shape, operands, {}, order, sm_count, strict=True)
            assert all(first[key].tobytes() == again[key].tobytes() for key in first)


def test_plans_cut_where_it_pays():
    plan_of = lambda dim, *parts: plans.forward_plan(  # noqa: E731
        AttentionSpec("bfloat16", dim, dim, mask=masks.canonical(masks.And(parts) if parts else masks.Full()))
    )
    for chosen in (plan_of(128), plan_of(256), plan_of(128, masks.Lengths(True, True))):
        assert chosen.cutting and chosen.few is None
    for dim, mask in ((64, masks.Full()), (64, masks.Causal()), (128, masks.Causal()), (128, masks.Window(9, 9))):
        chosen = plan_of(dim, mask)
        assert chosen.cutting is None and chosen.few.cutting.gain_percent > 0
    assert plan_of(128, masks.Segments()).cutting is plan_of(128, masks.Segments()).few is None


def test_the_kernel_is_picked_by_the_number_of_tiles(software_gpu):
    """Decoding: one tile of 13 KV blocks, of which four multiprocessors save nine, two six."""
    case = dataclasses.replace(CASES["causal"], shape=cases.Shape(B=1, S=1, T=1600, H=4, K=1, D=128, E=128))
    spec, operands, artifact = kernel_of(case, "forward")
    for sm_count, combines in ((1, False), (2, False), (4, True)):
        results, report = reported(artifact, case.shape, operands, {}, 0, sm_count)
        assert any("Combine" in kernel["kernel"] for kernel in report.kernels) == combines
        assert [str(row) for row in accuracy.judge(results, spec, operands) if not row.ok] == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(CASES))
def test_case_on_the_gpu(name):
    """The accuracy rule, and twenty runs bitwise equal."""
    arguments = CASES[name].make(seed=2)
    spec, operands = make_spec(Arguments(**arguments))
    try:
        run = jax.jit(lambda o: jax_fa4.attention(**{**arguments, "q": o[0], "k": o[1], "v": o[2]}, return_lse=True,
                                                  backend="cuda"))  # fmt: skip
        o, lse = run((operands.q, operands.k, operands.v))
    except errors.Unsupported as error:
        pytest.skip(str(error))
    assert [str(row) for row in accuracy.judge({"o": o, "lse": lse}, spec, operands) if not row.ok] == []
    for _ in range(20):
        again = run((operands.q, operands.k, operands.v))
        assert all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip((o, lse), again, strict=True))
