"""Split-KV: the partial results of CTAs that shared a tile's keys, and the kernel that combines them."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from jax_fa4.kernels.common import abi, combine
from jax_fa4.kernels.common.planning import MOST_MULTIPROCESSORS
from jax_fa4.kernels.sm100.plans import BLOCK_K, BLOCK_Q

# At most one partial tile of 256 rows for each CTA, or for each tile where there are more of them.
_PARTIAL_TILES = ("add", MOST_MULTIPROCESSORS, ("mul", "B", ("mul", "H", ("ceil", "S", 2 * BLOCK_Q))))


def partial_buffers(spec) -> tuple[abi.Buffer, ...]:
    """Scratch of the partial results; rows of padded tiles."""
    return (
        abi.scratch("partial_o", "float32", (_PARTIAL_TILES, 2 * BLOCK_Q, spec.value_head_dim)),
        abi.scratch("partial_lse", "float32", (_PARTIAL_TILES, 2 * BLOCK_Q)),
    )


def splits(tiles: Int32, dims) -> Int32:
    """Parts into which each tile's keys go: what fills the device once, each with two key blocks or more."""
    most = cutlass.max((dims.T + (2 * BLOCK_K - 1)) // (2 * BLOCK_K), Int32(1))
    ctas = cutlass.min(dims.sm_count, Int32(MOST_MULTIPROCESSORS))
    return cutlass.min(cutlass.max(ctas // tiles, Int32(1)), most)


def partial_tensors(plan, schedule, parts: Int32, g) -> tuple[cute.Tensor, cute.Tensor]:
    """O [row, column, head, (split, batch)] and LSE [row, head, (split, batch)] in scratch."""
    rows = schedule.q_blocks * (plan.q_tiles * BLOCK_Q)
    columns = g.partial_o.shape[2]
    shape = (rows, schedule.heads, (parts, schedule.batch))
    head = Int64(rows)
    split = head * schedule.heads
    batch = split * parts
    lse = cute.make_layout(shape, stride=(1, head, (split, batch)))
    strides = [cute.assume(stride * columns, divby=columns) for stride in (head, split, batch)]
    o = cute.make_layout(
        (rows, columns, *shape[1:]), stride=(columns, 1, strides[0], (strides[1], strides[2]))
    )
    return cute.make_tensor(g.partial_o.iterator, o), cute.make_tensor(g.partial_lse.iterator, lse)


def launch(spec, plan, partial, parts: Int32, g, dims, stream) -> None:
    Combine(spec, plan).kernel(*partial, parts, g, dims).launch(
        grid=[cute.ceil_div(dims.S, combine.ROWS), dims.H, dims.B], block=[32 * combine.ROWS, 1, 1], stream=stream
    )


class Combine:
    """A warp for each row of O."""

    def __init__(self, spec, plan):
        self.spec, self.plan = spec, plan

    @cute.kernel
    def kernel(self, o: cute.Tensor, lse: cute.Tensor, parts: Int32, g, dims):
        spec, packed = self.spec, self.plan.packed_heads
        block, head, batch = cute.arch.block_idx()
        row = block * combine.ROWS + cute.arch.thread_idx()[0] // 32
        if row < dims.S:
            position, packed_head = row * packed + head % packed, head // packed
            part_o, part_lse = o[position, None, packed_head, (None, batch)], lse[position, packed_head, (None, batch)]
            combine.combine_row(spec, part_o, part_lse, parts, g, (batch, row, head))
