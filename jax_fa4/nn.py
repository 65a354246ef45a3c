"""A drop-in for ``jax.nn``: the same signature, the same meaning, without the [T, S] array of scores."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_fa4.api import attention
from jax_fa4.spec import compute_dtype

_ROWS_FROM_ZERO = (0, 1)  # offset and stride: row i sits at position i, which aligns causal and windows top-left


def dot_product_attention(  # jax.nn's own signature, hence its number of parameters
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """``jax.nn.dot_product_attention`` computed by :func:`jax_fa4.attention`.

    Unlike :func:`jax_fa4.attention` it aligns ``is_causal`` and windows top-left, and gives a row that may see no key
    the mean of the values, as jax.nn does. Letters as in jax.nn: B batch, T query length, S key length, N query
    heads, K key/value heads, H head dim.

    Args:
      query: [B, T, N, H] or [T, N, H]; floating point.
      key: [B, S, K, H] or [S, K, H], K divides N; same dtype.
      value: as ``key``.
      bias: added to the scores; up to 4-D, broadcast to [B, N, T, S]; has a gradient.
      mask: bool, True where a key takes part; up to 4-D, broadcast to [B, N, T, S].
      scale: factor on the scores, 1 / sqrt(H) where None.
      is_causal: query t sees keys s <= t.
      query_seq_lengths: int32 [B]; rows from there on give 0.
      key_value_seq_lengths: int32 [B]; keys from there on are not seen.
      local_window_size: (left, right), inclusive: query t sees t - left <= s <= t + right; an int means both.
      implementation: None picks the best backend; ``"cudnn"`` calls jax.nn itself; otherwise a backend of
        :func:`jax_fa4.attention` (``"xla"``, ``"cuda"``, ``"emulate:<arch>"``).
      return_residual: also return the log-sum-exp of the scores, [B, T, N] or [T, N] in ``key``'s dtype, which has no
        gradient.

    Returns:
      An array shaped like ``query``, and the residual where asked for.

    Raises:
      ValueError: for shapes or dtypes that jax.nn refuses too.
    """
    if implementation == "cudnn":
        jax_nn: Any = jax.nn.dot_product_attention  # its overloads are too many for a type checker
        return jax_nn(
            query,
            key,
            value,
            bias,
            mask,
            scale=scale,
            is_causal=is_causal,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            local_window_size=local_window_size,
            implementation="cudnn",
            return_residual=return_residual,
        )
    output_shape = jnp.shape(query)
    q, k, v = _as_4d(query), _as_4d(key), _as_4d(value)
    bias = None if bias is None else _as_4d(bias)
    mask = None if mask is None else _as_4d(mask)
    q_lengths = None if query_seq_lengths is None else jnp.asarray(query_seq_lengths)
    kv_lengths = None if key_value_seq_lengths is None else jnp.asarray(key_value_seq_lengths)

    batch, kv_len, kv_heads, head_dim = k.shape
    _check("value", v, (batch, kv_len, kv_heads, head_dim), k.dtype)
    _check("query", q, (batch, None, None, head_dim), k.dtype)
    _check("mask", mask, (None,) * 4, np.dtype(bool))
    _check("query_seq_lengths", q_lengths, (batch,), np.dtype(np.int32))
    _check("key_value_seq_lengths", kv_lengths, (batch,), np.dtype(np.int32))
    if q.shape[2] % kv_heads:
        raise ValueError(
            f"The number of query heads must be a multiple of key/value heads, but got {q.shape[2]} vs {kv_heads}"
        )
    scores_shape = (batch, q.shape[2], q.shape[1], kv_len)
    q, static_scale = _static_scale(q, scale)
    window, mask = _window(local_window_size, mask, scores_shape)
    if bias is not None:
        bias = _whole_rows("bias", bias, scores_shape).astype(compute_dtype(q.dtype))
    if mask is not None:
        mask = _whole_rows("mask", mask, scores_shape)
    positional = is_causal or window is not None
    o, lse = attention(
        q,
        k,
        v,
        causal=is_causal,
        window=window,
        mask=mask,
        bias=bias,
        q_lengths=q_lengths,
        kv_lengths=kv_lengths,
        scale=static_scale,
        q_position=_ROWS_FROM_ZERO if positional else None,
        kv_position=_ROWS_FROM_ZERO if positional else None,
        return_lse=True,
        backend=implementation or "auto",
    )
    lse = jnp.swapaxes(lse, 1, 2)  # [B, T, N]
    sees_nothing = jnp.isneginf(lse)
    if kv_len and (positional or mask is not None or bias is not None or kv_lengths is not None):
        o = jnp.where(sees_nothing[..., None], _mean_value(v, q.shape[2]), o)
    if q_lengths is not None:
        inside = jnp.arange(q.shape[1])[None] < q_lengths[:, None]
        o = jnp.where(inside[:, :, None, None], o, 0)
    o = o.reshape(output_shape)
    if not return_residual:
        return o
    # jax.nn masks with this finite number, so it is what its log-sum-exp shows for a row that sees nothing.
    lowest = -0.7 * float(jnp.finfo(jnp.float32).max)
    residual = jnp.where(sees_nothing, lowest, lse).astype(k.dtype).reshape(output_shape[:-1])
    return o, jax.lax.stop_gradient(residual)


def _as_4d(x: ArrayLike) -> jax.Array:
    x = jnp.asarray(x)
    return x if x.ndim >= 4 else jnp.expand_dims(x, tuple(range(4 - x.ndim)))


def _check(name: str, x: jax.Array | None, shape: Sequence[int | None], dtype: np.dtype) -> None:
    """jax.nn's own checks and words; None in ``shape`` allows any size."""
    if x is None:
        return
    if x.ndim != len(shape):
        raise ValueError(f"{name} ndim should be {len(shape)}, but got {x.ndim}")
    if x.dtype != dtype:
        raise ValueError(f"{name} dtype should be {dtype}, but got {x.dtype}")
    if any(want not in (None, got) for want, got in zip(shape, x.shape, strict=True)):
        wanted = [-1 if want is None else want for want in shape]
        raise ValueError(f"{name} shape should be {wanted}: but got {x.shape}")


