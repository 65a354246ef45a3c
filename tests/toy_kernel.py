"""The smallest kernel that uses what attention kernels use: a TMA load, an mbarrier, two launches and scratch.

``scaled[b, s, h, :] = 2 * x[b, s, h, :]`` and ``total[b, s, h] = sum(x[b, s, h, :])``, by way of a scratch array.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from jax_fa4.kernels.common import abi

ROWS = 16


class ScaledCopy:
    """A tile is ROWS rows of one batch and head; one block of 32 threads each."""

    def __init__(self, dtype: str = "bfloat16", head_dim: int = 64, *, factor: float = 2.0):
        self.head_dim = head_dim
        self.factor = factor
        self.buffers = (
            abi.Buffer("x", "in", dtype, ("B", "S", "H", head_dim)),
            abi.Buffer("scaled", "out", dtype, ("B", "S", "H", head_dim)),
            abi.Buffer("total", "out", "float32", ("B", "S", "H")),
            abi.scratch("partial", "float32", ("B", ("round_up", "S", ROWS), "H")),
        )

    @cute.jit
    def __call__(self, g, dims, stream):
        rows_per_head = cute.make_layout(
            (g.x.shape[1], self.head_dim, g.x.shape[2], g.x.shape[0]),
            stride=(g.x.stride[1], 1, g.x.stride[2], g.x.stride[0]),
        )
        x = cute.make_tensor(g.x.iterator, rows_per_head)
        tile = cute.make_layout((ROWS, self.head_dim), stride=(self.head_dim, 1))
        load, x_tma = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), x, tile, (ROWS, self.head_dim))
        grid = [cute.ceil_div(dims.S, ROWS), dims.H, dims.B]
        self.scale(load, x_tma, g.scaled, g.partial).launch(grid=grid, block=[32, 1, 1], stream=stream)
        self.finish(g.partial, g.total).launch(grid=grid, block=[ROWS, 1, 1], stream=stream)

    @cute.kernel
    def scale(self, load: cute.CopyAtom, x: cute.Tensor, scaled: cute.Tensor, partial: cute.Tensor):
        tile_index, head, batch = cute.arch.block_idx()
        lane, _, _ = cute.arch.thread_idx()
        memory = cutlass.memory.SmemAllocator()
        barrier = memory.allocate_array(cutlass.Int64, 1)
        s_x = memory.allocate_tensor(
            scaled.element_type, cute.make_layout((ROWS, self.head_dim), stride=(self.head_dim, 1)), byte_alignment=128
        )
        if lane == 0:
            cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        g_tiles = cute.local_tile(x[None, None, head, batch], (ROWS, self.head_dim), (None, 0))
        t_shared, t_global = cpasync.tma_partition(
            load, 0, cute.make_layout(1), cute.group_modes(s_x, 0, 2), cute.group_modes(g_tiles, 0, 2)
        )
        if lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, cute.size_in_bytes(scaled.element_type, s_x.layout))
        if cute.arch.warp_idx() == 0:
            cute.copy(load, t_global[None, tile_index], t_shared, tma_bar_ptr=barrier)
        cute.arch.mbarrier_wait(barrier, 0)
        for i in cutlass.range_constexpr(ROWS):
            row = tile_index * ROWS + i
            total = cutlass.Float32(0.0)
            for j in cutlass.range_constexpr(self.head_dim // 32):
                column = j * 32 + lane
                value = s_x[i, column].to(cutlass.Float32)
                total += value
                if row < scaled.shape[1]:
                    scaled[batch, row, head, column] = (value * self.factor).to(scaled.element_type)
            total = cute.arch.warp_reduction_sum(total)
            if lane == 0:
                partial[batch, row, head] = total

    @cute.kernel
    def finish(self, partial: cute.Tensor, total: cute.Tensor):
        tile_index, head, batch = cute.arch.block_idx()
        lane, _, _ = cute.arch.thread_idx()
        row = Int32(tile_index * ROWS + lane)
        if row < total.shape[1]:
            total[batch, row, head] = partial[batch, row, head]
