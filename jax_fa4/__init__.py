"""FlashAttention-4 for JAX: `attention` and what its arguments are made of."""

from .api import attention
from .errors import InvalidArgument, Unsupported
from .explanation import explain
from .masks import Causal, MaskFn, Window
from .scores import ScoreFn
from .vjp import CHECKPOINT_NAMES

__all__ = [
    "CHECKPOINT_NAMES",
    "Causal",
    "InvalidArgument",
    "MaskFn",
    "ScoreFn",
    "Unsupported",
    "Window",
    "attention",
    "explain",
]
