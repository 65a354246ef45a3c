"""Differentiation and its composition with JAX's transformations, on the XLA backend."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blocks import blocks_of
from jax.test_util import check_grads

import jax_fa4
from jax_fa4 import blockwise, cases, linear, vjp
from jax_fa4.errors import Unsupported
from jax_fa4.spec import AttentionSpec

SHAPE = cases.Shape(B=2, S=7, T=9, H=4, K=2, D=4, E=3)


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    """Two blocks a side, so that transformations meet the loop and its skips."""
    with blocks_of(5):
        yield


def inputs(seed=0, shape=SHAPE):
    a = cases.Case("", (), shape, "float32").make(seed)
    return tuple(jnp.asarray(a[name]) for name in "qkv")


def attend(q, k, v, **options):
    return jax_fa4.attention(q, k, v, causal=True, backend="xla", **options)


def plain(q, k, v, sinks=None):
    """Causal attention and LSE in five lines of JAX."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    s = jnp.einsum("bshd,bthd->bhst", q, k) * q.shape[-1] ** -0.5
    s = jnp.where(jnp.arange(k.shape[1]) <= jnp.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1], s, -jnp.inf)
    extra = jnp.full((q.shape[2],), -jnp.inf) if sinks is None else sinks
    lse = jnp.logaddexp(jax.nn.logsumexp(s, axis=-1), extra[:, None])
    return jnp.einsum("bhst,bthe->bshe", jnp.exp(s - lse[..., None]), v), lse


def loss(attention):
    def function(*args):
        o, lse = attention(*args)
        return jnp.sum(jnp.sin(o)) + jnp.sum(lse * jnp.cos(lse))

    return function


def both(*args):
    return attend(*args[:3], return_lse=True, sinks=args[3] if len(args) > 3 else None)


def assert_close(got, want, tolerance=2e-5):
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want) > 0
    for g, w in zip(got, want, strict=True):
        assert np.isfinite(w).all() and np.abs(w).max() > 0
        np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance * np.abs(w).max())


def test_gradients_of_both_outputs_with_sinks():
    args = (*inputs(), jnp.arange(4.0) / 4)
    assert_close(*(jax.jit(jax.grad(loss(f), (0, 1, 2, 3)))(*args) for f in (both, plain)))


def test_forward_mode_and_second_derivatives():
    args, tangents = inputs(), inputs(1)
    results = []
    for f in (both, plain):
        grad = jax.grad(loss(f), (0, 1, 2))

        def along(*a, grad=grad):
            return sum(jnp.vdot(x, t) for x, t in zip(grad(*a), tangents, strict=True))

        forward = jax.jit(lambda a, t, f=f: jax.jvp(f, a, t))(args, tangents)
        forward_over_reverse = jax.jit(lambda a, t, grad=grad: jax.jvp(grad, a, t)[1])(args, tangents)
        results.append((forward, forward_over_reverse, jax.jit(jax.grad(along, (0, 1, 2)))(*args)))
    assert_close(*results, 1e-4)


def test_finite_differences_in_both_modes():
    with jax.enable_x64(True):
        shape = cases.Shape(B=1, S=3, T=6, H=2, K=1, D=2, E=2)
        args = tuple(x.astype(jnp.float64) for x in inputs(shape=shape))
        check_grads(jax.jit(both), args, order=1, modes=("fwd", "rev"), atol=1e-5, rtol=1e-5)
        o, lse = both(*args)
        assert o.dtype == lse.dtype == jnp.float64


@pytest.mark.parametrize("axes", [(0, None, None), (0, 2, 1)])
def test_vmap_of_grad_and_grad_of_vmap(axes):
    args = tuple(x if a is None else jnp.stack([x, 0.5 * x, -x], axis=a)
                 for x, a in zip(inputs(), axes, strict=True))
    results = []
    for f in (both, plain):
        grad = jax.jit(jax.vmap(jax.grad(loss(f), (0, 1, 2)), in_axes=axes))(*args)

        def total(*a, f=f):
            o, lse = jax.vmap(f, in_axes=axes, out_axes=(1, 0))(*a)
            return jnp.sum(o * jnp.cos(jnp.arange(o.size).reshape(o.shape))) + jnp.sum(jnp.sin(lse))

        results.append((grad, jax.jit(jax.grad(total, (0, 1, 2)))(*args)))
    assert_close(*results)


def test_nested_vmap_and_jvp_under_vmap():
    q, k, v = inputs()
    q = jnp.stack([jnp.stack([q, q * 2]), jnp.stack([-q, q + 1])])
    k = jnp.stack([k, k * 0.3])
    results = []
    for f in (both, plain):
        nested = jax.vmap(jax.vmap(jax.grad(loss(f), (0, 1)), in_axes=(0, None, None)), in_axes=(0, 0, None))
        pushed = jax.vmap(lambda a, b, f=f: jax.jvp(lambda x: f(x, b, v), (a,), (jnp.ones_like(a),)), in_axes=(0, 0))
        results.append((jax.jit(nested)(q, k, v), jax.jit(pushed)(q[:, 0], k)))
    assert_close(*results)


