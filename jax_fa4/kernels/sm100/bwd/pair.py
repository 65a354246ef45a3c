"""What the two CTAs of a pair send each other: tile numbers, and dS."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_fa4.kernels.common import key_tiles
from jax_fa4.kernels.common.key_tiles import NUMBER_STAGES
from jax_fa4.kernels.common.pipelines import free_buffer
from jax_fa4.kernels.sm100.bwd.barriers import LEADER, phase, report
from jax_fa4.kernels.sm100.bwd.plan import NUMBER_BYTES


def send(source, target, barrier: cute.Pointer, size_bytes: int, rank) -> None:
    """Copies shared memory into that of a CTA of the pair, asynchronously; its barrier there counts the bytes.

    `source` is an address, `target` that of the same place as it would be in this CTA.
    """
    cute.arch.inline_ptx(
        "{ .reg .b32 to, at; mapa.shared::cluster.u32 to, {$r0}, {$r4}; mapa.shared::cluster.u32 at, {$r2}, {$r4}; "
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [to], [{$r1}], {$r3}, [at]; }",
        read_only_args=[Int32(target), Int32(source), barrier.toint(), Int32(size_bytes), Int32(rank)],
    )


@cute.jit
def draw(context, turn: Int32):
    """The next tile number: the leader draws it, and sends it to the other CTA's warps too.

    There the load warp is one of the readers, and announces the bytes.
    """
    pipes, shared = context.pipes, context.shared
    state = free_buffer(turn, NUMBER_STAGES)
    full = pipes.numbers.sync_object_full.get_barrier(state.index)
    number = Int32(0)
    if context.rank == LEADER:
        pipes.numbers.producer_acquire(state)
        if cute.arch.lane_idx() == 0:
            drawn = cute.arch.atomic_add(context.g.tile_counter.iterator, Int32(1), sem="relaxed", scope="gpu")
            number = drawn + cute.arch.grid_dim()[0] // context.plan.ctas
            words = NUMBER_BYTES // 4
            first = (shared.numbers.iterator + state.index * words).align(NUMBER_BYTES)
            slot = cute.make_tensor(first, cute.make_layout(words))
            slot.fill(number)  # all that a bulk copy reads
            cute.arch.fence_view_async_shared()
            place = slot.iterator.toint()
            send(place, place, full, NUMBER_BYTES, 1)
            pipes.numbers.producer_commit(state)
        number = cute.arch.shuffle_sync(number, 0)
    else:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, NUMBER_BYTES)
        number = key_tiles.receive(pipes, shared, turn, copied=True)
    return number


@cute.jit
def await_exchange(context, number: Int32):
    """Waits until the other CTA's dS of a step is here; in the mma warp."""
    context.pipes.exchange.arrive(0, None)
    context.pipes.exchange.wait(0, phase(number))


@cute.jit
def relay(context, number: Int32, count: Int32):
    """The mma warp of the CTA that issues no products: tells the leader when dS of each of a tile's steps is here."""
    for i in cutlass.range(count, unroll=1):
        await_exchange(context, number + i)
        report(context.plan, context.pipes.peer_exchange)
