"""The public call: order of the variants, types, edges, and what is left to the arguments' defaults."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import cases
from jax_fa4.spec import Arguments, make_spec


def inputs(dtype="float32", **sizes):
    shape = cases.Shape(**{"B": 2, "S": 6, "T": 8, "H": 4, "K": 2, "D": 8, "E": 4, **sizes})
    a = cases.Case("", (), shape, dtype).make()
    return tuple(jnp.asarray(a[name]) for name in "qkv")


def attend(*args, **options):
    return jax_fa4.attention(*args, backend="xla", **options)


def test_the_fixed_order():
    """scale, softcap, bias, score mods, masks, softmax with the sink."""
    q, k, v = inputs()
    bias, sinks = jnp.linspace(-1, 1, 8)[None, None, None], jnp.arange(4.0)
    o, lse = attend(q, k, v, causal=True, window=(3, None), mask=lambda b, h, q, k: k != 2, softcap=2.0, scale=0.7,
                    bias=bias, score_mods=[lambda s, b, h, q, k: s * 3, lambda s, b, h, q, k: s + h], sinks=sinks,
                    return_lse=True)
    kk, vv = (jnp.repeat(x, 2, axis=2) for x in (k, v))
    s = 2 * jnp.tanh(jnp.einsum("bshd,bthd->bhst", q, kk) * 0.7 / 2) + bias
    s = s * 3 + jnp.arange(4)[:, None, None]
    i, j = jnp.arange(6)[:, None] + 2, jnp.arange(8)
    s = jnp.where((j <= i) & (j >= i - 3) & (j != 2), s, -jnp.inf)
    want = jnp.logaddexp(jax.nn.logsumexp(s, axis=-1), sinks[:, None])
    np.testing.assert_allclose(lse, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(o, jnp.einsum("bhst,bthe->bshe", jnp.exp(s - want[..., None]), vv), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes_come_back(dtype):
    q, k, v = inputs(dtype)
    o, lse = attend(q, k, v, return_lse=True)
    assert (o.dtype, lse.dtype, o.shape, lse.shape) == (dtype, "float32", (2, 6, 4, 4), (2, 4, 6))
    bias, sinks = jnp.ones((1, 1, 1, 8), jnp.bfloat16), jnp.ones(4, jnp.float16)

    def loss(q, k, v, bias, sinks):
        return attend(q, k, v, bias=bias, sinks=sinks).sum()

    grads = jax.eval_shape(jax.grad(loss, (0, 1, 2, 3, 4)), q, k, v, bias, sinks)
    assert [g.dtype for g in grads] == [dtype] * 3 + ["bfloat16", "float16"]


def test_weak_types_come_back():
    q, k, v = inputs()
    weak = jnp.full(q.shape, 1.0)
    assert weak.weak_type and not q.weak_type
    for x in (q, weak):
        assert jax.eval_shape(lambda x: attend(x, k, v), x).weak_type == x.weak_type
        assert jax.eval_shape(jax.grad(lambda x: attend(x, k, v).sum()), x).weak_type == x.weak_type
    carried, _ = jax.lax.scan(lambda x, _: (attend(x, k, jnp.ones((2, 8, 2, 8))), None), weak, length=2)
    np.testing.assert_allclose(carried, 1, rtol=1e-6)


def test_numpy_arguments_and_jit():
    a = cases.Case("", ("causal",), cases.Shape(S=6, T=6, D=8, E=8), "float32").make()
    np.testing.assert_allclose(attend(**a), jax.jit(lambda q, k, v: attend(q, k, v, causal=True))(
        a["q"], a["k"], a["v"]), rtol=1e-6, atol=1e-6)


def test_an_example_equals_itself_alone_cut_to_its_lengths():
    q, k, v = inputs()
    q_lengths, kv_lengths = np.array([4, 0]), np.array([5, 7])
    o, lse = attend(q, k, v, causal=True, q_lengths=q_lengths, kv_lengths=kv_lengths, return_lse=True)
    alone, alone_lse = attend(q[:1, :4], k[:1, :5], v[:1, :5], causal=True, return_lse=True)
    np.testing.assert_allclose(o[:1, :4], alone, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse[:1, :, :4], alone_lse, rtol=1e-5, atol=1e-6)
    assert not o[0, 4:].any() and not o[1].any() and np.isneginf(lse[0, :, 4:]).all() and np.isneginf(lse[1]).all()


def test_poison_where_nothing_reads():
    """Keys and queries outside the lengths may hold anything finite without a trace in results and gradients."""
    q, k, v = inputs()
    q_lengths, kv_lengths = np.array([4, 6]), np.array([5, 8])

    def run(q, k, v):
        o, lse = attend(q, k, v, q_lengths=q_lengths, kv_lengths=kv_lengths, return_lse=True)
        return jnp.sum(jnp.sin(o)) + jnp.where(jnp.isfinite(lse), lse, 0).sum()

    clean = jax.value_and_grad(run, (0, 1, 2))(q, k, v)
    dirty = jax.value_and_grad(run, (0, 1, 2))(q.at[0, 4:].set(1e30), k.at[0, 5:].set(-1e30), v.at[0, 5:].set(1e30))
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "int64"])
def test_lengths_and_windows_of_any_integer_dtype(dtype):
    q, k, v = inputs()
    largest = np.iinfo(dtype).max
    want = attend(q, k, v, kv_lengths=np.array([8, 3]), window=(2, 1)), attend(q, k, v)
    with jax.enable_x64(True):
        some = attend(q, k, v, kv_lengths=jnp.array([largest, 3], dtype), window=(jnp.array(2, dtype), np.int8(1)))
        all_ = attend(q, k, v, window=(jnp.array(largest, dtype), np.array(largest, dtype)))
    np.testing.assert_allclose((some, all_), want, rtol=1e-5, atol=1e-6)


def test_packed_segments_equal_separate_calls():
    q, k, v = inputs(S=8, B=1)
    ids = jnp.array([[3, 3, 3, 1, 1, 1, 1, 1]])
    packed = attend(q, k, v, causal=True, q_segment_ids=ids, kv_segment_ids=ids)
    parts = [attend(*(x[:, a:b] for x in (q, k, v)), causal=True) for a, b in ((0, 3), (3, 8))]
    np.testing.assert_allclose(packed, jnp.concatenate(parts, axis=1), rtol=1e-5, atol=1e-6)


def test_positions_are_a_slice_of_the_whole():
    q, k, v = inputs(S=8)
    whole = attend(q, k, v, causal=True)
    evens = jax.jit(lambda o: attend(q[:, 1::2], k, v, causal=True, q_position=(o, 2)))(jnp.int32(1))
    np.testing.assert_allclose(evens, whole[:, 1::2], rtol=1e-5, atol=1e-6)
    captured = jnp.array([1, 1], jnp.uint8), jnp.array([2, 2])  # arrays that are known while the program is traced
    evens = jax.jit(lambda q: attend(q, k, v, causal=True, q_position=captured))(q[:, 1::2])
    np.testing.assert_allclose(evens, whole[:, 1::2], rtol=1e-5, atol=1e-6)


def test_lse_far_below_exp_range_and_large_scores():
    q, k, v = inputs()
    low, lse = attend(q * 0, k, v, bias=jnp.full((1, 1, 1, 8), -1e4), return_lse=True)
    np.testing.assert_allclose(lse, np.log(8) - 1e4, rtol=1e-6)
    np.testing.assert_allclose(low, jnp.repeat(v.mean(axis=1, keepdims=True), 2, axis=2).repeat(6, axis=1), rtol=1e-5,
                               atol=1e-6)
    grads = jax.grad(lambda q: attend(q * 1e4, k, v).sum())(q)
    assert np.isfinite(grads).all()


def test_auto_takes_xla_where_there_is_no_gpu():
    q, k, v = inputs("bfloat16", D=64, E=64)
    np.testing.assert_array_equal(jax_fa4.attention(q, k, v, causal=True), attend(q, k, v, causal=True))
    grads = [jax.grad(lambda q, b=b: jax_fa4.attention(q, k, v, backend=b).sum())(q) for b in ("auto", "xla")]
    np.testing.assert_array_equal(*(g.astype(jnp.float32) for g in grads))


def test_equal_functions_share_a_spec():
    q, k, v = inputs()

    def make(cap, table):
        mod = jax_fa4.ScoreFn(lambda s, b, h, q, k, t: s + cap * t[h], (table,))
        return make_spec(Arguments(q, k, v, score_mods=mod, mask=lambda b, h, q, k: q >= k))

    (one, ops), (other, others) = make(1.5, jnp.ones(4)), make(1.5, jnp.zeros(4))
    different, _ = make(2.5, jnp.ones(4))
    assert one == other and hash(one) == hash(other) and one != different
    assert (ops.score_operands[0] == 1).all() and (others.score_operands[0] == 0).all()