def test_vmap_over_lengths_window_segments_and_positions():
    q, k, v = inputs()
    lengths, left = jnp.array([[9, 5], [3, 7]]), jnp.array([1, 4])
    ids = jnp.array([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0, 1, 2, 3, 4, 5, 6, 7, 8]])

    def one(q, lengths, left, ids, offset):
        return jax_fa4.attention(q, k, v, kv_lengths=lengths, window=(left, None), q_segment_ids=ids[:, 2:],
                                 kv_segment_ids=ids, q_position=(offset, 1), backend="xla")

    ids = jnp.stack([ids, ids[::-1]])
    offsets = jnp.array([2, 0])
    stacked = jnp.stack([q, -q])
    grad = jax.grad(lambda *a: jnp.sum(jnp.sin(one(*a))))
    got = jax.jit(jax.vmap(grad))(stacked, lengths, left, ids, offsets)
    want = [jax.jit(grad)(*a) for a in zip(stacked, lengths, left, ids, offsets, strict=True)]
    assert_close(got, jnp.stack(want))


def test_jacobians_agree():
    q, k, v = inputs(shape=cases.Shape(B=1, S=3, T=4, H=2, K=1, D=2, E=2))
    want = jax.jit(jax.jacrev(lambda q: plain(q, k, v)[0]))(q)
    assert_close(jax.jit(jax.jacrev(lambda q: both(q, k, v)[0]))(q), want)
    assert_close(jax.jit(jax.jacfwd(lambda q: both(q, k, v)[0]))(q), want)


def test_hessian():
    q, k, v = inputs(shape=cases.Shape(B=1, S=2, T=3, H=1, K=1, D=2, E=2))
    assert_close(*(jax.jit(jax.hessian(lambda q, f=f: loss(f)(q, k, v)))(q) for f in (both, plain)), 1e-4)
    tangents = jnp.stack([q, -q])
    value, _ = jax.vmap(lambda t: jax.jvp(jax.grad(lambda q: loss(both)(q, k, v)), (q,), (t,)), out_axes=(None, 0))(
        tangents)  # what does not depend on the mapped axis stays unbatched
    assert value.shape == q.shape


def test_scan_over_layers_with_run_time_windows():
    q, k, v = inputs(shape=cases.Shape(B=2, S=9, T=9, H=2, K=2, D=4, E=4))

    def layers(x, attention):
        return jax.lax.scan(lambda x, left: (x + attention(x, left), None), x, jnp.array([2, 100, 0]))[0].sum()

    got = jax.jit(jax.grad(lambda x: layers(x, lambda x, left: attend(x, k, v, window=(left, None)))))(q)
    assert_close(got, jax.jit(jax.grad(lambda x: _unrolled(x, k, v)))(q))


def _unrolled(x, k, v):
    for left in (2, None, 0):
        x = x + attend(x, k, v, window=(left, None))
    return x.sum()


def forward_loops(rerun):
    """How many loops the compiled gradient of two checkpointed layers has, and the gradient."""
    x = inputs(shape=cases.Shape(B=1, S=16, T=16, H=2, K=2, D=8, E=8))[0]
    policy = jax.checkpoint_policies.nothing_saveable if rerun else (
        jax.checkpoint_policies.save_only_these_names(*jax_fa4.CHECKPOINT_NAMES))

    def layer(x):
        h = jnp.tanh(x @ jnp.eye(8))
        return x + attend(h, 2 * h, 3 * h)

    layer = jax.checkpoint(layer, policy=policy)
    grad = jax.jit(jax.grad(lambda x: jnp.sum(layer(layer(x)) ** 2)))
    text = grad.lower(x).compile().as_text()
    return len(re.findall(r" while\(", text)), grad(x)


def test_remat_runs_the_forward_once():
    (saved, one), (rerun, other) = forward_loops(False), forward_loops(True)
    assert saved == 4  # two layers, one forward and one backward loop each
    assert rerun == 6 or rerun == 5  # the last layer's rerun may be merged with its forward
    assert_close(one, other)


