"""The Hopper backward kernel: plans, machine code, and every case on the software GPU and on a real one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.sm90_cases import ARCH, CASES, FAST, backward_inputs, kernel_of, run, slow_unless

import jax_fa4
from jax_fa4 import accuracy, cases, compile, errors, plan, reference, sass
from jax_fa4.kernels.sm90.bwd.plan import SHARED_BYTES, backward_plan
from jax_fa4.spec import Arguments, AttentionSpec, make_spec

GRADIENTS = ("dq", "dk", "dv")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_head_dim_has_a_plan_within_the_budgets(dtype):
    for head_dim in range(8, 257, 8):
        for value_head_dim in (8, 64, head_dim, 256):
            chosen = backward_plan(AttentionSpec(dtype, head_dim, value_head_dim))
            assert chosen.tile_d >= head_dim and chosen.tile_e >= value_head_dim
            assert chosen.shared_bytes <= SHARED_BYTES
            registers = 128 * (chosen.producer_registers + chosen.consumers * chosen.consumer_registers)
            assert registers <= 65536


def test_a_plan_over_its_budget_says_both_numbers():
    chosen = backward_plan(AttentionSpec("bfloat16", 128, 128))
    with pytest.raises(ValueError, match=rf"needs \d+ bytes of shared memory, allowed are {SHARED_BYTES}"):
        dataclasses.replace(chosen, q_stages=4)


HEAD_DIMS = pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)


@pytest.mark.parametrize("head_dims", [(192, 128), (256, 256), (64, 256), (136, 200), (192, 64), (256, 192)], ids=str)
def test_warpgroups_of_a_wide_plan_share_all_of_dk_and_dv(head_dims):
    chosen = backward_plan(AttentionSpec("bfloat16", *head_dims))
    covered = {"dv": np.zeros((chosen.block_k, chosen.tile_e)), "dk": np.zeros((chosen.block_k, chosen.tile_d))}
    work = [0, 0]
    for share in chosen.shares:
        for group, (output, (column, key)) in enumerate(zip(share.outputs, share.starts, strict=True)):
            covered[output][key : key + share.keys, column : column + share.width] += 1
            work[group] += share.keys * share.width
    assert all((times == 1).all() for times in covered.values())
    assert work[0] == work[1]


@HEAD_DIMS
def test_products_do_not_wait_for_each_other(head_dims):
    """Where the assembler cannot follow products, it makes each wait for the one before: a fence for every product."""
    spec = AttentionSpec("bfloat16", *head_dims, scale=head_dims[0] ** -0.5)
    artifact = compile.artifact(spec, ARCH, plan.SizeClass.MANY_TILES, "backward")
    try:
        code = sass.disassemble(artifact.cubin)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert 0 < 3 * code.count("WARPGROUP.ARRIVE") < code.count("HGMMA")


@pytest.mark.parametrize("function, expected", [
    (lambda s, b, h, q, k: jnp.tanh(s) * (1 + h) + 0.5 * s * s, lambda s: 3 / np.cosh(s) ** 2 + s),
    (lambda s, b, h, q, k: jax.nn.silu(s) + jax.nn.relu(s),
     lambda s: (1 + np.exp(-s) * (1 + s)) / (1 + np.exp(-s)) ** 2 + (s > 0)),
], ids=["tanh", "silu plus relu"])  # fmt: skip
def test_the_slope_of_a_score_function_is_its_derivative(function, expected):
    from jax_fa4.kernels.common import scalar_check
    from jax_fa4.kernels.common.slope import slope
    from jax_fa4.scalar import ScalarFunction

    index = jax.ShapeDtypeStruct((), jnp.int32)
    jaxpr = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((), jnp.float32), index, index, index, index)
    derivative = slope(ScalarFunction(str(jaxpr), jaxpr, 0, function))
    scalar_check.check(derivative)
    for score in (-2.0, 0.3, 1.5):
        (got,) = jax.core.eval_jaxpr(derivative.jaxpr.jaxpr, derivative.jaxpr.consts, jnp.float32(score), 0, 2, 0, 0)
        assert got == pytest.approx(expected(score), rel=1e-5)


def test_two_query_heads_a_tile(software_gpu):
    """As where tiles are many (see `keys.tile_heads`)."""
    spec, operands, cotangents, gradients = emulate(CASES["causal"], 5, sm_count=2)
    assert spec.group == 2 and backward_plan(spec).pairs_heads
    assert too_large(gradients, spec, operands, cotangents) == []


@pytest.mark.parametrize(
    "name, head_dim, deterministic",
    [
        ("causal", 64, False),
        pytest.param("causal", 128, True, marks=pytest.mark.slow),
        pytest.param("full", 128, False, marks=pytest.mark.slow),
        pytest.param("mqa", 64, False, marks=pytest.mark.slow),
        pytest.param("causal", 192, False, marks=pytest.mark.slow),
        pytest.param("full", 256, False, marks=pytest.mark.slow),
    ],
)
def test_sums_of_later_sections_are_zeroed_in_time(name, head_dim, deterministic, software_gpu):
    """Sections of one head: all but the first are zeroed by tiles of earlier ones, on other multiprocessors too."""
    case = CASES[name].resized(B=2, S=150, T=300, D=head_dim, E=head_dim)
    spec, operands = make_spec(Arguments(**case.make(7)))
    spec = dataclasses.replace(spec, deterministic=deterministic)
    plan = backward_plan(spec)
    from jax_fa4.kernels.sm90.bwd.kernel import Backward  # needs the compiler, which a GPU machine may lack

    kernel = Backward(spec, dataclasses.replace(plan, l2_bytes=1))
    artifact = compile.compile_kernel(kernel, ARCH)
    for seed, sm_count in ((0, 1), (1, 3), (2, 2), (3, 5)):
        cotangents, gradients = emulated(artifact, case, spec, operands, seed, sm_count, strict=True)
        assert too_large(gradients, spec, operands, cotangents) == []


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_many_tiles_for_each_multiprocessor(deterministic, software_gpu):
    """More tiles than one section holds for one multiprocessor, and fewer for eight: both orders of work."""
    case = CASES["causal"].resized(S=260, T=1300)
    for sm_count in (1, 8):
        spec, operands, cotangents, gradients = emulate(case, 5, sm_count, deterministic=deterministic)
        assert too_large(gradients, spec, operands, cotangents) == []


def emulate(case: cases.Case, seed: int, sm_count: int = 3, **changes):
    """(spec, operands, cotangents, gradients) of one run on the software GPU."""
    spec, operands, artifact = kernel_of(case, "backward", seed, **changes)
    return spec, operands, *emulated(artifact, case, spec, operands, seed, sm_count)


def emulated(artifact, case: cases.Case, spec: AttentionSpec, operands, seed: int, sm_count: int, strict: bool = False):
    """(cotangents, gradients) of one run of an artifact on the software GPU."""
    cotangents, given = backward_inputs(spec, operands, seed)
    return cotangents, run(artifact, case.shape, operands, given, seed, sm_count, strict)


def too_large(results, spec, operands, cotangents):
    return [str(row) for row in accuracy.judge(results, spec, operands, cotangents) if not row.ok]


@pytest.mark.parametrize("name", slow_unless(FAST))
def test_case_on_the_software_gpu(name, software_gpu):
    spec, operands, cotangents, gradients = emulate(CASES[name], seed=1)
    assert too_large(gradients, spec, operands, cotangents) == []


@pytest.mark.slow
@pytest.mark.parametrize("head_dims", [(128, 128), (256, 256), (192, 128), (96, 96), (72, 128), (128, 96)], ids=str)
def test_wide_heads_on_the_software_gpu(head_dims, software_gpu):
    D, E = head_dims
    spec, operands, cotangents, gradients = emulate(CASES["causal"].resized(D=D, E=E), seed=2)
    assert too_large(gradients, spec, operands, cotangents) == []


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dims", [(256, 256), (192, 128), (64, 256), (136, 200)], ids=str)
@pytest.mark.parametrize("name", ["segments", "mqa", "lengths-window-sinks", "score-function"])
def test_wide_heads_in_variants(name, head_dims, deterministic, software_gpu):
    """Above 128 two warpgroups take turns with the blocks of queries; masks leave them odd and even counts."""
    D, E = head_dims
    spec, operands, cotangents, gradients = emulate(CASES[name].resized(D=D, E=E), 3, deterministic=deterministic)
    assert too_large(gradients, spec, operands, cotangents) == []


@pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name, lengths", [("kv-lengths", (130, 1300)), pytest.param("window", (130, 1100), marks=pytest.mark.slow)]
)
def test_dq_carried_past_tiles_without_steps_on_the_software_gpu(name, lengths, head_dim, software_gpu):
    """Several such tiles in a row, between tiles that carry a dQ: more than the numbers that are handed out ahead."""
    S, T = lengths
    case = CASES[name].resized(S=S, T=T, D=head_dim, E=head_dim)
    for sm_count, deterministic in ((1, False), (3, True)):
        spec, operands, cotangents, gradients = emulate(case, 6, sm_count, deterministic=deterministic)
        assert backward_plan(spec).carries_dq
        assert too_large(gradients, spec, operands, cotangents) == []


@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name, lengths",
    [("mqa", (200, 330))]
    + [
        pytest.param(name, lengths, marks=pytest.mark.slow)
        for name, lengths in (
            ("causal", (330, 330)), ("cross-causal", (190, 450)), ("window", (300, 700)), ("window-left", (500, 200)),
            ("window-runtime", (260, 260)), ("positions-window", (200, 420)), ("kitchen-sink", (300, 300)),
        )
    ],
)  # fmt: skip
def test_warpgroups_skip_blocks_that_see_none_of_their_keys(name, lengths, deterministic, software_gpu):
    """64 queries a step, 64 keys a warpgroup: below the diagonal, past a window."""
    S, T = lengths
    case = CASES[name].resized(S=S, T=T, D=128, E=128)
    spec, operands, cotangents, gradients = emulate(case, 7, sm_count=2, deterministic=deterministic)
    assert backward_plan(spec).skips_blocks
    assert too_large(gradients, spec, operands, cotangents) == []


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "name, lengths",
    [("full", (2100, 140)), ("causal", (4200, 140)), ("mqa", (4200, 140)), ("window", (300, 700))],
)
def test_long_sequences_on_the_software_gpu(name, lengths, deterministic, software_gpu):
    """D = 128, many steps a tile; and a narrow window."""
    S, T = lengths
    case = CASES[name].resized(S=S, T=T, D=128, E=128)
    spec, operands, cotangents, gradients = emulate(case, 4, deterministic=deterministic)
    assert too_large(gradients, spec, operands, cotangents) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "lengths-window-sinks"])
def test_deterministic_gradients_do_not_depend_on_the_order_of_execution(name, software_gpu):
    """Seeds order warps and asynchronous copies differently; tiles meet other blocks with another number of them."""
    case = CASES[name].resized(S=300, T=300)
    first = emulate(case, seed=3, deterministic=True)[3]
    for sm_count in (1, 64):
        other = emulate(case, 3, sm_count, deterministic=True)[3]
        for key, value in first.items():
            assert value.tobytes() == other[key].tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(CASES))
def test_case_on_the_gpu(name):
    """The accuracy rule, and, with deterministic=True, twenty runs bitwise equal."""
    arguments = CASES[name].make(seed=2)
    spec, operands = make_spec(Arguments(**arguments))
    cotangents = reference.cotangents(operands, 2)

    def gradients(deterministic):
        def call(q, k, v):
            given = {**arguments, "q": q, "k": k, "v": v, "deterministic": deterministic}
            return jax_fa4.attention(**given, return_lse=True, backend="cuda")

        return jax.jit(lambda q, k, v, do, dlse: jax.vjp(call, q, k, v)[1]((do, dlse)))

    inputs = (operands.q, operands.k, operands.v, *cotangents)
    try:
        got = dict(zip(GRADIENTS, gradients(False)(*inputs), strict=True))
    except errors.Unsupported as error:
        pytest.skip(str(error))
    assert too_large(got, spec, operands, cotangents) == []
    fixed = gradients(True)
    first = fixed(*inputs)
    assert too_large(dict(zip(GRADIENTS, first, strict=True)), spec, operands, cotangents) == []
    for _ in range(20):
        again = fixed(*inputs)
        assert all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(first, again, strict=True))
