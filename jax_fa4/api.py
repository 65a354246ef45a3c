"""The public call."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.lax.lax import _convert_element_type  # the public one cannot make a weak type

from . import backends
from .masks import Mask, MaskFn
from .scores import ScoreFn
from .spec import Arguments, flag, make_spec

IntLike = int | jax.Array


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = False,
    window: tuple[IntLike | None, IntLike | None] | None = None,
    mask: Mask | MaskFn | Callable | jax.Array | None = None,
    softcap: float | None = None,
    score_mods: Sequence[Callable | ScoreFn] | Callable | ScoreFn = (),
    sinks: jax.Array | None = None,
    bias: jax.Array | None = None,
    q_segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    q_lengths: jax.Array | None = None,
    kv_lengths: jax.Array | None = None,
    q_position: tuple[IntLike, IntLike] | None = None,
    kv_position: tuple[IntLike, IntLike] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str = "auto",
) -> Any:
    """Softmax attention: softmax(mods(scale * q k^T) where mask) v, without ever forming the S x T scores.

    The order is fixed: scale * q.k, softcap, + bias, score mods, AND of all masks, softmax with the sink. Shapes: B
    batch, S query length, T key length, H query heads, K KV heads, D and E head dims.

    Args:
      q: [B, S, H, D]; float16, bfloat16, float32, or float64 where JAX has it on.
      k: [B, T, K, D], of the same dtype; H is a multiple of K, and query head h reads KV head h // (H // K).
      v: [B, T, K, E], of the same dtype.
      causal: keep keys at or before the query's position. With S != T the last row and the last key coincide
        (bottom-right), with lengths those of each example.
      window: (left, right): keep keys with position_q - left <= position_k <= position_q + right. None on a side
        leaves it unbounded. Bounds may be integer arrays, so that a scan over layers can vary them.
      mask: a further mask: `Causal()`, `Window(...)` and `&` of them, a function `f(b, h, q, k) -> bool` of scalars,
        `MaskFn(f, operands=(...))` for one that reads arrays, or a boolean array [B|1, H|1, S|1, T] (slow: never on
        kernels).
      softcap: positive: replace scores s by softcap * tanh(s / softcap).
      score_mods: functions `f(score, b, h, q, k) -> score` of scalars, or `ScoreFn(f, operands=(...))` for those that
        read arrays, whose gradients are computed.
      sinks: [H], a learned logit for each query head, finite or -inf, which takes part in the softmax's denominator
        alone.
      bias: [B|1, H|1, S|1, T], floating, added to scores; has a gradient.
      q_segment_ids, kv_segment_ids: integers [B, S] and [B, T], taken as int32; keep scores whose ids are equal. In
        any order.
      q_lengths, kv_lengths: integers [B]; rows and keys at or past them do not take part. They may hold anything
        finite, as everything that a mask rules out: it meets a weight of 0.
      q_position, kv_position: (offset, stride) pairs of integers, each a scalar or [B], possibly traced: row i sits at
        offset + stride * i, with strides of at least 1. Given either, nothing is aligned bottom-right; the other
        defaults to (0, 1).
      scale: positive factor on q.k, part of the program; D ** -0.5 by default.
      return_lse: also return LSE.
      deterministic: make gradients bitwise equal from run to run.
      backend: "auto", "xla", "cuda", "emulate:sm_90a" or "emulate:sm_100a". One asked for by name never falls back.

    Returns:
      o [B, S, H, E] of q's dtype; with `return_lse` (o, lse), LSE [B, H, S] in float32 (float64 for float64 inputs),
      natural logarithm, including the sink, differentiable. A row without keys, or past its query length, gives o = 0,
      LSE = -inf (the sink where there is one) and zero gradients.

    Raises:
      InvalidArgument: an argument that no backend could accept.
      Unsupported: a backend asked for by name cannot run this call.
    """
    return_lse = flag("return_lse", return_lse)
    spec, operands = make_spec(Arguments(
        q, k, v, causal, window, mask, softcap, score_mods, sinks, bias, q_segment_ids, kv_segment_ids, q_lengths,
        kv_lengths, q_position, kv_position, scale, deterministic))
    o, lse = backends.resolve(backend, spec, operands).attend(spec, operands)
    o = _convert_element_type(o, weak_type=jax.typeof(jnp.asarray(q)).weak_type)
    return (o, lse) if return_lse else o
