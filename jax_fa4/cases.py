"""The one list of named calls, for every backend's tests, `python -m jax_fa4 check` and benchmarks.

A case is a shape, a dtype and the names of variants; each variant adds arguments of `attention`. Adding a variant is
one entry in VARIANTS and one line in CASES.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from .masks import Causal, MaskFn
from .scores import ScoreFn

Draw = np.random.Generator


@dataclass(frozen=True)
class Shape:
    """B batch, S query length, T key length, H query heads, K KV heads, D head dim, E value head dim."""

    B: int = 2
    S: int = 130
    T: int = 130
    H: int = 4
    K: int = 2
    D: int = 64
    E: int = 64


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
      name: unique.
      variants: names in VARIANTS; they are also the case's tags.
      shape: of q, k and v.
      dtype: of q, k and v.
      spread: "gaussian", "heavy" (Student's t with 2 degrees of freedom) or "huge" (scores of about +-1e4).
      tags: further tags: "edge" for legal inputs at the edge, "empty" for axes of size 0.
    """

    name: str
    variants: tuple[str, ...] = ()
    shape: Shape = Shape()
    dtype: str = "bfloat16"
    spread: str = "gaussian"
    tags: tuple[str, ...] = ()

    @property
    def all_tags(self) -> frozenset[str]:
        """Variants, further tags, the dtype and the spread."""
        return frozenset((*self.variants, *self.tags, self.dtype, self.spread))

    def make(self, seed: int = 0) -> dict[str, Any]:
        """Arguments of `attention`, with fresh arrays (numpy, except in functions' operands)."""
        draw, s = np.random.default_rng(seed), self.shape
        shapes = {"q": (s.B, s.S, s.H, s.D), "k": (s.B, s.T, s.K, s.D), "v": (s.B, s.T, s.K, s.E)}
        arguments: dict[str, Any] = {}
        for name, shape in shapes.items():
            x = draw.standard_t(2, shape).clip(-50, 50) if self.spread == "heavy" else draw.standard_normal(shape)
            if self.spread == "huge" and name != "v":
                x *= 40.0 * s.D**0.25
            arguments[name] = np.asarray(x).astype(jnp.dtype(self.dtype))
        for variant in self.variants:
            arguments |= VARIANTS[variant](s, draw)
        return arguments

    def resized(self, **sizes: int) -> "Case":
        """The same case with some sizes of its shape changed, renamed accordingly."""
        suffix = "-".join(f"{name}{size}" for name, size in sizes.items())
        return replace(self, name=f"{self.name}-{suffix}", shape=replace(self.shape, **sizes))


def _lengths(longest: int, batch: int, draw: Draw) -> np.ndarray:
    """Lengths within [0, longest]: random ones, the first whole, the last 0 where there are three or more."""
    lengths = draw.integers(1, longest + 1, batch)
    lengths[:1] = longest
    if batch > 2:
        lengths[-1] = 0
    return lengths.astype(np.int32)


def _segments(s: Shape, draw: Draw, ordered: bool) -> dict[str, np.ndarray]:
    q, kv = (draw.integers(0, 4, (s.B, n)).astype(np.int32) for n in (s.S, s.T))
    return {"q_segment_ids": np.sort(q) if ordered else q, "kv_segment_ids": np.sort(kv) if ordered else kv - 1}


def _normal(draw: Draw, *shape: int) -> np.ndarray:
    return draw.standard_normal(shape).astype(np.float32)


def _bias_with_infinities(s: Shape, draw: Draw) -> dict[str, np.ndarray]:
    bias = _normal(draw, s.B, 1, s.S, s.T)
    bias[draw.random(bias.shape) < 0.3] = -np.inf
    bias[:, :, :3] = -np.inf
    return {"bias": bias}


def _alibi(score, b, h, q, k, slopes):
    return score - slopes[h] * jnp.abs(q - k) / 64


def _gated(score, b, h, q, k):
    return jnp.where((q + k) % 2 == 0, jnp.tanh(score) * 3.0, score * 0.5 + 0.01 * h)


def _dilated(b, h, q, k, periods):
    return (q - k) % periods[h] == 0


def _prefix(b, h, q, k):
    return (k <= q) | (k < 16 * (b + 1))


