"""jax_fa4.nn.dot_product_attention against jax.nn's own, argument by argument."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa4.nn import dot_product_attention

REFERENCE = jax.nn.dot_product_attention


def slow(*values):
    """A parameter for the slow tier."""
    return pytest.param(*values, marks=pytest.mark.slow)


def inputs(batch=2, q_len=33, kv_len=47, heads=4, kv_heads=2, head_dim=16, dtype="float32", seed=0):
    """Fresh q, k, v in jax.nn's BTNH layout."""
    keys = jax.random.split(jax.random.key(seed), 3)
    q = jax.random.normal(keys[0], (batch, q_len, heads, head_dim), dtype)
    k = jax.random.normal(keys[1], (batch, kv_len, kv_heads, head_dim), dtype)
    v = jax.random.normal(keys[2], (batch, kv_len, kv_heads, head_dim), dtype)
    return q, k, v


def assert_same(args, atol=2e-5, gradients=True, **options):
    """Output, and the gradients of a random projection of it by every floating argument, agree with jax.nn's.

    jax.nn computes in float32, whatever the dtype, from the same rounded inputs.
    """
    floating = tuple(i for i, x in enumerate(args) if x is not None and jnp.issubdtype(x.dtype, jnp.floating))
    weight = jax.random.normal(jax.random.key(9), args[0].shape, jnp.float32)

    def run(attend, *args):
        def projected(*args):
            o = attend(*args, **options)
            return jnp.vdot(o.astype(jnp.float32), weight), o

        if not gradients:
            return (projected(*args)[1],)
        (_, o), grads = jax.value_and_grad(projected, floating, has_aux=True)(*args)
        return o, *grads

    exact = [x.astype(jnp.float32) if i in floating else x for i, x in enumerate(args)]
    expected = jax.jit(partial(run, partial(REFERENCE, implementation="xla")))(*exact)
    got = jax.jit(partial(run, dot_product_attention))(*args)
    originals = (args[0], *(args[i] for i in floating))
    for mine, theirs, original in zip(got, expected, originals):  # noqa: B905 (no gradients: only the output)
        assert mine.shape == theirs.shape and mine.dtype == original.dtype
        scale = float(jnp.abs(theirs).max(initial=1.0))
        np.testing.assert_allclose(np.asarray(mine, np.float32) / scale, theirs / scale, atol=atol)


def test_signature_is_jax_nns():
    mine, theirs = (
        [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()]
        for f in (dot_product_attention, REFERENCE)
    )
    assert mine == theirs


@pytest.mark.parametrize(
    "kv_heads, is_causal, q_len, kv_len",
    [slow(4, False, 32, 32), (2, True, 32, 32), slow(1, False, 21, 45), (2, True, 21, 45), (1, True, 45, 21)],
)
def test_heads_causal_and_lengths_differ(kv_heads, is_causal, q_len, kv_len):
    assert_same(inputs(kv_heads=kv_heads, q_len=q_len, kv_len=kv_len), is_causal=is_causal)


@pytest.mark.parametrize("dtype, atol", [("bfloat16", 2e-2), slow("float16", 3e-3)])
def test_half_precision(dtype, atol):
    assert_same(inputs(dtype=dtype), is_causal=True, atol=atol)


def test_without_batch():
    q, k, v = (x[0] for x in inputs(q_len=32, kv_len=32))
    mask = jax.random.bernoulli(jax.random.key(1), 0.6, (4, 32, 32))
    bias = jax.random.normal(jax.random.key(2), (4, 32, 32))
    assert_same((q, k, v, bias, mask))
    o, residual = dot_product_attention(q, k, v, return_residual=True)
    assert o.shape == q.shape and residual.shape == q.shape[:-1]


@pytest.mark.parametrize("window", [(3, 2), slow((0, 0)), slow((5, 0)), 7, (-2, 6), slow((6, -2)), slow((-3, 1))])
def test_local_windows_align_top_left(window):
    args = inputs(q_len=24, kv_len=31)
    assert_same(args, local_window_size=window, gradients=window == (3, 2))
    assert_same(args, local_window_size=window, is_causal=True, gradients=False)


@pytest.mark.parametrize(
    "shape", [(1, 4, 33, 47), slow((2, 4, 33, 47)), slow((1, 1, 1, 47)), (2, 1, 33, 1), slow((33, 47))]
)
def test_bias_broadcasts_and_has_a_gradient(shape):
    bias = jax.random.normal(jax.random.key(3), shape)
    assert_same((*inputs(), bias), is_causal=len(shape) == 2, scale=0.5)


def test_half_precision_bias_keeps_its_dtype():
    bias = jax.random.normal(jax.random.key(3), (1, 4, 33, 47), "bfloat16")
    assert_same((*inputs(), bias), atol=1e-2)


@pytest.mark.parametrize(
    "shape", [slow((2, 4, 33, 47)), (1, 1, 33, 47), (2, 1, 1, 47), (2, 4, 33, 1), slow((4, 33, 47)), (33, 47)]
)
def test_masks_broadcast(shape):
    mask = jax.random.bernoulli(jax.random.key(4), 0.5, shape)
    assert_same((*inputs(), None, mask), gradients=False)


