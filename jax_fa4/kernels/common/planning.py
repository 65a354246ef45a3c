"""What plans have in common. Plain Python."""

from __future__ import annotations

import dataclasses

from jax_fa4.kernels.common import scalar_check, slope
from jax_fa4.scores import ScoreMap
from jax_fa4.spec import AttentionSpec

STATISTIC_BYTES = 4
"""Of one row's LSE or delta."""

MOST_MULTIPROCESSORS = 160
"""More than any device has now: XLA plans the scratch of a program without knowing its device."""


@dataclasses.dataclass(frozen=True)
class Cutting:
    """When tiles are cut along the keys: least KV blocks of a share, how many blocks' time cutting has to save, and
    what part of all the time, in percent."""

    least_blocks: int = 4
    gain_blocks: int = 8
    gain_percent: int = 0


@dataclasses.dataclass(frozen=True)
class PieceCosts:
    """By what a backward kernel decides which tiles to cut along their steps (see `last_wave`), in steps but `slabs`.

    Attributes:
      tile: what a tile or a piece of one costs beside its steps.
      sums: what adding up pieces costs; one more for so many `slabs`.
      long: after full waves only tiles of so many steps are cut; shorter ones gain less than that costs.
    """

    tile: int = 2
    sums: int = 2
    slabs: int = 32
    long: int = 40


def pad_head_dim(dim: int) -> int:
    """The head dim of a tile: a multiple of 64 elements, the width of a 128-byte swizzle."""
    return -(-dim // 64) * 64


def check_slopes(spec: AttentionSpec) -> None:
    """Raises `Unsupported` for a score function whose derivative kernels cannot compute."""
    for mod in spec.score_mods:
        if isinstance(mod, ScoreMap):
            scalar_check.check(slope.slope(mod.function))
