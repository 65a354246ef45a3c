"""The order of a ring's transfers and visits; knows nothing of attention.

`sweep` brings every block that a device needs past it. The next block's transfer is issued before the work on the
present one, and what a visit leaves for its block (gradients, in backward) rides one hop behind the block, so that all
transfers of a step can run beside the step's kernel; beside the last of them, which takes home what the last visits
left, a part of the work on a device's own block can be done (`Pass.own`). Levels nest: the blocks of the outer axis'
neighbour arrive while the whole inner ring turns.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .schedule import Chain, Level, Pairs

Visit = Callable[[Any, Any, tuple[Any, ...]], tuple[Any, Any]]
"""visit(block, state, shifts) -> (state, what is left for the block); shifts are Python ints or traced, one a level."""

Send = Callable[[Any, str, Pairs], Any]
"""send(tree, axis, pairs) -> what arrives; see `transfer`."""


class Halves(NamedTuple):
    """The visit of a device's own block in two: `first` before all others, `rest` after them.

    `join` makes (state, what is left) of the two results.
    """

    first: Visit
    rest: Visit
    join: Callable[[Any, Any], tuple[Any, Any]]


class Pass(NamedTuple):
    """What a sweep does at each block, and how it moves them.

    `own` replaces the visit of the device's own block; for rings of one level that visit other blocks.
    """

    visit: Visit
    send: Send
    own: Halves | None = None


def sweep(levels: tuple[Level, ...], block: Any, state: Any, work: Pass, shifts: tuple[Any, ...] = ()) -> tuple:
    """Visits this device's own block, then every needed block of the others.

    Args:
      levels: the ring's mesh axes, outermost first.
      block: pytree of this device's KV arrays, whose axis 1 is the sequence.
      state: pytree that visits pass on; the first visit gets it as it is here.
      work: see `Pass`.
      shifts: shifts of the outer levels (for the recursion).

    Returns:
      (state, sum of what all devices' visits left for this device's own block).
    """
    if not levels:
        return work.visit(block, state, shifts)
    level, inner = levels[0], levels[1:]

    def first_hop(chain: Chain) -> Any:
        leaving = block if chain.cut is None else _rows(block, chain.cut.keys)
        return work.send(leaving, level.axis, chain.hops[0].pairs)

    def step(block: Any, state: Any, shift: Any) -> tuple:
        return sweep(inner, block, state, work, (*shifts, shift))

    arriving = first_hop(level.chains[0]) if level.chains else None
    first, home = None, None
    if work.own:
        # The barrier keeps this visit, of which nothing is used before the end, beside the first hop.
        arriving, first = lax.optimization_barrier((arriving, work.own.first(block, None, (0,))))
    else:
        state, home = step(block, state, 0)
    for chain, following in zip(level.chains, (*level.chains[1:], None), strict=False):
        # A second chain sets out beside the last visit of the first: one transfer at a time.
        leave = functools.partial(first_hop, following) if following else lambda: None
        travel = _Travel(level.axis, chain, step, work.send, leave)
        arriving, state, home, left = travel.run(arriving, state, home)
        arrived = travel.go_home(left, chain.final)
        if work.own and not following:
            # Without the barrier XLA would visit the rest first, as it needs nothing of the others.
            own, state, _ = lax.optimization_barrier((block, state, left))
            state, home = _add((state, home), work.own.join(first, work.own.rest(own, None, (0,))))
        home = travel.add(home, arrived)
    return state, home


class _Travel(NamedTuple):
    """One chain's hops, the first of which has been made."""

    axis: str
    chain: Chain
    step: Callable[[Any, Any, Any], tuple[Any, Any]]
    send: Send
    leave: Callable[[], Any]
    """Called beside the last visit; what it returns is passed on."""

    def run(self, block: Any, state: Any, home: Any) -> tuple:
        count = len(self.chain.hops)
        left = None
        remaining = range(count)
        if self.chain.uniform and count > 3:  # one loop body for all hops but the first and the last
            block, state, left, home = self._unrolled(0, block, state, left, home)
            shifts = jnp.asarray([hop.shift for hop in self.chain.hops[1:-1]], jnp.int32)
            (block, state, left), _ = lax.scan(lambda carry, shift: (self._hop(1, shift, *carry), None),
                                               (block, state, left), shifts)
            remaining = range(count - 1, count)
        for index in remaining:
            block, state, left, home = self._unrolled(index, block, state, left, home)
        return block, state, home, left

    def _unrolled(self, index: int, block: Any, state: Any, left: Any, home: Any) -> tuple:
        # Without the barrier XLA hoists the transfers of an unrolled ring to its start, and nothing overlaps.
        block, state, left = lax.optimization_barrier((block, state, left))
        hop = self.chain.hops[index]
        if left is not None:
            home = self.add(home, self.go_home(left, hop.home))
        return *self._hop(index, hop.shift, block, state, left), home

    def _hop(self, index: int, shift: Any, block: Any, state: Any, left: Any) -> tuple:
        """One step: (the following block, state, what is left for the present block)."""
        hops = self.chain.hops
        following = hops[index + 1].pairs if index + 1 < len(hops) else None
        if left is not None and following == hops[index].pairs:
            block_next, moved = self.send((block, left), self.axis, following)
        else:
            block_next = self.leave() if following is None else self.send(block, self.axis, following)
            moved = None if left is None else self.send(left, self.axis, hops[index].pairs)
        state, new = self.step(block, state, shift)
        return block_next, state, new if moved is None else _add(moved, new)

    def go_home(self, left: Any, pairs: Pairs) -> Any:
        """What was left for this device's own block, from where the block is now; None if it has all that it gets."""
        return self.send(left, self.axis, pairs) if pairs else None

    def add(self, home: Any, arrived: Any) -> Any:
        """What is left for this device's own block, with what arrived for it."""
        if arrived is None:
            return home
        return _add(home, arrived) if self.chain.cut is None else _add_rows(home, arrived, self.chain.cut.keys)


def _rows(tree: Any, rows: range) -> Any:
    """The given rows (axis 1) of all arrays."""
    return jax.tree.map(lambda x: x[:, rows.start : rows.stop], tree)


def _add_rows(whole: Any, part: Any, rows: range) -> Any:
    return jax.tree.map(lambda a, b: a.at[:, rows.start : rows.stop].add(b), whole, part)


def _add(a: Any, b: Any) -> Any:
    """The sum of two trees; None is nothing yet."""
    return jax.tree.map(lambda x, y: y if x is None else jnp.add(x, y), a, b, is_leaf=lambda x: x is None)