def test_without_implicit_promotion():
    q, k, v = inputs(dtype="bfloat16")
    bias, mask = jnp.zeros((33, 47), jnp.bfloat16), jnp.ones((33, 47), bool)
    lengths = jnp.array([3, 4], jnp.int32)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        o = jax.eval_shape(lambda *x: dot_product_attention(
            *x, scale=jnp.float32(0.3), is_causal=True, query_seq_lengths=lengths, key_value_seq_lengths=lengths,
            local_window_size=(-1, 3)), q, k, v, bias, mask)
    assert (o.shape, o.dtype) == (q.shape, q.dtype)


def test_no_keys():
    assert_same(inputs(kv_len=0), is_causal=True)


def test_mask_bias_and_causal_together():
    mask = jax.random.bernoulli(jax.random.key(4), 0.5, (2, 1, 33, 47))
    assert_same((*inputs(), jax.random.normal(jax.random.key(5), (1, 4, 33, 47)), mask), is_causal=True)


@pytest.mark.parametrize("which", [slow("query"), slow("key_value"), "both"])
def test_sequence_lengths(which):
    lengths = {}
    if which != "key_value":
        lengths["query_seq_lengths"] = jnp.array([20, 33], jnp.int32)
    if which != "query":
        lengths["key_value_seq_lengths"] = jnp.array([47, 9], jnp.int32)
    assert_same(inputs(), is_causal=True, **lengths)
    assert_same(inputs(), local_window_size=(4, 1), gradients=False, **lengths)


def test_rows_that_see_nothing_give_the_mean_of_all_values():
    q, k, v = inputs(heads=4, kv_heads=2)
    mask = jnp.ones((1, 1, 33, 47), bool).at[:, :, 5].set(False)
    o = dot_product_attention(q, k, v, mask=mask)
    np.testing.assert_allclose(o[:, 5], jnp.repeat(v.mean(axis=1), 2, axis=1), atol=1e-6)
    assert_same((q, k, v, None, mask))
    assert_same((q, k, v), key_value_seq_lengths=jnp.array([0, 47], jnp.int32))
    assert_same((q, k, v), query_seq_lengths=jnp.array([0, 33], jnp.int32), gradients=False)


@pytest.mark.parametrize("scale", [0.3, slow(np.float32(2.0)), slow(0.0), -0.7])
def test_scale(scale):
    assert_same(inputs(), scale=scale, gradients=scale == 0.3)


def test_traced_scale():
    q, k, v = inputs()
    expected = REFERENCE(q, k, v, scale=0.25)
    got = jax.jit(lambda s: dot_product_attention(q, k, v, scale=s))(0.25)
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [slow("float32"), "bfloat16"])
def test_residual(dtype):
    q, k, v = inputs(dtype=dtype)
    mask = jnp.ones((1, 1, 33, 47), bool).at[:, :, 5].set(False)
    options = dict(mask=mask, is_causal=True, query_seq_lengths=jnp.array([20, 33], jnp.int32), return_residual=True)
    for got, expected in zip(dot_product_attention(q, k, v, **options), REFERENCE(q, k, v, **options), strict=True):
        assert got.shape == expected.shape and got.dtype == expected.dtype
        np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(expected, np.float32), rtol=1e-2, atol=1e-2)
    gradient = jax.grad(lambda q: dot_product_attention(q, k, v, return_residual=True)[1].astype(jnp.float32).sum())(q)
    assert not gradient.any()


def test_under_jit_and_vmap():
    q, k, v = inputs()
    stacked = tuple(jnp.stack([x, 2 * x, -x]) for x in (q, k, v))
    got = jax.jit(jax.vmap(lambda q, k, v: dot_product_attention(q, k, v, is_causal=True)))(*stacked)
    expected = jax.vmap(lambda q, k, v: REFERENCE(q, k, v, is_causal=True))(*stacked)
    np.testing.assert_allclose(got, expected, atol=2e-5)


ERRORS = {
    "rank": dict(key=jnp.zeros((2, 1, 9, 2, 8))),
    "value shape": dict(value=jnp.zeros((2, 9, 2, 4))),
    "value dtype": dict(value=jnp.zeros((2, 9, 2, 8), jnp.bfloat16)),
    "query head dim": dict(query=jnp.zeros((2, 7, 4, 4))),
    "query dtype": dict(query=jnp.zeros((2, 7, 4, 8), jnp.float16)),
    "query batch": dict(query=jnp.zeros((3, 7, 4, 8))),
    "heads": dict(query=jnp.zeros((2, 7, 3, 8))),
    "mask dtype": dict(mask=jnp.ones((7, 9), jnp.int32)),
    "lengths dtype": dict(query_seq_lengths=jnp.zeros((2,), jnp.float32)),
    "lengths shape": dict(key_value_seq_lengths=jnp.zeros((3,), jnp.int32)),
    "implementation": dict(implementation="cudda"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_jax_nn_refuses_is_refused(case):
    arguments = dict(query=jnp.zeros((2, 7, 4, 8)), key=jnp.zeros((2, 9, 2, 8)), value=jnp.zeros((2, 9, 2, 8)))
    arguments |= ERRORS[case]
    with pytest.raises(ValueError):
        REFERENCE(**arguments)
    with pytest.raises(ValueError):
        dot_product_attention(**arguments)
