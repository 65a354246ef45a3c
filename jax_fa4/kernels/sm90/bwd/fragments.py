"""A consumer thread's part of everything: operands of the products, its scores, and their rows' statistics."""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp

from jax_fa4.kernels.common import backward
from jax_fa4.kernels.common.pipelines import buffer, release
from jax_fa4.kernels.sm90.bwd.layouts import transposed


@dataclasses.dataclass(frozen=True)
class Operands:
    """Operands of the products, as descriptors of shared memory, and what stays in registers across steps."""

    scores_k: Any
    scores_q: Any
    dp_v: Any
    dp_do: Any
    dv_do: Any
    dk_q: Any
    dq_ds: Any
    dq_k: Any
    dk: cute.Tensor
    dv: cute.Tensor
    v: cute.Tensor | None

    @classmethod
    def make(cls, products, shared, plan, thread: Int32) -> Operands:
        p = plan
        scores, dv, dk, dq = (m.get_slice(thread) for m in (products.scores, products.dv, products.dk, products.dq))

        def left(product, tensor):
            return product.make_fragment_A(product.partition_A(tensor))

        def right(product, tensor):
            return product.make_fragment_B(product.partition_B(tensor))

        def accumulator(product, rows, columns):
            return cute.make_rmem_tensor(product.partition_shape_C((rows, columns)), Float32)

        held = (p.block_k, 16 * p.v_slices)
        return cls(
            scores_k=left(scores, shared.k), scores_q=right(scores, shared.q),
            dp_v=left(scores, shared.v), dp_do=right(scores, shared.do),
            dv_do=right(dv, transposed(shared.do)), dk_q=right(dk, transposed(shared.q)),
            dq_ds=(right if p.dq_transposed else left)(dq, transposed(shared.ds)),
            dq_k=(left if p.dq_transposed else right)(dq, transposed(shared.k)),
            dk=accumulator(dk, p.block_k, p.tile_d), dv=accumulator(dv, p.block_k, p.tile_e),
            v=cute.make_rmem_tensor(products.dp.partition_shape_A(held), shared.v.element_type) if p.v_slices else None,
        )


def thread_in_warpgroup() -> Int32:
    """This thread's number in its warpgroup, worked out where it is asked for.

    What follows from it is not kept in registers from one use to the next: the main loop has none to spare. The
    compiler does not see that it is not negative: shifts and masks take fewer instructions than divisions.
    """
    return opaque(cute.arch.thread_idx()[0] & 127)


def opaque(value: Int32) -> Int32:
    """The same value, of which the compiler does not know: what follows from it is not kept for later uses."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


class TileStore:
    """Stores fragments of the scores, rounded, in rings of tiles, which have names.

    Where a thread stores is kept in registers, or in a plan that spares these worked out for each store.
    """

    def __init__(self, plan, product: cute.TiledMma, thread: Int32, before: Int32 | int, **tiles: cute.Tensor):
        """`thread` of the product has so many `before` the first of its warpgroup."""
        dtype = next(iter(tiles.values())).element_type
        self.copy = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype), product)
        self.before, self.tiles, self.kept = before, tiles, None
        if not plan.spares_registers:
            own = self.copy.get_slice(thread)
            self.kept = own, {name: own.partition_D(ring) for name, ring in tiles.items()}

    def __call__(self, rounded: cute.Tensor, name: str, stage: Int32, part: int | None = None) -> None:
        """Stores a fragment in a ring's buffer, the whole tile or a `part` of its columns."""
        if self.kept is not None:
            own, target = self.kept[0], self.kept[1][name]
        else:
            own = self.copy.get_slice((thread_in_warpgroup() & 127) + self.before)
            target = own.partition_D(self.tiles[name])
        source = own.retile(rounded)
        cute.copy(self.copy, source if part is None else source[None, None, 0], target[None, None, part, stage])


