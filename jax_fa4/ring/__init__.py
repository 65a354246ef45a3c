"""Ring Attention: attention over a sequence that is spread over devices."""

from .api import ring_attention, ulysses_attention

__all__ = ["ring_attention", "ulysses_attention"]
