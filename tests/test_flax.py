"""jax_fa4.flax inside flax.linen and flax.nnx layers, against Flax's own attention."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
import jax_fa4.flax as fa4_flax

linen = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")

BATCH, LENGTH, WIDTH, HEADS = 2, 24, 32, 4


def activations(seed=0, length=LENGTH):
    return jax.random.normal(jax.random.key(seed), (BATCH, length, WIDTH))


def masks():
    keep = jax.random.bernoulli(jax.random.key(1), 0.6, (BATCH, 1, LENGTH, LENGTH)) | jnp.eye(LENGTH, dtype=bool)
    return {
        "none": None,
        "causal": linen.make_causal_mask(jnp.ones((BATCH, LENGTH))),
        "arbitrary": keep,
        "per head": jnp.concatenate([keep, keep[..., ::-1] | jnp.eye(LENGTH, dtype=bool)] * (HEADS // 2), axis=1),
        "keys": jnp.arange(LENGTH)[None, None, None] < jnp.array([LENGTH, 7])[:, None, None, None],
    }


def linen_layer(**options):
    return linen.MultiHeadDotProductAttention(num_heads=HEADS, **options)


def nnx_layer(attention_fn=None, **options):
    if attention_fn is not None:
        options["attention_fn"] = attention_fn
    return nnx.MultiHeadAttention(HEADS, WIDTH, WIDTH, decode=False, rngs=nnx.Rngs(0), **options)


def close(got, expected, atol=2e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol), got, expected)


@pytest.mark.parametrize("mask", ["causal", "per head"])
def test_linen_outputs_and_gradients(mask):
    x, keep = activations(), masks()[mask]
    params = linen_layer().init(jax.random.key(0), x)

    def run(layer):
        return jax.jit(jax.value_and_grad(lambda p: (layer.apply(p, x, mask=keep) ** 2).mean()))(params)

    close(run(linen_layer(attention_fn=fa4_flax.dot_product_attention)), run(linen_layer()))


@pytest.mark.parametrize(
    "mask, is_causal", [("none", True), ("arbitrary", True), ("keys", False)]
)
def test_nnx_outputs_and_gradients(mask, is_causal):
    x, keep = activations(), masks()[mask]
    if is_causal and keep is not None and keep.shape != (BATCH, 1, LENGTH, LENGTH):
        keep = jnp.broadcast_to(keep, (BATCH, HEADS, LENGTH, LENGTH))  # Flax broadcasts its causal mask to this shape

    def run(layer):
        def loss(layer):
            return (layer(x, mask=keep, is_causal=is_causal) ** 2).mean()

        value, gradients = nnx.jit(nnx.value_and_grad(loss))(layer)
        return value, nnx.to_pure_dict(gradients)

    close(run(nnx_layer(fa4_flax.dot_product_attention)), run(nnx_layer()))


def test_causal_with_fewer_queries_than_keys_aligns_as_flax_does():
    q, kv = activations(0, 9), activations(1)
    expected = nnx_layer()(q, kv, is_causal=True)
    close(nnx_layer(fa4_flax.dot_product_attention)(q, kv, is_causal=True), expected)


@pytest.mark.parametrize("lead", [(), (2, 3)])
def test_any_number_of_batch_dims(lead):
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v = (jax.random.normal(key, (*lead, 12, HEADS, 8)) for key in keys[:3])
    mask = jax.random.bernoulli(keys[3], 0.5, (*lead, 1, 12, 12)) | jnp.eye(12, dtype=bool)
    bias = jax.random.normal(keys[3], (HEADS, 12, 12))
    expected = linen.dot_product_attention(q, k, v, bias=bias, mask=mask)
    close(fa4_flax.dot_product_attention(q, k, v, bias=bias, mask=mask), expected)


def test_options_reach_attention():
    x = activations()
    window = nnx_layer(fa4_flax.attention_fn(causal=True, window=(3, 0)))(x)
    distance = jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)
    close(window, nnx_layer()(x, mask=((distance >= 0) & (distance <= 3))[None, None]))


def test_attention_functions_can_be_pickled():
    x = jax.random.normal(jax.random.key(0), (BATCH, LENGTH, HEADS, 8))
    for attend in (fa4_flax.dot_product_attention, fa4_flax.attention_fn(causal=True, window=(3, 0))):
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(attend))(x, x, x), attend(x, x, x))


def test_dtype_is_the_layers():
    layer = nnx_layer(fa4_flax.dot_product_attention, dtype=jnp.bfloat16)
    assert layer(activations()).dtype == jnp.bfloat16


def test_dropout_is_refused_and_allowed_when_deterministic():
    x = activations()
    layer = nnx_layer(fa4_flax.dot_product_attention, dropout_rate=0.1)
    with pytest.raises(ValueError, match=r"dropout_rate.*dropout_rate=0 .*apply dropout to its output"):
        layer(x, deterministic=False, rngs=nnx.Rngs(dropout=1))
    close(layer(x, deterministic=True), nnx_layer()(x))
    with pytest.raises(ValueError, match="dropout_rate"):
        layer = linen_layer(attention_fn=fa4_flax.dot_product_attention, dropout_rate=0.1, deterministic=False)
        layer.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)


@pytest.mark.parametrize(
    "keywords, named",
    [
        (dict(module=object()), "sow_weights"),
        (dict(precision="highest"), "accumulated in float32"),
        (dict(qk_attn_weights_einsum=jnp.einsum), "einsum"),
        (dict(input_positions=jnp.arange(LENGTH)), "input_positions"),
        (dict(mask=jnp.ones((3, 1, LENGTH, LENGTH))), "broadcastable"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_a_remedy(keywords, named):
    q = jax.random.normal(jax.random.key(0), (BATCH, LENGTH, HEADS, 8))
    with pytest.raises(ValueError, match=named):
        fa4_flax.dot_product_attention(q, q, q, **keywords)


def test_a_mask_of_both_kinds_is_refused():
    q = jax.random.normal(jax.random.key(0), (BATCH, LENGTH, HEADS, 8))
    attend = fa4_flax.attention_fn(mask=lambda b, h, q, k: q >= k)
    with pytest.raises(ValueError, match="join them"):
        attend(q, q, q, mask=jnp.ones((1, 1, LENGTH, LENGTH)))


def test_parameters_are_arrays():
    """`nnx.Param` is no `jax.Array`, and becomes one where it is used."""
    x = jax.random.normal(jax.random.key(0), (1, 5, 2, 8))
    mask, window = jnp.tril(jnp.ones((1, 1, 5, 5), bool)), jnp.int32(2)
    want = jax_fa4.attention(x, x, x, mask=mask, sinks=jnp.ones(2), window=(window, 0))
    p = nnx.Param(x)
    got = jax_fa4.attention(p, p, p, mask=nnx.Param(mask), sinks=nnx.Param(jnp.ones(2)), window=(nnx.Param(window), 0))
    np.testing.assert_array_equal(got, want)