def _whole_rows(name: str, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A mask or bias that broadcasts to [B, N, T, S], with its last axis whole, as jax_fa4.attention takes it."""
    if x.ndim != 4 or any(got not in (1, want) for want, got in zip(shape, x.shape, strict=True)):
        raise ValueError(f"{name} shape should be broadcastable to {shape} (B, N, T, S), but got {x.shape}")
    return jnp.broadcast_to(x, (*x.shape[:3], shape[3]))


def _static_scale(q: jax.Array, scale: ArrayLike | None) -> tuple[jax.Array, float | None]:
    """Splits ``scale`` into a factor on q and the positive Python number that a spec holds."""
    if scale is None:
        return q, None
    if isinstance(scale, int | float | np.number) and 0 < scale < float("inf"):
        return q, float(scale)
    return (q.astype(compute_dtype(q.dtype)) * scale).astype(q.dtype), 1.0


def _window(
    size: int | tuple[int, int] | None, mask: jax.Array | None, shape: tuple[int, ...]
) -> tuple[tuple[int, int] | None, jax.Array | None]:
    """``local_window_size`` as (window, mask): a negative bound, which no window has, goes into the mask array."""
    if size is None:
        return None, mask
    left, right = (size, size) if isinstance(size, int) else size
    if left >= 0 and right >= 0:
        return (left, right), mask
    distance = jnp.arange(shape[3])[None, None, None] - jnp.arange(shape[2])[None, None, :, None]
    band = (distance >= -left) & (distance <= right)
    return None, band if mask is None else band & mask


def _mean_value(v: jax.Array, heads: int) -> jax.Array:
    """Mean over all keys of v [B, S, K, H], repeated for each query head: [B, 1, N, H]."""
    mean = v.astype(compute_dtype(v.dtype)).mean(axis=1, keepdims=True).astype(v.dtype)
    return jnp.repeat(mean, heads // v.shape[2], axis=2)
