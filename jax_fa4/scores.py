"""Score mods: the score's value, between scale * q.k and the mask.

A spec holds them in the order in which they apply: `SoftCap`, `Bias`, then user functions (`ScoreMap`). Backends that
differentiate by JAX use `apply` and its vjp; kernels lower each class themselves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .masks import slice_tile
from .scalar import ScalarFunction, Tile


@dataclass(frozen=True)
class SoftCap:
    """score -> cap * tanh(score / cap), cap > 0."""

    cap: float


@dataclass(frozen=True)
class Bias:
    """score -> score + `Operands.bias`, an array [B|1, H|1, S|1, T] with a gradient."""


@dataclass(frozen=True)
class ScoreMap:
    """score -> a traced `f(score, b, h, q, k, *operands)`; `ScoreFn` says what the arguments are."""

    function: ScalarFunction


ScoreMod = SoftCap | Bias | ScoreMap


@dataclass(frozen=True, eq=False)
class ScoreFn:
    """A user's score function and the arrays it reads, as given to `attention(score_mods=...)`.

    Attributes:
      function: `f(score, b, h, q, k, *operands) -> score`, written with jax.numpy for one score, which is already
        scaled, capped and biased. b and h are the indices of example and query head; q and k those of query row and
        key, or their positions where the call gives positions.
      operands: arrays that it reads; floating ones have gradients.
    """

    function: Callable
    operands: Sequence[Any] = ()


def apply(
    mods: Sequence[ScoreMod], scores: jax.Array, tile: Tile, bias: jax.Array | None, operands: Sequence[jax.Array]
) -> jax.Array:
    """Applies score mods to scaled scores [B, H, Q, K].

    Args:
      mods: in order.
      scores: float32 or float64.
      tile: where the scores lie.
      bias: the part of the bias for this tile (`masks.slice_tile`), or None.
      operands: arrays of the `ScoreMap`s, in order.
    """
    read = 0
    for mod in mods:
        match mod:
            case SoftCap(cap):
                scores = cap * jnp.tanh(scores * (1 / cap))
            case Bias():
                scores = scores + bias.astype(scores.dtype)
            case ScoreMap(function):
                scores = function.on_tile(tile, operands[read : read + function.operand_count], scores)
                read += function.operand_count
    return scores


def bias_tile(bias: jax.Array | None, tile: Tile) -> jax.Array | None:
    """The part of a bias [B|1, H|1, S|1, T] that a tile reads."""
    return None if bias is None else slice_tile(bias, tile)
