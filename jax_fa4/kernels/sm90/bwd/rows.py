"""A consumer thread's part of everything in a wide plan: queries are the rows of the scores, keys their columns."""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from jax_fa4.kernels.common import backward
from jax_fa4.kernels.sm90.bwd import shares
from jax_fa4.kernels.sm90.bwd.fragments import TileStore, thread_in_warpgroup
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


@dataclasses.dataclass(frozen=True)
class Lane:
    """Which thread this is.

    Attributes:
      thread: its number in the warpgroup.
      quad_lane: its place among the four that share its rows.
      row: its first row of an accumulator of 64 rows (queries of the scores, keys of dK and dV); it has row + 8 too.
    """

    thread: Int32
    quad_lane: Int32
    row: Int32

    @classmethod
    def make(cls, thread: Int32) -> Lane:
        return cls(thread, thread % 4, thread // 32 * 16 + thread % 32 // 4)


class Consumer:
    """A thread's view of the kernel.

    Attributes:
      store: stores a fragment of the scores, rounded, as a (query, key) tile.
    """

    def __init__(self, kernel, products, shared, pipes, g, dims):
        self.kernel, self.plan, self.spec = kernel, kernel.plan, kernel.spec
        self.products, self.shared, self.pipes, self.g, self.dims = products, shared, pipes, g, dims
        thread, in_group = cute.arch.thread_idx()[0] - 128, thread_in_warpgroup()
        self.warpgroup = cute.arch.make_warp_uniform(thread // 128)
        self.operands = Operands.make(products, shared)
        self.sums = [shares.Sum.make(kernel, share, self.warpgroup) for share in self.plan.shares]
        self.kept = Lane.make(in_group)
        self.store = TileStore(self.plan, products.dp, in_group, 0, p=shared.p, ds=shared.ds)

    @property
    def lane(self) -> Lane:
        """Which thread this is; where registers are spared that is not kept from one use to the next."""
        return Lane.make(thread_in_warpgroup()) if self.plan.spares_registers else self.kept

    @property
    def thread(self) -> Int32:
        """See `Lane`."""
        return self.lane.thread

    @property
    def quad_lane(self) -> Int32:
        """See `Lane`."""
        return self.lane.quad_lane

    @property
    def row(self) -> Int32:
        """See `Lane`."""
        return self.lane.row

    @property
    def key(self) -> Int32:
        """The row, as a key of the tile (see `epilogue`)."""
        return self.lane.row


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
