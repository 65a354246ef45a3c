"""Attention functions for Flax: ``flax.linen.MultiHeadDotProductAttention`` and ``flax.nnx.MultiHeadAttention``.

    layer = nnx.MultiHeadAttention(..., attention_fn=jax_fa4.flax.dot_product_attention)
    layer = nnx.MultiHeadAttention(..., attention_fn=jax_fa4.flax.attention_fn(window=(127, 0), softcap=30.0))

This module does not import flax: an attention function is a plain function of arrays, which can be pickled.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_fa4.api import attention
from jax_fa4.errors import invalid

_ROWS_FROM_ZERO = (0, 1)


def attention_fn(**options: Any) -> Callable[..., jax.Array]:
    """An ``attention_fn`` for either Flax API that runs :func:`jax_fa4.attention` with further arguments.

    Args:
      **options: keyword arguments of :func:`jax_fa4.attention` that hold for every call: ``causal``, ``window``,
        ``softcap``, ``score_mods``, ``sinks``, ``scale``, ``deterministic``, ``backend``, ... As everywhere in
        jax_fa4, ``causal`` and ``window`` here align bottom-right. Prefer ``causal=True`` to a causal mask made by
        Flax: a mask array is read score by score, while a causal kernel skips half of the work.

    Returns:
      :func:`dot_product_attention` with these options.
    """
    return functools.partial(dot_product_attention, options=options)


def dot_product_attention(  # the union of linen's and nnx's keywords; linen passes only those that are named here
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    force_fp32_for_softmax: bool = False,  # it always is
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    promote_dtype: Callable | None = None,
    is_causal: bool = False,
    input_positions: jax.Array | None = None,
    *,
    options: Mapping[str, Any] | None = None,
) -> jax.Array:
    """Flax's attention, by :func:`jax_fa4.attention`.

    Args:
      query: [..., T, N, D].
      key: [..., S, K, D]; K divides N.
      value: [..., S, K, E].
      bias: added to the scores, broadcast to [..., N, T, S].
      mask: True (or not 0) where a key takes part, broadcast to [..., N, T, S].
      dtype: of the computation; by default what the inputs promote to.
      is_causal: query t sees keys s <= t, also where T differs from S.
      options: what :func:`attention_fn` takes.

    Returns:
      [..., T, N, E]. A query that may see no key gets 0, where Flax gives the mean of the values.

    Raises:
      InvalidArgument: (a ValueError) for keywords that would change the result and that cannot be honoured: dropout,
        weights to be sown, a ``precision``, einsum overrides, ``input_positions``.
    """
    _refuse("dropout_rate", dropout_rate, dropout_rate > 0.0 and not deterministic, _DROPOUT)
    _refuse("module", type(module).__name__, module is not None, _SOW)
    _refuse("precision", precision, precision is not None, _PRECISION)
    overrides = qk_attn_weights_einsum or attn_weights_value_einsum
    _refuse("qk_attn_weights_einsum or attn_weights_value_einsum", overrides, overrides is not None, _EINSUM)
    _refuse("promote_dtype", promote_dtype, promote_dtype is not None, _PROMOTE)
    _refuse("input_positions", "an array", input_positions is not None, _POSITIONS)
    q, k, v = (x.astype(dtype or jnp.result_type(query, key, value)) for x in (query, key, value))
    batch = q.shape[:-3]
    q, k, v = (_flatten_batch(x, 3) for x in (q, k, v))
    score_shape = (*batch, q.shape[2], q.shape[1], k.shape[1])
    arguments = dict(options or {})
    if bias is not None:
        arguments["bias"] = _broadcast_batch("bias", bias, score_shape)
    if mask is not None:
        given = arguments.get("mask")
        _refuse("mask", "an array beside attention_fn's own mask", given is not None, _TWO_MASKS, "one of the two")
        arguments["mask"] = _broadcast_batch("mask", jnp.asarray(mask) != 0, score_shape)
    if is_causal:  # Flax aligns it top-left, which differs from ours where T != S
        arguments["causal"] = True
        if q.shape[1] != k.shape[1]:
            arguments |= {"q_position": _ROWS_FROM_ZERO, "kv_position": _ROWS_FROM_ZERO}
    o = attention(q, k, v, **arguments)
    return o.reshape(*batch, *o.shape[1:])


_DROPOUT = (
    "attention weights are never stored, so they cannot be dropped: set dropout_rate=0 (or deterministic=True) on the "
    "Flax layer and apply dropout to its output"
)
_SOW = "attention weights are never stored, so they cannot be sown: leave sow_weights=False"
_PRECISION = "leave precision=None: products are those of the inputs' dtype, accumulated in float32"
_TWO_MASKS = "join them into the array, or leave Flax's mask out and give attention_fn the whole mask"
_EINSUM = "leave the einsum overrides unset, or use Flax's own attention for quantised products"
_PROMOTE = "leave promote_dtype unset, or cast the inputs before the call"
_POSITIONS = "apply rotary embeddings before attention, and pass packed sequences as q_segment_ids and kv_segment_ids"


def _refuse(argument: str, received: Any, refused: bool, remedy: str, allowed: str = "its default") -> None:
    if refused:
        raise invalid(argument, received, allowed, remedy)


def _flatten_batch(x: jax.Array, inner: int) -> jax.Array:
    """[..., inner dims] to [B, inner dims]; an array without leading dims gets B = 1."""
    return x.reshape(math.prod(x.shape[:-inner]), *x.shape[-inner:])


def _broadcast_batch(name: str, x: jax.Array, score_shape: tuple[int, ...]) -> jax.Array:
    """Brings a mask or bias that broadcasts to [..., N, T, S] to [B|1, N|1, T|1, S]."""
    x = jnp.asarray(x)
    x = x.reshape((1,) * (len(score_shape) - x.ndim) + x.shape)
    if x.ndim != len(score_shape) or any(got not in (1, want) for got, want in zip(x.shape, score_shape, strict=True)):
        raise invalid(name, f"shape {x.shape}", f"a shape broadcastable to {score_shape}", "Reshape it")
    lead = x.shape[:-3] if all(n == 1 for n in x.shape[:-3]) else score_shape[:-3]
    return _flatten_batch(jnp.broadcast_to(x, (*lead, *x.shape[-3:-1], score_shape[-1])), 3)
