"""Small blocks of the XLA backend, so that its loop and its skips are met at test sizes."""

import contextlib
from collections.abc import Iterator

import jax

from jax_fa4 import blockwise


@contextlib.contextmanager
def blocks_of(longest: int, shortest: int | None = None) -> Iterator[None]:
    """Within it blocks have at most `longest` rows or keys, and at least `shortest` (the same by default)."""
    saved = blockwise.LONGEST_BLOCK, blockwise.SHORTEST_BLOCK
    blockwise.LONGEST_BLOCK, blockwise.SHORTEST_BLOCK = longest, longest if shortest is None else shortest
    jax.clear_caches()
    try:
        yield
    finally:
        blockwise.LONGEST_BLOCK, blockwise.SHORTEST_BLOCK = saved
        jax.clear_caches()