VARIANTS: dict[str, Callable[[Shape, Draw], dict[str, Any]]] = {
    "causal": lambda s, draw: {"causal": True},
    "window": lambda s, draw: {"window": (s.T // 4, s.T // 8)},
    "window_left": lambda s, draw: {"window": (s.T // 3, None)},
    "window_right": lambda s, draw: {"window": (None, s.T // 8)},
    "window_zero": lambda s, draw: {"window": (0, 0)},
    "window_runtime": lambda s, draw: {"window": (jnp.int32(s.T // 4), jnp.int32(s.T // 8))},
    "softcap": lambda s, draw: {"softcap": 5.0},
    "scale": lambda s, draw: {"scale": 0.3},
    "sinks": lambda s, draw: {"sinks": _normal(draw, s.H)},
    "bias": lambda s, draw: {"bias": _normal(draw, s.B, s.H, s.S, s.T)},
    "bias_shared": lambda s, draw: {"bias": _normal(draw, 1, s.H, 1, s.T)},
    "bias_infinite": _bias_with_infinities,
    "segments": lambda s, draw: _segments(s, draw, ordered=True),
    "segments_unsorted": lambda s, draw: _segments(s, draw, ordered=False),
    "q_lengths": lambda s, draw: {"q_lengths": _lengths(s.S, s.B, draw)},
    "kv_lengths": lambda s, draw: {"kv_lengths": _lengths(s.T, s.B, draw)},
    "no_keys": lambda s, draw: {"kv_lengths": np.zeros(s.B, np.int32)},
    "positions": lambda s, draw: {"q_position": (jnp.int32(s.T // 3), 2), "kv_position": (jnp.arange(s.B) * 5, 1)},
    "alibi": lambda s, draw: {"score_mods": [ScoreFn(_alibi, (2.0 ** -np.arange(1, s.H + 1, dtype=np.float32),))]},
    "score_function": lambda s, draw: {"score_mods": [_gated]},
    "mask_function": lambda s, draw: {"mask": _prefix},
    "mask_operands": lambda s, draw: {"mask": Causal() & MaskFn(_dilated, (np.arange(1, s.H + 1, dtype=np.int32),))},
    "mask_array": lambda s, draw: {"mask": draw.random((s.B, 1, s.S, s.T)) < 0.6},
    "deterministic": lambda s, draw: {"deterministic": True},
}

_PLAIN = Shape()
_CROSS = Shape(S=75, T=201)
_LONG_QUERY = Shape(S=201, T=75)
_THREE = Shape(B=3, S=97, T=131)

CASES: tuple[Case, ...] = (
    Case("full"),
    Case("causal", ("causal",)),
    Case("full-float16", dtype="float16"),
    Case("causal-float32", ("causal",), dtype="float32"),
    Case("causal-heavy", ("causal",), spread="heavy"),
    Case("full-heavy-float32", spread="heavy", dtype="float32"),
    Case("causal-huge", ("causal",), spread="huge", tags=("edge",)),
    Case("mha", ("causal",), Shape(H=4, K=4)),
    Case("mqa", ("causal",), Shape(H=4, K=1)),
    Case("odd-group", ("causal",), Shape(H=6, K=2)),
    Case("d128", ("causal",), Shape(D=128, E=128)),
    Case("d192-e128", ("causal",), Shape(D=192, E=128, H=2, K=2)),
    Case("d256", ("causal",), Shape(D=256, E=256, H=2, K=1)),
    Case("d64-e32", (), Shape(E=32)),
    Case("d16-e8", ("causal",), Shape(D=16, E=8), "float32"),
    Case("cross", (), _CROSS),
    Case("cross-causal", ("causal",), _CROSS),
    Case("long-query-causal", ("causal",), _LONG_QUERY, tags=("edge",)),
    Case("one-query", ("causal",), Shape(S=1, T=200), tags=("decode",)),
    Case("one-key", (), Shape(S=130, T=1), tags=("edge",)),
    Case("one-each", ("causal",), Shape(B=1, S=1, T=1), tags=("edge",)),
    Case("prime", ("causal",), Shape(S=127, T=257)),
    Case("window", ("window",)),
    Case("window-left", ("window_left", "causal"), _CROSS),
    Case("window-right", ("window_right",)),
    Case("window-zero", ("window_zero",), tags=("edge",)),
    Case("window-runtime", ("window_runtime",)),
    Case("window-runtime-causal", ("window_runtime", "causal"), _CROSS),
    Case("softcap", ("softcap", "causal")),
    Case("scale", ("scale",)),
    Case("sinks", ("sinks", "causal")),
    Case("sinks-window-gqa", ("sinks", "window"), _CROSS),
    Case("sinks-no-keys", ("sinks", "no_keys"), tags=("edge",)),
    Case("no-keys", ("no_keys",), tags=("edge",)),
    Case("bias", ("bias", "causal")),
    Case("bias-shared", ("bias_shared",), _CROSS),
    Case("bias-infinite", ("bias_infinite",), tags=("edge",)),
    Case("segments", ("segments", "causal")),
    Case("segments-unsorted", ("segments_unsorted",), _CROSS, tags=("edge",)),
    Case("kv-lengths", ("kv_lengths",), _THREE),
    Case("lengths-causal", ("q_lengths", "kv_lengths", "causal"), _THREE, tags=("edge",)),
    Case("lengths-window-sinks", ("q_lengths", "kv_lengths", "window", "sinks"), _THREE),
    Case("positions", ("positions", "causal")),
    Case("positions-window", ("positions", "window", "kv_lengths"), _CROSS),
    Case("alibi", ("alibi", "causal")),
    Case("score-function", ("score_function",)),
    Case("mask-function", ("mask_function",)),
    Case("mask-operands", ("mask_operands",), _CROSS),
    Case("mask-array", ("mask_array",)),
    Case("deterministic", ("deterministic", "causal")),
    Case("kitchen-sink", ("causal", "window_left", "softcap", "sinks", "segments", "q_lengths", "kv_lengths"), _THREE),
    Case("everything", ("causal", "window", "mask_function", "softcap", "bias", "alibi", "sinks", "segments_unsorted",
                        "q_lengths", "kv_lengths", "positions"), _THREE, "float32"),
    Case("no-batch", ("causal",), Shape(B=0), tags=("empty",)),
    Case("no-rows", (), Shape(S=0), tags=("empty",)),
    Case("no-columns", ("sinks",), Shape(T=0), tags=("empty",)),
    Case("no-heads", (), Shape(H=0, K=0), tags=("empty",)),
)


def select(wanted: Sequence[str] = (), without: Sequence[str] = ()) -> list[Case]:
    """Cases that have all tags wanted and none of those without."""
    return [c for c in CASES if c.all_tags.issuperset(wanted) and not c.all_tags.intersection(without)]