class Consumer:
    """A thread's view of the kernel.

    Attributes:
      query_groups: groups of 8 queries; the thread holds two of each.
      store: stores a fragment of the scores, rounded, as a (key, query) tile.
    """

    def __init__(self, kernel, products, shared, pipes, g, dims):
        plan = kernel.plan
        self.kernel, self.plan, self.spec = kernel, plan, kernel.spec
        self.products, self.shared, self.pipes, self.g, self.dims = products, shared, pipes, g, dims
        self.thread = thread = cute.arch.thread_idx()[0] - 128
        self.warpgroup = cute.arch.make_warp_uniform(thread // 128)
        # Descriptors depend on the warpgroup alone; with its first thread's slice they stay in uniform registers.
        self.operands = Operands.make(products, shared, plan, self.warpgroup * 128)
        self.query_groups = plan.block_q // 8
        self.store = TileStore(plan, products.scores, thread, self.warpgroup * 128, ds=shared.ds)

    @property
    def key(self) -> Int32:
        """The first key of the thread's scores within the tile; it has key + 8 too."""
        thread = thread_in_warpgroup()
        return (thread >> 5) * 16 + ((thread & 31) >> 2) + self.warpgroup * 64

    @property
    def quad_lane(self) -> Int32:
        """The thread's place among the four that share its keys."""
        return thread_in_warpgroup() & 3


class Statistics:
    """LSE or delta of this thread's query columns, from shared memory.

    The first (see `BackwardPlan.early_groups`) are read at once, ahead of their use, the others where they are used.
    """

    def __init__(self, consumer, tensor: cute.Tensor, stage: Int32):
        groups = consumer.query_groups
        self.pairs = cute.make_tensor(
            tensor.iterator + (stage * consumer.plan.block_q + 2 * consumer.quad_lane),
            cute.make_layout((2, groups), stride=(1, 8)),
        )
        self.read = {}
        for pair in range(0 if consumer.spec.score_mods else consumer.plan.early_groups):
            self._read(pair)

    def _read(self, pair: int) -> None:
        self.read[pair] = cute.make_rmem_tensor((2,), Float32)
        cute.autovec_copy(self.pairs[None, pair], self.read[pair])

    def __getitem__(self, slot: int) -> Float32:
        if slot // 2 not in self.read:
            self._read(slot // 2)
        return self.read[slot // 2][slot % 2]


def scores_fragment(consumer, scores: cute.Tensor, place=None, tile=None) -> backward.Fragment:
    """Which scores an accumulator ((2, 2, groups), 1, 1) holds: two keys, a quarter of the queries.

    Without a `place` it is good for what does not depend on where the scores are.
    """
    plan, where = consumer.plan, {"query": None, "key": None, "batch": None, "head": None}
    if place is not None:
        query, key = place.block * plan.block_q + 2 * consumer.quad_lane, tile.block * plan.block_k + consumer.key
        where = {"query": query, "key": key, "batch": tile.batch, "head": place.head}
    return backward.Fragment(
        scores, lambda i: (i % 2 + 2 * (i // 4), i // 2 % 2),
        query_steps=[8 * group + pair for group in range(consumer.query_groups) for pair in range(2)],
        key_steps=(0, 8), quads="queries", **where,
    )  # fmt: skip


def begin(consumer, tiles_done: Int32) -> None:
    """Waits for K and V of a tile, and reads what is held of V."""
    consumer.pipes.k.consumer_wait(buffer(tiles_done, consumer.plan.k_stages))
    consumer.pipes.v.consumer_wait(buffer(tiles_done, 1))
    if consumer.plan.v_slices:
        _hold_v(consumer)


def _hold_v(consumer) -> None:
    """The first slices of V, as left operand, into registers."""
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), consumer.kernel.dtype)
    thread = thread_in_warpgroup() + consumer.warpgroup * 128
    copy = cute.make_tiled_copy_A(atom, consumer.products.dp).get_slice(thread)
    source, target = copy.partition_S(consumer.shared.v), copy.retile(consumer.operands.v)
    for i in range(consumer.plan.v_slices):
        cute.copy(copy, source[None, None, i], target[None, None, i])


def end(consumer, tiles_done: Int32) -> None:
    """Lets the producer replace K and V."""
    release_k(consumer, tiles_done)
    release_v(consumer, tiles_done)


def release_k(consumer, tile: Int32) -> None:
    """Lets the producer replace K of the `tile`th tile."""
    release(consumer.pipes.k, buffer(tile, consumer.plan.k_stages))


def release_v(consumer, tile: Int32) -> None:
    """Lets the producer replace V of the `tile`th tile."""
    release(consumer.pipes.v, buffer(tile, 1))


def clear(consumer) -> None:
    """dK = dV = 0."""
    consumer.operands.dk.fill(0.0)
    consumer.operands.dv.fill(0.0)
