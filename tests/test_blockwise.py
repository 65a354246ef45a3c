"""The XLA backend against the float64 oracle, and its costs that do not depend on the machine."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blocks import blocks_of

import jax_fa4
from jax_fa4 import accuracy, blockwise, cases, reference
from jax_fa4.masks import Causal
from jax_fa4.spec import Arguments, AttentionSpec, make_spec

QUICK = {
    "causal-huge", "d16-e8", "long-query-causal", "window-runtime-causal", "bias-infinite", "positions",
    "mask-operands", "kitchen-sink", "everything", "no-batch", "no-rows", "no-columns", "no-heads"}
"""Cases that between them touch every branch of the backend; the others are slow tests."""


@pytest.fixture
def small_blocks():
    """Several blocks a side at test sizes."""
    with blocks_of(48, 16):
        yield


def check(case):
    bad = [f"{case.name} {row}" for row in accuracy.check(case.make(), "xla") if not row.ok]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("case", [c for c in cases.CASES if c.name in QUICK], ids=lambda c: c.name)
def test_case(case, small_blocks):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in cases.CASES if c.name not in QUICK], ids=lambda c: c.name)
def test_other_case(case, small_blocks):
    check(case)


def test_float64(small_blocks):
    """With every variant: indices that JAX makes are 64 bits wide."""
    case = next(case for case in cases.CASES if case.name == "everything")
    with jax.enable_x64(True):
        check(dataclasses.replace(case, dtype="float64"))


@pytest.mark.parametrize("case", [c for c in cases.CASES if c.name in {"kitchen-sink", "positions", "bias", "full"}],
                         ids=lambda c: c.name)
def test_without_implicit_promotion(case):
    """Programs may forbid JAX to promote ranks and dtypes."""
    arguments = case.make()
    q, k, v = (jnp.asarray(arguments.pop(name)) for name in "qkv")

    def loss(q, k, v):
        o, lse = jax_fa4.attention(q, k, v, **arguments, return_lse=True, backend="xla")
        return o.sum().astype(jnp.float32) + lse.sum()

    want = jax.eval_shape(jax.grad(loss, (0, 1, 2)), q, k, v)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        assert jax.eval_shape(jax.grad(loss, (0, 1, 2)), q, k, v) == want


def test_quick_cases_exist_and_cover_every_variant():
    assert {c.name for c in cases.CASES} >= QUICK
    everywhere = {tag for c in cases.CASES for tag in c.variants}
    assert everywhere == set(cases.VARIANTS)


def test_one_block_and_uneven_blocks_agree():
    arguments = cases.Case("", ("causal", "sinks"), cases.Shape(S=53, T=61, D=16, E=16), "float32").make()
    spec, operands = make_spec(Arguments(**arguments))
    whole = blockwise.forward(spec, operands)
    with blocks_of(8):
        for one, other in zip(whole, blockwise.forward(spec, operands), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6)


def test_symbolic_sizes(small_blocks):
    """A program for any batch and lengths, as `jax.export` makes it."""
    batch, rows, columns = jax.export.symbolic_shape("b, s, t")
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (
        (batch, rows, 4, 8), (batch, columns, 2, 8), (batch, columns, 2, 8), (batch, 4, rows, columns))]

    def gradients(q, k, v, bias, lengths):
        def total(q, k, v, bias):
            o = jax_fa4.attention(q, k, v, bias=bias, causal=True, window=(20, None), kv_lengths=lengths)
            return jnp.sin(o).sum()

        return jax.grad(total, (0, 1, 2, 3))(q, k, v, bias)

    exported = jax.export.export(jax.jit(gradients), platforms=("cpu",))(
        *shapes, jax.ShapeDtypeStruct((batch,), jnp.int32))
    for b, s, t in ((1, 30, 30), (3, 60, 17)):
        a = cases.Case("", ("bias", "kv_lengths"), cases.Shape(b, s, t, 4, 2, 8, 8), "float32").make()
        arrays = a["q"], a["k"], a["v"], a["bias"], a["kv_lengths"]
        for got, want in zip(exported.call(*arrays), gradients(*arrays), strict=True):
            np.testing.assert_allclose(got, want, atol=1e-5)


def test_pairs_visited():
    """Causal attention visits the blocks on and below the diagonal; a window a band; lengths are left to run time."""

    def pairs(**options):
        spec, operands = make_spec(Arguments(*[jnp.zeros((1, 4096, 1, 64))] * 3, **options))
        blocks = blockwise.Blocks.cut(spec, operands)
        assert (blocks.block_q, blocks.block_k) == (512, 512)
        return len(blocks.pairs), blockwise._Call.make(spec, operands).active()

    n = 8
    assert pairs() == (n * n, None)
    assert pairs(causal=True) == (n * (n + 1) // 2, None)
    assert pairs(causal=True, window=(1, None)) == (2 * n - 1, None)
    count, active = pairs(causal=True, kv_lengths=jnp.array([5]))
    assert count == n * n and active.sum() == 1  # 5 keys, which align with the last query rows
    assert active[-n]


def test_segments_skip_blocks(small_blocks):
    ids = jnp.repeat(jnp.arange(4), 48)[None]
    x = jnp.zeros((1, 192, 1, 16))
    spec, operands = make_spec(Arguments(x, x, x, q_segment_ids=ids, kv_segment_ids=ids))
    active = blockwise._Call.make(spec, operands).active()
    np.testing.assert_array_equal(active.reshape(4, 4), np.eye(4, dtype=bool))


def compiled(length, causal=False):
    shape = jax.ShapeDtypeStruct((1, length, 4, 64), jnp.float32)
    spec = AttentionSpec("float32", 64, 64, scale=0.125, mask=Causal() if causal else AttentionSpec("f", 1, 1).mask)

    def both(q, k, v, do):
        from jax_fa4.operands import Operands
        from jax_fa4.vjp import operand_gradients

        operands = Operands(q, k, v)
        o, lse = blockwise.forward(spec, operands)
        g = operand_gradients(blockwise.backward, spec, operands, (o, lse), (do, jnp.zeros_like(lse)))
        return o, g.q, g.k, g.v

    return jax.jit(both).lower(shape, shape, shape, shape).compile()


def test_memory_is_linear_in_length():
    short, long = (compiled(n).memory_analysis().temp_size_in_bytes for n in (4096, 8192))
    assert long <= 2.2 * short
    scores = 8192 * 8192 * 4 * 4
    assert long < scores / 10  # dense attention holds at least one array of scores


def test_program_does_not_grow_with_length():
    sizes = [len(compiled(n, causal=True).as_text().splitlines()) for n in (2048, 16384)]
    assert sizes[1] <= 1.1 * sizes[0]


def test_never_a_dense_array():
    text = compiled(4096, causal=True).as_text()
    assert "4096,4096" not in text


@pytest.mark.parametrize("rows, columns", [(1, 19), (19, 17), (24, 24)])
def test_segments_that_differ_on_both_sides_skip_the_right_blocks(rows, columns):
    random = np.random.default_rng(0)
    q, k, v = (jnp.asarray(random.standard_normal((2, n, 1, 4)), jnp.float32) for n in (rows, columns, columns))
    q_ids, kv_ids = (jnp.asarray(np.sort(random.integers(0, 4, (2, n)), axis=1)) for n in (rows, columns))
    with blocks_of(6):
        o = jax_fa4.attention(q, k, v, q_segment_ids=q_ids, kv_segment_ids=kv_ids, backend="xla")
    keep = (q_ids[:, :, None] == kv_ids[:, None, :])[:, None]
    p = jnp.where(keep, jnp.exp(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2), 0)
    want = jnp.einsum("bhqk,bkhd->bqhd", p / jnp.maximum(p.sum(-1, keepdims=True), 1e-30), v)
    np.testing.assert_allclose(o, want, atol=1e-5)


@pytest.mark.parametrize("options", [{"window": (2, 1)}, {"causal": True}, {"window": (jnp.int32(2), jnp.int32(1))}])
@pytest.mark.parametrize("rows, columns", [(9, 8), (13, 8), (7, 20)])
def test_rows_that_fill_no_whole_block_keep_the_alignment(rows, columns, options):
    """Blocks are skipped by the true lengths: where only the keys' are given, rows that pad a block are none."""
    draw = np.random.default_rng(0)
    q, k, v = (jnp.asarray(draw.standard_normal((2, n, 1, 4)), jnp.float32) for n in (rows, columns, columns))
    lengths = jnp.array([columns, columns - 1], jnp.int32)
    spec, operands = make_spec(Arguments(q, k, v, kv_lengths=lengths, **options))
    want = reference.oracle(spec, operands)
    with blocks_of(6):
        o, lse = blockwise.forward(spec, operands)
    np.testing.assert_allclose(o, want["o"], atol=2e-6)
    np.testing.assert_allclose(lse, want["lse"], atol=2e-6)
