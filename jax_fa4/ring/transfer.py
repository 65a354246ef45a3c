"""Sending a pytree of arrays to another device.

XLA's GPU schedule keeps one collective in flight at a time. So what travels in one step has to be one transfer: of
several only the first would run beside the attention of its step. XLA combines transfers up to a total size, and then
no array is copied; beyond that they are packed into one buffer here.
"""

import math
import os
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .schedule import Pairs

COMBINED_BYTES = 30 << 20
"""Up to which total XLA combines transfers if XLA_FLAGS does not say otherwise."""


def send(tree: Any, axis: str, pairs: Pairs) -> Any:
    """The tree, moved along (source, destination) pairs; zeros where nothing arrives. JAX can differentiate it."""
    return jax.tree.map(lambda x: lax.ppermute(x, axis, pairs), tree)


def send_together(tree: Any, axis: str, pairs: Pairs) -> Any:
    """`send` as one transfer; without derivatives."""
    leaves, treedef = jax.tree.flatten(tree)
    if len(leaves) < 2 or sum(x.size * x.dtype.itemsize for x in leaves) <= combined_bytes():
        return send(tree, axis, pairs)
    packed = [_words(x) for x in leaves]  # whatever the dtypes
    arrived = lax.ppermute(jnp.concatenate(packed), axis, pairs)
    ends = [0]
    for words in packed:
        ends.append(ends[-1] + words.size)
    unpacked = [
        _from_words(lax.slice_in_dim(arrived, start, end), like)
        for start, end, like in zip(ends, ends[1:], leaves, strict=False)
    ]
    return jax.tree.unflatten(treedef, unpacked)


def combined_bytes() -> int:
    """Up to which total XLA combines transfers on GPUs."""
    flag = re.findall(r"--xla_gpu_collective_permute_combine_threshold_bytes=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(flag[-1]) if flag else COMBINED_BYTES


def _words(x: jax.Array) -> jax.Array:
    """The bits of an array as uint32 [n]; a 16-bit array of odd size is padded."""
    flat = x.reshape(-1)
    if x.dtype.itemsize < 4:
        per_word = 4 // x.dtype.itemsize
        flat = jnp.pad(flat, (0, -flat.size % per_word)).reshape(-1, per_word)
    return lax.bitcast_convert_type(flat, jnp.uint32).reshape(-1)


def _from_words(words: jax.Array, like: jax.Array) -> jax.Array:
    if like.dtype.itemsize > 4:
        words = words.reshape(-1, like.dtype.itemsize // 4)
    values = lax.bitcast_convert_type(words, like.dtype).reshape(-1)
    return values[: math.prod(like.shape)].reshape(like.shape)
