"""Pieces of tiles that were cut along the keys: their scratch, and the kernel that combines them."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_fa4.kernels.common import abi, combine, copies, scheduler


def scratch(spec, plan) -> tuple[abi.Buffer, ...]:
    """Normalised O and LSE of each piece's rows, both float32."""
    rows = (scheduler.MOST_PIECES, plan.block_q)
    return (
        abi.scratch("partial_o", "float32", (*rows, spec.value_head_dim)),
        abi.scratch("partial_lse", "float32", rows),
    )


class Combine:
    """A warp for each row of the tiles that were cut."""

    def __init__(self, spec, plan):
        self.spec, self.plan = spec, plan

    @cute.jit
    def launch(self, schedule: scheduler.SharedSchedule, g, dims, stream):
        """Launches the kernel, if tiles were cut."""
        if schedule.cut > 0:
            self._launch(schedule, g, dims, stream)

    def _launch(self, schedule, g, dims, stream) -> None:
        rows = cutlass.min(dims.S * self.plan.packed_heads, Int32(self.plan.block_q))
        self.kernel(schedule, g, dims).launch(
            grid=(cute.ceil_div(rows, combine.ROWS), schedule.cut, 1), block=(32 * combine.ROWS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, schedule, g, dims):
        plan = self.plan
        block, index, _ = cute.arch.block_idx()
        row = block * combine.ROWS + cute.arch.thread_idx()[0] // 32
        tile = schedule.tile(schedule.whole + index)
        position = tile.q_block * plan.block_positions + row // plan.packed_heads
        if (row < plan.block_q) & (position < dims.S):
            slot, parts = schedule.slots(index)
            place = (tile.batch, position, tile.head * plan.packed_heads + row % plan.packed_heads)
            o = cute.domain_offset((0, slot, row), copies.permuted(g.partial_o, 2, 0, 1))
            lse = cute.domain_offset((slot, row), g.partial_lse)
            combine.combine_row(self.spec, o[None, None, 0], lse[None, 0], parts, g, place)
