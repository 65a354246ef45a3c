"""A consumer thread's part of everything in a wide plan: queries are the rows of the scores, keys their columns."""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp

from jax_fa4.kernels.common import backward
from jax_fa4.kernels.sm90.bwd import shares
from jax_fa4.kernels.sm90.bwd.fragments import thread_in_warpgroup
from jax_fa4.kernels.sm90.bwd.layouts import transposed


@dataclasses.dataclass(frozen=True)
class Operands:
    """Operands of the products, as descriptors of shared memory."""

    scores_q: Any
    scores_k: Any
    dp_do: Any
    dp_v: Any
    dq_k: Any

    @classmethod
    def make(cls, products, shared) -> Operands:
        scores, dp, dq = (p.get_slice(0) for p in (products.scores, products.dp, products.dq))

        def left(product, tensor):
            return product.make_fragment_A(product.partition_A(tensor))

        def right(product, tensor):
            return product.make_fragment_B(product.partition_B(tensor))

        return cls(
            scores_q=left(scores, shared.q), scores_k=right(scores, shared.k),
            dp_do=left(dp, shared.do), dp_v=right(dp, shared.v),
            dq_k=right(dq, transposed(shared.k)),
        )  # fmt: skip


class Consumer:
    """A thread's view of the kernel.

    Attributes:
      row: the thread's first row of an accumulator of 64 rows (queries of the scores, keys of dK and dV); it has
        row + 8 too.
      key: the same, as a key of the tile (see `epilogue`).
      tile_copy: stores a fragment of the scores, rounded, as a (query, key) tile.
    """

    def __init__(self, kernel, products, shared, pipes, g, dims):
        self.kernel, self.plan, self.spec = kernel, kernel.plan, kernel.spec
        self.products, self.shared, self.pipes, self.g, self.dims = products, shared, pipes, g, dims
        thread = cute.arch.thread_idx()[0] - 128
        self.thread = thread_in_warpgroup()
        self.warpgroup = cute.arch.make_warp_uniform(thread // 128)
        self.operands = Operands.make(products, shared)
        self.sums = [shares.Sum.make(kernel, share, self.warpgroup) for share in self.plan.shares]
        self.quad_lane = self.thread % 4
        self.row = self.thread // 32 * 16 + self.thread % 32 // 4
        self.key = self.row
        self.tile_copy = cute.make_tiled_copy_C(
            cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), kernel.dtype), products.dp
        ).get_slice(self.thread)
        self.p_target = self.tile_copy.partition_D(shared.p)
        self.ds_target = self.tile_copy.partition_D(shared.ds)


def statistics(consumer, tensor: cute.Tensor, stage: Int32) -> list[Float32]:
    """LSE or delta of this thread's two rows."""
    return [tensor[consumer.row + step, stage] for step in (0, 8)]


def scores_fragment(consumer, scores: cute.Tensor, place, tile) -> backward.Fragment:
    """Which scores an accumulator ((2, 2, groups), 1, 1) holds: two queries, a quarter of the keys."""
    plan = consumer.plan
    return backward.Fragment(
        scores, lambda i: (i // 2 % 2, i % 2 + 2 * (i // 4)),
        query=place.block * plan.block_q + consumer.row, key=tile.block * plan.block_k + 2 * consumer.quad_lane,
        query_steps=(0, 8), key_steps=[8 * group + pair for group in range(plan.block_k // 8) for pair in range(2)],
        batch=tile.batch, head=place.head, quads="keys",
    )  # fmt: skip
