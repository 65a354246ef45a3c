"""What every role of the backward kernel gets."""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_fa4.kernels.common import key_tiles, segments
from jax_fa4.kernels.sm100.bwd import pair
from jax_fa4.kernels.sm100.bwd.barriers import Pipes
from jax_fa4.kernels.sm100.bwd.memory import Shared
from jax_fa4.kernels.sm100.bwd.plan import BackwardPlan
from jax_fa4.kernels.sm100.bwd.products import Products


@dataclasses.dataclass(frozen=True)
class Context:
    """Attributes:
    rank: of the CTA in its pair, 0 without one.
    tmem: the address of the block's tensor memory.
    """

    kernel: Any
    products: Products
    shared: Shared
    pipes: Pipes
    g: Any
    dims: Any
    schedule: Any
    rank: Any = 0
    tmem: Any = None

    @property
    def plan(self) -> BackwardPlan:
        return self.kernel.plan

    @property
    def spec(self):
        return self.kernel.spec

    @property
    def dtype(self):
        return self.kernel.dtype

    def steps(self, tile) -> key_tiles.Steps:
        """The loop for a tile, for a whole warp."""
        steps = key_tiles.steps(self.kernel, self.g, self.dims, tile)
        if steps.segments is not None:
            steps = dataclasses.replace(steps, segments=segments.remembered(steps.segments))
        return steps

    def first_key(self, tile) -> Int32:
        """Of this CTA."""
        return tile.block * self.plan.block_k + self.rank * self.plan.keys


def first_number(plan: BackwardPlan) -> Int32:
    """The number of the first tile of this block, or pair."""
    return cute.arch.block_idx()[0] // plan.ctas


def draw(context: Context, turn: Int32) -> Int32:
    """The next tile number, in the load role."""
    if cutlass.const_expr(context.plan.paired):
        return pair.draw(context, turn)
    return key_tiles.draw(context.pipes, context.shared, context.g.tile_counter, turn)


def receive(context: Context, turn: Int32) -> Int32:
    """The next tile number, in all other roles."""
    return key_tiles.receive(context.pipes, context.shared, turn, copied=context.plan.paired)