@pytest.mark.slow
def test_remat_runs_the_forward_once_under_the_coming_remat():
    code = ("import test_vjp as t; t.blockwise.LONGEST_BLOCK = t.blockwise.SHORTEST_BLOCK = 5; "
            "print(t.forward_loops(False)[0])")
    env = {**os.environ, "JAX_REMAT3": "1", "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["4"]


def test_only_inputs_and_results_are_saved():
    q, k, v = inputs()
    saved = jax.tree.leaves(jax.vjp(lambda *a: attend(*a), q, k, v)[1])
    assert sum(x.size for x in saved if hasattr(x, "size")) <= 2 * (q.size + k.size + v.size) + 4 * q.size


def test_frozen_operands_and_integer_cotangents():
    q, k, v = inputs()
    assert_close(jax.grad(lambda k: attend(q, k, v).sum())(k), jax.grad(lambda k: plain(q, k, v)[0].sum())(k))
    lengths = jnp.array([9, 4])
    _, pull = jax.vjp(lambda q, n: attend(q, k, v, kv_lengths=n), q, lengths)
    assert pull(jnp.ones((2, 7, 4, 3)))[1].dtype == jax.dtypes.float0


def test_gradients_of_arrays_read_by_functions():
    q, k, v = inputs()
    slopes, counts = jnp.arange(1.0, 5.0), jnp.arange(4)

    def value(slopes, functional):
        def f(s, b, h, q, k, slopes, counts):
            return s - slopes[h] * jnp.abs(q - k) * counts[h]

        if functional:
            mod = jax_fa4.ScoreFn(f, (slopes, counts))
            return jnp.sum(jnp.sin(jax_fa4.attention(q, k, v, score_mods=mod, backend="xla")))
        distance = jnp.abs(jnp.arange(7)[:, None] - jnp.arange(9))
        bias = -(slopes * counts)[None, :, None, None] * distance
        return jnp.sum(jnp.sin(jax_fa4.attention(q, k, v, bias=bias, backend="xla")))

    grads = [jax.jit(jax.grad(lambda s, f=f: value(s, f))) for f in (True, False)]
    assert_close(*(g(slopes) for g in grads))
    assert_close(*(jax.jit(lambda s, f=f: jax.jvp(lambda s: value(s, f), (s,), (s,)))(slopes) for f in (True, False)))


def test_a_backend_without_plain_code_refuses_forward_mode_and_second_derivatives():
    q, k, v = inputs()
    rule = vjp.Rule(AttentionSpec("float32", 4, 3, 2, 0.5), blockwise.backward, name="mine")

    def f(q):
        return vjp.attend(rule, blockwise.forward, jax_fa4.operands.Operands(q, k, v))[0]

    want = jax_fa4.attention(q, k, v, backend="xla")
    assert_close(jax.grad(lambda q: (f(q) ** 2).sum())(q),
                 jax.grad(lambda q: (jax_fa4.attention(q, k, v, backend="xla") ** 2).sum())(q))
    np.testing.assert_array_equal(f(q), want)
    with pytest.raises(Unsupported, match=r"'mine' has no forward-mode derivatives.*backend='xla'"):
        jax.jvp(f, (q,), (q,))
    with pytest.raises(Unsupported, match=r"'mine' has no forward-mode derivatives"):
        jax.jit(lambda q: jax.jvp(f, (q,), (q,)))(q)
    with pytest.raises(Unsupported, match=r"'mine' has no second derivatives"):
        jax.grad(lambda q: jax.grad(lambda q: f(q).sum())(q).sum())(q)


def test_linear_call_is_its_own_maps_transpose():
    class Scale:
        refusal = transpose_refusal = None

        def apply(self, residuals, inputs):
            return [residuals[0] * inputs[0]]

        transpose = plain = plain_transpose = apply

    x, y = jnp.arange(1.0, 4.0), jnp.arange(3.0, 6.0)

    def f(x, y):
        return linear.linear_call(Scale(), [x], [y])[0]

    np.testing.assert_allclose(jax.grad(lambda x, y: (f(x, y) ** 2).sum(), (0, 1))(x, y), (2 * x * y**2, 2 * x**2 * y))
    np.testing.assert_allclose(jax.vmap(f, in_axes=(None, 0))(x, jnp.stack([y, -y])), [x * y, -x * y])
    np.testing.assert_allclose(jax.jvp(f, (x, y), (y, x))[1], y * y + x * x)


def test_delta_and_sink_gradient():
    o, do = jnp.ones((2, 3, 4, 5), jnp.bfloat16), jnp.full((2, 3, 4, 5), 2, jnp.bfloat16)
    dlse = jnp.ones((2, 4, 3))
    d = vjp.delta(o, do, dlse)
    assert d.dtype == jnp.float32 and d.shape == (2, 4, 3) and (d == 9).all()
    lse = jnp.full((2, 4, 3), -jnp.inf).at[0].set(1.0)
    np.testing.assert_allclose(vjp.sink_gradient(jnp.ones(4), lse, d), [-27.0] * 4)


def test_a_row_without_keys_has_zero_gradients_whatever_is_done_with_its_lse():
    def total(q, k, v):
        o, lse = attend(q, k, v, kv_lengths=jnp.array([0, 9]), return_lse=True)
        return o.sum() + jnp.where(jnp.isfinite(lse), jnp.cos(lse), 0).sum()  # its derivative at -inf is NaN

    for gradient in jax.grad(total, (0, 1, 2))(*inputs()):
        assert not gradient[0].any() and np.isfinite(gradient[1]).all() and gradient[1].any()
