"""What the backward plans of all architectures have in common. Plain Python."""

from __future__ import annotations

from jax_fa4.kernels.common import scalar_check, slope
from jax_fa4.scores import ScoreMap
from jax_fa4.spec import AttentionSpec

STATISTIC_BYTES = 4
"""Of one row's LSE or delta."""


def pad_head_dim(dim: int) -> int:
    """The head dim of a tile: a multiple of 64 elements, the width of a 128-byte swizzle."""
    return -(-dim // 64) * 64


def check_slopes(spec: AttentionSpec) -> None:
    """Raises `Unsupported` for a score function whose derivative kernels cannot compute."""
    for mod in spec.score_mods:
        if isinstance(mod, ScoreMap):
            scalar_check.check(slope.slope(mod.function))
