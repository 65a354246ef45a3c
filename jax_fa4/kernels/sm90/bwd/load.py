"""The producer warp: brings K and V of each key tile, and the blocks of Q, LSE, dO and delta, into shared memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.pipeline import PipelineTmaAsync

from jax_fa4.kernels.common import copies, dq_order, dq_zeros, key_tiles
from jax_fa4.kernels.common.pipelines import free_buffer
from jax_fa4.kernels.sm90.bwd import keys


@dataclasses.dataclass(frozen=True)
class RowSource:
    """Rows of queries: a 16-bit matrix loaded by TMA, and one float32 a row, into one ring.

    `matrix` is (S, columns, H, B), `statistic` (rows padded to the block, H, B).
    """

    atom: cute.CopyAtom
    matrix: cute.Tensor
    statistic: cute.Tensor
    shared_matrix: cute.Tensor
    shared_statistic: cute.Tensor
    ring: PipelineTmaAsync
    places: cute.Tensor | None = None


@cute.jit
def _load_rows(source, number: Int32, place, batch: Int32, turn=None):
    """Fills the ring's `number`th buffer with one block of rows."""
    rows, columns = (cute.size(mode) for mode in source.shared_matrix.shape[:2])
    state = free_buffer(number, source.ring.num_stages)
    tile = cute.local_tile(source.matrix[None, None, place.head, batch], (rows, columns), (place.block, 0))
    shared, tile = copies.tma_partition(source.atom, source.shared_matrix, tile)
    source.ring.sync_object_empty.wait(state.index, state.phase)
    if cutlass.const_expr(source.places is not None):
        tell(source, state, place, turn)
    source.ring.sync_object_full.arrive(state.index, source.ring.producer_mask)
    barrier = source.ring.producer_get_barrier(state)
    cute.copy(source.atom, tile, shared[None, state.index], tma_bar_ptr=barrier)
    statistic = cute.local_tile(source.statistic[None, place.head, batch], (rows,), (place.block,))
    bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
    with cute.arch.elect_one():
        cute.copy(bulk, statistic, source.shared_statistic[None, state.index], mbar_ptr=barrier)


def tell(source: RowSource, state, place, turn: Int32 | None) -> None:
    """Leaves word of a buffer's block for the consumers that see it full.

    `turn`: how many tiles add to the block's dQ before this one, if that matters.
    """
    with cute.arch.elect_one():
        source.places[0, state.index] = place.block * 2 + Int32(place.masked)
        source.places[1, state.index] = place.head
        if cutlass.const_expr(turn is not None):
            source.places[2, state.index] = turn


def told(consumer, state) -> key_tiles.Place:
    """Where the block in a buffer of Q is, which is full."""
    word, head = (cute.arch.make_warp_uniform(consumer.shared.places[i, state.index]) for i in range(2))
    return dataclasses.replace(key_tiles.nowhere(), block=word >> 1, head=head, masked=Boolean((word & 1) != 0))


@dataclasses.dataclass(frozen=True)
class Turns:
    """The turns of a tile with the blocks of queries, for consumers that add dQ in a fixed order themselves."""

    kernel: Any
    order: dq_order.Order

    def first(self, place):
        """(search for the next step's, how many tiles come before) of the first step."""
        return self.following(place, self.order.begin(place))

    def following(self, place, search):
        """The same of the next one."""
        if not (self.kernel.plan.wide and self.kernel.spec.deterministic):
            return search, None
        _, others, search = self.order.turn(place, search)
        return search, others


def told_turn(consumer, state) -> Int32:
    """How many tiles add to the dQ of the block in a buffer of Q before this one."""
    return consumer.shared.places[2, state.index]


@dataclasses.dataclass(frozen=True)
class KeySource:
    """K or V of key tiles, loaded by TMA: `matrix` is (T, columns, K, B)."""

    atom: cute.CopyAtom
    matrix: cute.Tensor
    shared: cute.Tensor
    ring: PipelineTmaAsync

    def prefetch(self, tile: key_tiles.KeyTile) -> None:
        """Brings a tile into the L2 cache, from where it will be loaded once its buffer is free."""
        cute.prefetch(self.atom, self._partition(tile)[1])

    def load(self, tile: key_tiles.KeyTile, number: Int32) -> None:
        """A tile, as the `number`th that this block loads."""
        target, source = self._partition(tile)
        state = free_buffer(number, self.ring.num_stages)
        self.ring.producer_acquire(state)
        if self.ring.num_stages > 1:
            target = target[None, state.index]
        cute.copy(self.atom, source, target, tma_bar_ptr=self.ring.producer_get_barrier(state))

    def _partition(self, tile: key_tiles.KeyTile):
        rows, columns = (cute.size(mode) for mode in self.shared.shape[:2])
        source = cute.local_tile(self.matrix[None, None, tile.head, tile.batch], (rows, columns), (tile.block, 0))
        return copies.tma_partition(self.atom, self.shared, source)


@cute.jit
def run(kernel, loads, shared, pipes, g, dims, key_schedule):
    """All tiles of this block. The next tile's loads start while the consumers finish this one."""
    plan = kernel.plan
    rows = {
        "q": RowSource(loads.q_atom, loads.q, loads.lse, shared.q, shared.lse, pipes.q, shared.places),
        "do": RowSource(loads.do_atom, loads.do, loads.delta, shared.do, shared.delta, pipes.do),
    }
    matrices = {
        "k": KeySource(loads.k_atom, loads.k, shared.k, pipes.k),
        "v": KeySource(loads.v_atom, loads.v, shared.v, pipes.v),
    }
    number, turn, tiles_done, steps_done = cute.arch.block_idx()[0], Int32(0), Int32(0), Int32(0)
    while number < key_schedule.count:
        tile = key_schedule.tile(number)
        heads = keys.heads_of(kernel, tile)
        steps = key_tiles.steps(kernel, g, dims, tile)
        count = steps.count(heads)
        if count > 0:
            place = key_tiles.first(steps, tile.head * heads, heads)
            of_keys = dataclasses.replace(tile, head=keys.kv_head(kernel, tile))
            if cutlass.const_expr(not plan.wide):
                for name in ("k", "v"):
                    matrices[name].prefetch(of_keys)
            turns = Turns(kernel, dq_order.Order(kernel, g, steps, tile, key_schedule.blocks))
            search, others = turns.first(place)
            for name in plan.load_order:
                if cutlass.const_expr(name == "zeros"):
                    dq_zeros.wait(g, key_schedule, tile)  # for the consumers, who have no time for it
                elif cutlass.const_expr(name in matrices):
                    matrices[name].load(of_keys, tiles_done)
                else:
                    _load_rows(rows[name], steps_done, place, tile.batch, others)
            for step in cutlass.range(1, count, unroll=1):
                place = key_tiles.following(steps, place)
                search, others = turns.following(place, search)
                for name in plan.load_order:
                    if cutlass.const_expr(name in rows):
                        _load_rows(rows[name], steps_done + step, place, tile.batch, others)
            tiles_done += 1
            steps_done += count
        # Drawn as late as the loads allow, so that a block in a long tile does not hold back a number.
        number = key_tiles.draw(pipes, shared, g.tile_counter, turn)
        turn += 1
