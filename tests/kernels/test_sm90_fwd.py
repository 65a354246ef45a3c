"""The Hopper forward kernel: plans, machine code, and every case on the software GPU and on a real one."""

import dataclasses

import jax
import numpy as np
import pytest
from kernels.sm90_cases import CASES, FAST, kernel_of, run, slow_unless

import jax_fa4
from jax_fa4 import accuracy, cases, errors, masks
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


@pytest.mark.parametrize("name", slow_unless(("causal",)))
def test_machine_code_spills_at_most_a_few_words(name):
    """With three consumer warpgroups (D = 64) a few words are spilled once a tile, outside the loops over KV blocks."""
    _, _, artifact = kernel_of(CASES[name], "forward")
    assert all(kernel.stack_bytes <= 16 for kernel in artifact.kernels)


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
