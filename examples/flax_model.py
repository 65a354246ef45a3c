"""A decoder-only transformer in Flax NNX on ``jax_fa4.attention``, and the drop-ins for Flax's own attention layers.

    python examples/flax_model.py    # runs both, and prints how far they are from Flax's own attention

The model has rotary positions, RMSNorm, SwiGLU, grouped-query attention and, where asked for, sliding windows and
attention sinks. ``train_lm.py`` trains it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import linen, nnx

import jax_fa4.flax

REMAT_POLICIES = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "attention": jax.checkpoint_policies.save_only_these_names(*jax_fa4.CHECKPOINT_NAMES),
}


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a decoder, and how its attention runs.

    Attributes:
      vocabulary: number of tokens.
      layers, width, heads, kv_heads: as usual; the head dim is width / heads.
      dtype: of activations; parameters are float32.
      window: keys that a query sees to its left, itself not counted; None for all.
      sinks: each head learns a logit that takes attention without giving a value.
      backend: of ``jax_fa4.attention``.
      remat: what backward recomputes: a key of ``REMAT_POLICIES``. "attention" keeps attention's results and
        recomputes the rest.
      zero_attention: ablation, attention contributes nothing.
      attend: what computes attention, called as ``jax_fa4.attention`` is.
    """

    vocabulary: int = 256
    layers: int = 3
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    dtype: str = "float32"
    window: int | None = None
    sinks: bool = False
    backend: str = "auto"
    remat: str = "none"
    zero_attention: bool = False
    attend: Callable[..., jax.Array] = jax_fa4.attention


def rotate(x: jax.Array, positions: jax.Array, base: float = 10_000.0) -> jax.Array:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) of [B, S, H, D] at [S] positions, in float32."""
    half = x.shape[-1] // 2
    frequencies = base ** (-jnp.arange(half) / half)
    angles = (positions[:, None] * frequencies)[None, :, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class SelfAttention(nnx.Module):
    """Causal grouped-query attention of [B, S, width]."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config = config
        head_dim = config.width // config.heads

        def projection(heads: int) -> nnx.LinearGeneral:
            return nnx.LinearGeneral(config.width, (heads, head_dim), use_bias=False, dtype=config.dtype, rngs=rngs)

        self.query = projection(config.heads)
        self.key = projection(config.kv_heads)
        self.value = projection(config.kv_heads)
        self.out = nnx.LinearGeneral(
            (config.heads, head_dim), config.width, axis=(-2, -1), use_bias=False, dtype=config.dtype, rngs=rngs
        )
        self.sinks = nnx.Param(jnp.zeros(config.heads)) if config.sinks else None

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        config = self.config
        o = config.attend(
            rotate(self.query(x), positions),
            rotate(self.key(x), positions),
            self.value(x),
            causal=True,
            window=None if config.window is None else (config.window, 0),
            sinks=None if self.sinks is None else self.sinks[...],
            backend=config.backend,
        )
        return self.out(jnp.zeros_like(o) if config.zero_attention else o)


