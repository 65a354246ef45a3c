"""FlashAttention-4 for JAX: `attention` and what its arguments are made of.

The drop-ins `nn` and `flax`, and the parts that load the shared library or look for a compiler, are imported when first
used.
"""

import importlib
from typing import Any

from .api import attention
from .errors import InvalidArgument, Unsupported
from .explanation import explain
from .layout import from_layout, layout_positions, to_layout
from .masks import Causal, MaskFn, Window
from .ring import ring_attention, ulysses_attention
from .scores import ScoreFn
from .targets import target
from .vjp import CHECKPOINT_NAMES

_ON_DEMAND = {"EXPORT_CHECKS": "call", "counters": "counting", "emulate": "emulator", "register": "registry"}
_MODULES = ("counting", "draw", "emulator", "flax", "nn", "registry", "sass", "timeline")

__all__ = [
    "CHECKPOINT_NAMES",
    "EXPORT_CHECKS",
    "Causal",
    "InvalidArgument",
    "MaskFn",
    "ScoreFn",
    "Unsupported",
    "Window",
    "attention",
    "counters",
    "emulate",
    "explain",
    "from_layout",
    "layout_positions",
    "register",
    "ring_attention",
    "target",
    "to_layout",
    "ulysses_attention",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name in _ON_DEMAND:
        return getattr(importlib.import_module(f".{_ON_DEMAND[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_DEMAND, *_MODULES})
