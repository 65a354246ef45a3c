"""A consumer thread's part of everything in a wide plan: queries are the rows of the scores, keys their columns."""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp

from jax_fa4.kernels.common import backward
from jax_fa4.kernels.sm90.bwd.layouts import transposed


@dataclasses.dataclass(frozen=True)
class Operands:
    """Operands of the products, as descriptors of shared memory, and what stays in registers across steps."""

    scores_q: Any
    scores_k: Any
    dp_do: Any
    dp_v: Any
    dv_operands: tuple[Any, Any]
    dk_operands: tuple[Any, Any]
    dq_k: Any
    dk: cute.Tensor
    dv: cute.Tensor

    @classmethod
    def make(cls, products, shared, plan, warpgroup: Int32) -> Operands:
        scores, dq = products.scores.get_slice(0), products.dq.get_slice(0)
        dv, dk = products.dv.get_slice(128 * warpgroup), products.dk.get_slice(128 * warpgroup)

        def left(product, tensor):
            return product.make_fragment_A(product.partition_A(tensor))

        def right(product, tensor):
            return product.make_fragment_B(product.partition_B(tensor))

        def operands(product, scores, rows):
            """Of dV = P^T dO or dK = dS^T Q, or of its transpose, which has them in the other order."""
            both = transposed(scores), transposed(rows)
            a, b = both[::-1] if plan.dkv_transposed else both
            return left(product, a), right(product, b)

        def accumulator(product, columns):
            shape = (columns, plan.block_k) if plan.dkv_transposed else (plan.block_k, columns)
            return cute.make_rmem_tensor(product.partition_shape_C(shape), Float32)

        return cls(
            scores_q=left(scores, shared.q), scores_k=right(scores, shared.k),
            dp_do=left(scores, shared.do), dp_v=right(scores, shared.v),
            dv_operands=operands(dv, shared.p, shared.do), dk_operands=operands(dk, shared.ds, shared.q),
            dq_k=right(dq, transposed(shared.k)),
            dk=accumulator(dk, plan.tile_d), dv=accumulator(dv, plan.tile_e),
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
        self.thread = thread % 128
        self.warpgroup = cute.arch.make_warp_uniform(thread // 128)
        self.operands = Operands.make(products, shared, self.plan, self.warpgroup)
        self.quad_lane = self.thread % 4
        self.row = self.thread // 32 * 16 + self.thread % 32 // 4
        self.key = self.row
        self.tile_copy = cute.make_tiled_copy_C(
            cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), kernel.dtype), products.scores
        ).get_slice(self.thread)
        self.p_target = self.tile_copy.partition_D(shared.p)
        self.ds_target = self.tile_copy.partition_D(shared.ds)


def statistics(consumer, tensor: cute.Tensor, stage: Int32) -> list[Float32]:
    """LSE or delta of this thread's two rows."""
    return [tensor[consumer.row + step, stage] for step in (0, 8)]


def scores_fragment(consumer, scores: cute.Tensor, place, tile, part: int) -> backward.Fragment:
    """Which scores an accumulator ((2, 2, groups), 1, 1) holds: two queries, a quarter of the keys of a part."""
    plan = consumer.plan
    keys = plan.block_k // plan.score_parts
    first = tile.block * plan.block_k + part * keys
    return backward.Fragment(
        scores, lambda i: (i // 2 % 2, i % 2 + 2 * (i // 4)),
        query=place.block * plan.block_q + consumer.row, key=first + 2 * consumer.quad_lane,
        query_steps=(0, 8), key_steps=[8 * group + pair for group in range(keys // 8) for pair in range(2)],
        batch=tile.batch, head=place.head,
    )  # fmt: skip