class SwiGLU(nnx.Module):
    """Gated MLP (Shazeer 2020, arXiv:2002.05202) of [..., width]."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        hidden = 8 * config.width // 3 // 32 * 32
        self.gate_up = nnx.Linear(config.width, 2 * hidden, use_bias=False, dtype=config.dtype, rngs=rngs)
        self.down = nnx.Linear(hidden, config.width, use_bias=False, dtype=config.dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)


class Block(nnx.Module):
    """Pre-norm attention and MLP, each added to its input."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.attention = SelfAttention(config, rngs)
        self.attention_norm = nnx.RMSNorm(config.width, dtype=config.dtype, rngs=rngs)
        self.mlp = SwiGLU(config, rngs)
        self.mlp_norm = nnx.RMSNorm(config.width, dtype=config.dtype, rngs=rngs)

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), positions)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nnx.Module):
    """Causal language model: tokens int32 [B, S] to float32 logits [B, S, vocabulary].

    ``positions`` int32 [S] are 0, 1, ... by default; sequences laid out over devices in another order pass their own.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config = config
        self.embed = nnx.Embed(config.vocabulary, config.width, dtype=config.dtype, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.width, dtype=config.dtype, rngs=rngs)
        self.logits = nnx.Linear(config.width, config.vocabulary, use_bias=False, dtype=config.dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        positions = jnp.arange(tokens.shape[1]) if positions is None else positions
        policy = REMAT_POLICIES[self.config.remat]
        apply = Block.__call__ if policy is None else nnx.remat(Block.__call__, policy=policy)
        x = self.embed(tokens)
        for block in self.blocks:
            x = apply(block, x, positions)
        return self.logits(self.norm(x)).astype(jnp.float32)


def largest_difference(a: object, b: object) -> float:
    """Largest absolute difference between two pytrees of arrays."""
    return max(float(jnp.abs(x - y).max()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def nnx_parity(mask: jax.Array | None) -> tuple[float, float]:
    """Differences in (output, gradients) of nnx.MultiHeadAttention with jax_fa4's attention and with Flax's own."""
    x = jax.random.normal(jax.random.key(1), (2, 96, 64))
    results = []
    for attend in (nnx.dot_product_attention, jax_fa4.flax.dot_product_attention):
        layer = nnx.MultiHeadAttention(4, 64, 64, attention_fn=attend, decode=False, rngs=nnx.Rngs(0))
        gradients = nnx.grad(lambda layer: (layer(x, mask=mask) ** 2).mean())(layer)
        results.append((layer(x, mask=mask), nnx.to_pure_dict(gradients)))
    return largest_difference(results[0][0], results[1][0]), largest_difference(results[0][1], results[1][1])


def linen_parity(mask: jax.Array | None) -> tuple[float, float]:
    """The same for linen.MultiHeadDotProductAttention."""
    x = jax.random.normal(jax.random.key(1), (2, 96, 64))
    results = []
    for attend in (linen.dot_product_attention, jax_fa4.flax.dot_product_attention):
        layer = linen.MultiHeadDotProductAttention(4, attention_fn=attend)
        parameters = layer.init(jax.random.key(0), x)
        gradients = jax.grad(lambda p, layer=layer: (layer.apply(p, x, mask=mask) ** 2).mean())(parameters)
        results.append((layer.apply(parameters, x, mask=mask), gradients))
    return largest_difference(results[0][0], results[1][0]), largest_difference(results[0][1], results[1][1])


def main() -> float:
    """Prints the table and returns the largest difference in it."""
    config = DecoderConfig(window=31, sinks=True)
    model = Decoder(config, nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(0), (2, 96), 0, config.vocabulary)
    size = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    gradients = nnx.grad(lambda model: model(tokens).std())(model)
    sinks = gradients["blocks"][0]["attention"]["sinks"][...]
    print(f"decoder with window {config.window} and sinks: {size:,} parameters, logits {model(tokens).shape}")
    print(f"gradient of the first layer's sinks: {[f'{x:.1e}' for x in sinks.tolist()]}\n")

    keep = jax.random.bernoulli(jax.random.key(2), 0.7, (2, 1, 96, 96)) | jnp.eye(96, dtype=bool)
    masks = {"no mask": None, "causal mask": jnp.tril(jnp.ones((1, 1, 96, 96), bool)), "arbitrary mask": keep}
    worst = 0.0
    print("largest difference from Flax's own attention        output  gradients")
    for layer, parity in (
        ("nnx.MultiHeadAttention", nnx_parity),
        ("linen.MultiHeadDotProductAttention", linen_parity),
    ):
        for name, mask in masks.items():
            output, gradient = parity(mask)
            worst = max(worst, output, gradient)
            print(f"{layer:36s}{name:14s}{output:8.1e}  {gradient:9.1e}")
    return worst


if __name__ == "__main__":
    main()
