"""Score mods on tiles: values by their definitions, vectorised scalar functions by loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import scores
from jax_fa4.scalar import Tile, trace


def tile(positions=False):
    rows, columns = jnp.arange(4, 7), jnp.arange(2, 6)
    q, k = (rows, columns) if not positions else (rows * 2 + jnp.array([[0], [9]]), columns + jnp.array([[1], [2]]))
    return Tile(jnp.arange(2), jnp.arange(3), rows, columns, q, k)


RAW = np.random.default_rng(0).standard_normal((2, 3, 3, 4)).astype(np.float32)


def test_softcap_and_bias_in_order():
    bias = np.random.default_rng(1).standard_normal((1, 3, 9, 9)).astype(np.float32)
    part = scores.bias_tile(jnp.asarray(bias), tile())
    np.testing.assert_array_equal(part, bias[:, :, 4:7, 2:6])
    got = scores.apply((scores.SoftCap(0.5), scores.Bias()), jnp.asarray(RAW), tile(), part, ())
    np.testing.assert_allclose(got, 0.5 * np.tanh(RAW / 0.5) + bias[:, :, 4:7, 2:6], rtol=1e-5, atol=1e-6)
    got = scores.apply((scores.Bias(), scores.SoftCap(0.5)), jnp.asarray(RAW), tile(), part, ())
    np.testing.assert_allclose(got, 0.5 * np.tanh((RAW + bias[:, :, 4:7, 2:6]) / 0.5), rtol=1e-5, atol=1e-6)


def test_a_bias_shared_by_rows_is_cut_along_keys_alone():
    bias = jnp.arange(9.0)[None, None, None]
    np.testing.assert_array_equal(scores.bias_tile(bias, tile()), bias[..., 2:6])
    assert scores.bias_tile(None, tile()) is None


@pytest.mark.parametrize("positions", [False, True])
def test_functions_see_every_index(positions):
    def f(s, b, h, q, k, table):
        return s * 2 + 1000 * b + 100 * h + 10 * q + k + table[h, b]

    table = np.arange(6.0, dtype=np.float32).reshape(3, 2)
    function, arrays = trace("score_mods", f, (table,), jnp.float32)
    assert function.operand_count == len(arrays) == 1
    here = tile(positions)
    got = scores.apply((scores.ScoreMap(function),), jnp.asarray(RAW), here, None, arrays)
    for b, h, i, j in np.ndindex(RAW.shape):
        q, k = (here.q[b, i], here.k[b, j]) if positions else (here.q[i], here.k[j])
        np.testing.assert_allclose(got[b, h, i, j], f(RAW[b, h, i, j], b, h, q, k, table), rtol=1e-5)


def test_each_function_reads_its_own_operands():
    one, (a,) = trace("score_mods", lambda s, b, h, q, k, x: s + x[0], (jnp.array([1.0]),), jnp.float32)
    two, (c,) = trace("score_mods", lambda s, b, h, q, k, x: s * x[h], (jnp.array([2.0, 3.0, 4.0]),), jnp.float32)
    got = scores.apply((scores.ScoreMap(one), scores.ScoreMap(two)), jnp.asarray(RAW), tile(), None, (a, c))
    np.testing.assert_allclose(got, (RAW + 1) * np.array([2, 3, 4])[:, None, None], rtol=1e-6)


def test_text_is_the_identity():
    def make(constant):
        return trace("mask", lambda b, h, q, k: (q - k) * constant < 7, (), None)[0]

    assert make(2) == make(2) and hash(make(2)) == hash(make(2)) and make(2) != make(3)
    assert "0x" not in trace("mask", lambda b, h, q, k: jnp.maximum(q, k) > 0, (), None)[0].text


def test_a_derivative_of_its_own_is_part_of_the_identity():
    def make(slope):
        @jax.custom_jvp
        def double(score):
            return score * 2

        double.defjvp(lambda primals, tangents: (primals[0] * 2, tangents[0] * slope))
        return trace("score_mods", lambda s, b, h, q, k: double(s), (), jnp.float32)[0]

    assert make(2.0) == make(2.0) and make(2.0) != make(3.0)

    def slope(function):
        x = jnp.ones((1, 2, 1, 4))
        return jax.grad(lambda q: jax_fa4.attention(q, 2 * x, x * jnp.arange(4), score_mods=function).sum())(
            jnp.linspace(0, 1, 8).reshape(x.shape))

    with_two, with_three = (slope(make(n).source) for n in (2.0, 3.0))
    np.testing.assert_allclose(with_three, 1.5 * with_two, rtol=1e-6)
