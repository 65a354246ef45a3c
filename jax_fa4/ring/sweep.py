"""The order of a ring's transfers and visits; knows nothing of attention.

`sweep` brings every block that a device needs past it. The next block's transfer is issued before the work on the
present one, and what a visit leaves for its block (gradients, in backward) rides one hop behind the block, so that all
transfers of a step can run beside the step's kernel. Levels nest: the blocks of the outer axis' neighbour arrive while
the whole inner ring turns.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .schedule import Chain, Level, Pairs

Visit = Callable[[Any, Any, tuple[Any, ...]], tuple[Any, Any]]
"""visit(block, state, shifts) -> (state, what is left for the block); shifts are Python ints or traced, one a level."""


def sweep(levels: tuple[Level, ...], block: Any, state: Any, visit: Visit, shifts: tuple[Any, ...] = ()) -> tuple:
    """Visits this device's own block, then every needed block of the others.

    Args:
      levels: the ring's mesh axes, outermost first.
      block: pytree of this device's KV arrays.
      state: pytree that visits pass on; the first visit gets it as it is here.
      visit: see `Visit`.
      shifts: shifts of the outer levels (for the recursion).

    Returns:
      (state, sum of what all devices' visits left for this device's own block).
    """
    if not levels:
        return visit(block, state, shifts)
    level, inner = levels[0], levels[1:]
    arriving = [_send(block, level.axis, chain.hops[0].pairs) for chain in level.chains]
    state, home = sweep(inner, block, state, visit, (*shifts, 0))
    for chain, first in zip(level.chains, arriving, strict=True):

        def step(block, state, shift):
            return sweep(inner, block, state, visit, (*shifts, shift))

        state, home = _travel(level.axis, chain, first, state, home, step)
    return state, home


def _travel(axis: str, chain: Chain, block: Any, state: Any, home: Any, step: Callable) -> tuple:
    """One chain's hops, the first of which has been made."""
    count = len(chain.hops)

    def hop(index, block, state, left, shift, pairs, last):
        following = block if last else _send(block, axis, pairs)
        moved = None if left is None else _send(left, axis, chain.hops[index].pairs)
        state, new = step(block, state, shift)
        return following, state, new if moved is None else _add(moved, new)

    def unrolled(index, block, state, left, home):
        if left is not None:
            # Without the barrier XLA hoists every transfer of the unrolled ring to its start, and nothing overlaps.
            block, state, left = lax.optimization_barrier((block, state, left))
            home = _add_from(home, left, axis, chain.hops[index].home)
        last = index == count - 1
        pairs = () if last else chain.hops[index + 1].pairs
        return *hop(index, block, state, left, chain.hops[index].shift, pairs, last), home

    left = None
    indices = range(count)
    if chain.uniform and count > 3:
        block, state, left, home = unrolled(0, block, state, left, home)
        shifts = jnp.asarray([h.shift for h in chain.hops[1:-1]], jnp.int32)

        def body(carry, shift):
            return hop(1, *carry, shift, chain.hops[1].pairs, False), None

        (block, state, left), _ = lax.scan(body, (block, state, left), shifts)
        indices = range(count - 1, count)
    for index in indices:
        block, state, left, home = unrolled(index, block, state, left, home)
    return state, _add_from(home, left, axis, chain.final)


def _send(tree: Any, axis: str, pairs: Pairs) -> Any:
    return jax.tree.map(lambda x: lax.ppermute(x, axis, pairs), tree)


def _add(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)


def _add_from(home: Any, left: Any, axis: str, pairs: Pairs) -> Any:
    return _add(home, _send(left, axis, pairs)) if pairs else home
