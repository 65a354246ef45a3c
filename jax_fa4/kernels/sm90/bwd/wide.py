"""A consumer warpgroup for wide heads: every other block of queries is its own; half of dK and dV.

The registers of a block hold dK and dV of only 64 keys when heads are wide, or 96, so the two warpgroups share them.
They take turns with the blocks of queries. The owner of a block makes its scores, P, dS and dQ alone, with queries as
rows, so that dS is dQ's left operand without leaving the registers. Both then add its P^T dO and dS^T Q to their shares
of dV and dK, for which P and dS pass through shared memory. While one computes P and dS of its block, the other's
products keep the tensor cores busy. A step of the loop, for a warpgroup's own block j:

    issue S = Q K^T of j, the shares of dV += P^T dO and dK += dS^T Q of the other's block j - 1, and dP = dO V^T of j
    P(j) = exp2(S - LSE), into shared memory        while the others run
    give the other's block back, as its products are done when dP is
    dS(j), into shared memory
    dQ = dS K of j in slices, each added to global memory while what comes after it runs: the first, dK, dV, the others
    (where Q has three buffers, the last slice is added while the next own block's S runs)

With 64 keys one warpgroup makes dV, the other dK, if these are equally wide. 96 keys are not whole tiles of 64 rows:
dK^T and dV^T are made instead, whose rows are head dims and whose columns are keys. Each warpgroup makes as many whole
tiles of 64 rows, and half the keys of one that is left over (see `shares`): products over all keys read dO and Q less
often. There dP is made in two halves, one after the other, as registers do not hold all of S and dP.

The ring of dO has two stages: a warpgroup's own blocks are always in the same one. A buffer of P and dS is free again
when the dO of the block after next is there, since its producer waits for all products that read them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from jax_fa4.kernels.common import backward, copies, dq_order, key_tiles, softmax
from jax_fa4.kernels.common.pipelines import buffer, release
from jax_fa4.kernels.sm90.bwd import epilogue, keys, load
from jax_fa4.kernels.sm90.bwd.fragments import begin, end, opaque
from jax_fa4.kernels.sm90.bwd.layouts import as_left_operand, multiply
from jax_fa4.kernels.sm90.bwd.pipes import Barrier, commit
from jax_fa4.kernels.sm90.bwd.rows import Consumer, scores_fragment, statistics

STAGES = 2
"""Buffers of dO, P and dS."""


@dataclasses.dataclass(frozen=True)
class Work:
    """What a step needs to know of the tile, and registers for a slice of dQ that it leaves to the next step to add."""

    consumer: Any
    steps: Any
    tile: Any
    held: cute.Tensor | None


@dataclasses.dataclass(frozen=True)
class Block:
    """Where a block of queries is in the rings: its buffer of Q with LSE, and of dO with delta, P and dS."""

    q: Any
    do: Any

    @classmethod
    def make(cls, consumer, number: Int32) -> Block:
        return cls(buffer(number, consumer.plan.q_stages), buffer(number, STAGES))

    def again(self, consumer, number: Int32) -> Block:
        """The same, worked out once more where registers are spared."""
        return Block.make(consumer, opaque(number)) if consumer.plan.spares_registers else self


@cute.jit
def run(kernel, products, shared, pipes, g, dims, key_schedule):
    """All tiles of this block."""
    consumer = Consumer(kernel, products, shared, pipes, g, dims)
    number, turn, tiles_done, steps_done = cute.arch.block_idx()[0], Int32(0), Int32(0), Int32(0)
    held = dq_fragment(consumer) if kernel.plan.holds_dq and not kernel.spec.deterministic else None
    while number < key_schedule.count:
        tile = key_schedule.tile(number)
        heads = keys.heads_of(kernel, tile)
        steps = key_tiles.steps(kernel, g, dims, tile)
        count = steps.count(heads)
        for part in consumer.sums:
            part.accumulator.fill(0.0)
        if count > 0:
            work = Work(consumer, steps, tile, held)
            place = _first(consumer, steps, tile.head * heads, heads)
            done, left = Int32(0), (Int32(-1), place.head)
            begin(consumer, tiles_done)
            if (steps_done + consumer.warpgroup) % 2 == 0:  # the first block is this warpgroup's own
                left = step(work, place, steps_done, left, True)
                place = _following(consumer, steps, place)
                done += 1
            pairs = (count - done) // 2
            for pair in cutlass.range(pairs, unroll=1):
                place = _following(consumer, steps, place)
                left = step(work, place, steps_done + done + 2 * pair + 1, left, False)
                place = _following(consumer, steps, place)
            if done + 2 * pairs < count:
                other = Block.make(consumer, steps_done + count - 1)
                for part in consumer.sums:
                    add_block(consumer, part, other)
                finish_other(consumer, other)
            add_held(work, left)
            end(consumer, tiles_done)
            tiles_done += 1
            steps_done += count
        epilogue.run(consumer, tile)
        number = key_tiles.receive(pipes, shared, turn)
        turn += 1


def _first(consumer, steps, head, heads):
    """A tile's first step, where consumers are not told."""
    return key_tiles.nowhere() if consumer.plan.spares_registers else key_tiles.first(steps, head, heads)


def _following(consumer, steps, place):
    """The step after this one, likewise."""
    return place if consumer.plan.spares_registers else key_tiles.following(steps, place)


@cute.jit
def step(work, place, number, left, first: cutlass.Constexpr[bool]):
    """A block of this warpgroup's own, and the other's before it unless this is the tile's `first`.

    `left` says of which (block, head) this warpgroup still holds a slice of dQ; a block under 0 means none.
    """
    consumer = work.consumer
    kernel, o, pipes, plan = consumer.kernel, consumer.operands, consumer.pipes, consumer.plan
    own, other = Block.make(consumer, number), Block.make(consumer, number - 1)
    ds = cute.make_rmem_tensor(((2, 2, plan.block_k // 8), 1, 1), kernel.dtype)
    scores = cute.make_rmem_tensor(ds.shape, Float32)
    if cutlass.const_expr(plan.spares_registers):
        pipes.q.consumer_wait(own.q)
        place = load.told(consumer, own.q)
    fragment = scores_fragment(consumer, scores, place, work.tile)
    sums = () if first else consumer.sums
    if cutlass.const_expr(not plan.spares_registers):
        pipes.q.consumer_wait(own.q)
    multiply(consumer.products.scores, scores, o.scores_q[None, None, None, own.q.index], o.scores_k, False)
    if cutlass.const_expr(work.held is not None and not first):
        warpgroup.wait_group(1)
        add_held(work, left)
    for part in sums:
        add_block(consumer, part, other)
    pipes.do.consumer_wait(own.do)
    dp = like = dp_fragment(consumer)
    if cutlass.const_expr(not plan.dp_after_p):
        dp = issue_dp(consumer, own, 0)
    lse = statistics(consumer, consumer.shared.lse, own.q.index)
    delta = statistics(consumer, consumer.shared.delta, own.do.index)
    warpgroup.wait_group(len(sums) + (not plan.dp_after_p))
    make_p(work, place, fragment, lse, like, own.do.index)
    publish(pipes.p, own.do)
    if cutlass.const_expr(plan.dp_after_p):
        dp = issue_dp(consumer, own, 0)
    for part in cutlass.range_constexpr(plan.dp_parts):
        if cutlass.const_expr(first or part + 1 < plan.dp_parts):
            warpgroup.wait_group(0)
        else:
            finish_other(consumer, other)
        backward.score_gradients(part_of(fragment, part, dp), dp, delta)
        rounded = registers_of(ds, part, dp)
        softmax.convert_pairs(dp, rounded)
        store_part(consumer, rounded, "ds", own.do.index, part)
        if cutlass.const_expr(part + 1 < plan.dp_parts):
            own = own.again(consumer, number)
            dp = issue_dp(consumer, own, part + 1)
    publish(pipes.ds, own.do)
    own = own.again(consumer, number)
    if cutlass.const_expr(plan.spares_registers):
        place = load.told(consumer, own.q)
    take_turn(work, place, own)
    finish_step(work, place, own, as_left_operand(ds))
    return place.block, place.head


@cute.jit
def make_p(work, place, fragment, lse, like, stage):
    """P, rounded, into this block's (query, key) tile, a part `like` dP at a time; P, or P * dy/dx, in the fragment."""
    consumer, geometry = work.consumer, work.steps.geometry
    spec, g, parts = consumer.spec, consumer.g, consumer.plan.dp_parts
    if cutlass.const_expr(not spec.score_mods):
        if place.masked:
            backward.apply_mask(spec, fragment, geometry, g)
        backward.probabilities(fragment, lse, consumer.kernel.scale_log2)
    for part in cutlass.range_constexpr(parts):
        rounded, values = cute.make_rmem_tensor(like.shape, consumer.kernel.dtype), part_of(fragment, part, like)
        if cutlass.const_expr(not spec.score_mods):
            softmax.convert_pairs(values.values, rounded)
            store_part(consumer, rounded, "p", stage, part)
        elif place.masked:
            backward.weighted_probabilities(spec, values, True, geometry, g, lse, rounded)
            store_part(consumer, rounded, "p", stage, part)  # here, so that registers are free again
        else:
            backward.weighted_probabilities(spec, values, False, geometry, g, lse, rounded)
            store_part(consumer, rounded, "p", stage, part)


def part_of(fragment: backward.Fragment, part: int, like: cute.Tensor) -> backward.Fragment:
    """A part of the keys of the scores."""
    before = part * cute.size(like)
    values = registers_of(fragment.values, part, like)
    return dataclasses.replace(fragment, values=values, slots=lambda i: fragment.slots(before + i))


def registers_of(values: cute.Tensor, part: int, like: cute.Tensor) -> cute.Tensor:
    """A part of the keys of an accumulator of the scores."""
    return cute.make_tensor(values.iterator + part * cute.size(like), cute.make_layout(like.shape))


def finish_step(work, place, own, ds: cute.Tensor) -> None:
    """dQ of a warpgroup's own block, whose dS is in its registers too, and its shares of dV and dK.

    A slice of dQ is added to memory while what was issued after it runs. The assembler serialises all products unless
    the first slice goes before dV and dK, and a wait, be it for nothing, stands between an issue and such an addition.
    """
    consumer, slices = work.consumer, work.consumer.plan.dq_slices
    dq, behind = issue_dq(consumer, ds, 0), len(consumer.sums)
    for part in consumer.sums[::-1]:
        add_block(consumer, part, own)
    for i in range(slices):
        warpgroup.wait_group(behind)
        last = i + 1 == slices
        following = None if last else issue_dq(consumer, ds, i + 1, work.held if i + 2 == slices else None)
        running = behind + (not last)
        warpgroup.wait_group(running)
        if dq is not work.held:
            add_dq(work, place.block, place.head, dq, i)
        if i == 0:
            warpgroup.wait_group(running - behind)
            release(consumer.pipes.do, own.do)
            release(consumer.pipes.q, own.q)
        dq, behind = following, 0
    pass_turn(work, place)


def finish_other(consumer, other) -> None:
    """Gives back the other's block, when this warpgroup's products with it are done.

    In this order the other's next dO also tells it that its buffer of dS is free.
    """
    warpgroup.wait_group(0)
    release(consumer.pipes.do, other.do)
    release(consumer.pipes.q, other.q)


def dp_fragment(consumer) -> cute.Tensor:
    """Registers for a part of dP."""
    plan, product = consumer.plan, consumer.products.dp
    return cute.make_rmem_tensor(product.partition_shape_C((plan.block_q, plan.block_k // plan.dp_parts)), Float32)


def issue_dp(consumer, block, part: int) -> cute.Tensor:
    """A part of dP = dO V^T."""
    operands, dp = consumer.operands, dp_fragment(consumer)
    rows = operands.dp_do[None, None, None, block.do.index]
    multiply(consumer.products.dp, dp, rows, column_tile(operands.dp_v, part), False)
    return dp


def add_block(consumer, part, block) -> None:
    """Adds a block to one of the sums, when its P or dS is there."""
    wait(consumer, part.share.outputs, block)
    part.issue(consumer, block)


@cute.jit
def wait(consumer, outputs: cutlass.Constexpr, block):
    """Waits for P of a block if this warpgroup makes dV, for dS if dK."""
    rings = {"dv": consumer.pipes.p, "dk": consumer.pipes.ds}
    if cutlass.const_expr(outputs[0] == outputs[1]):
        rings[outputs[0]].consumer_wait(block.do)
    elif consumer.warpgroup == 0:
        rings[outputs[0]].consumer_wait(block.do)
    else:
        rings[outputs[1]].consumer_wait(block.do)


def column_tile(operand, tile: int):
    """One of the column tiles of a right operand (values, column tiles, k)."""
    chosen = operand[None, tile, None]
    layout = cute.append(chosen.layout, cute.make_layout(1))
    return cute.make_tensor(chosen.iterator, cute.select(layout, mode=[0, 2, 1]))


def dq_fragment(consumer) -> cute.Tensor:
    """Registers for a slice of dQ."""
    plan, product = consumer.plan, consumer.products.dq
    return cute.make_rmem_tensor(product.partition_shape_C((plan.block_q, plan.tile_d // plan.dq_slices)), Float32)


def issue_dq(consumer, ds: cute.Tensor, part: int, dq: cute.Tensor | None = None) -> cute.Tensor:
    """One slice of dQ = dS K, by dS in registers."""
    dq = dq_fragment(consumer) if dq is None else dq
    multiply(consumer.products.dq, dq, ds, column_tile(consumer.operands.dq_k, part), False)
    return dq


def add_dq(work, block: Int32, head: Int32, dq: cute.Tensor, part: int) -> None:
    """Adds a slice of dQ to the accumulator, four registers of each thread at a time."""
    consumer, size = work.consumer, cute.size(dq)
    tile = copies.address(consumer.g.dq_accumulator, work.tile.batch, head, block, 0)
    address = tile.toint() + (part * size * 128 + 4 * consumer.thread) * 4
    for i in range(0, size, 4):
        copies.add_float32(address + i * 128 * 4, [dq[i + j] for j in range(4)])
    cute.arch.sync_warp()  # or the assembler puts off the additions, and registers do not suffice for all slices


@cute.jit
def add_held(work, left):
    """Adds the slice of dQ that this warpgroup's step before left, if there was one in this tile."""
    if cutlass.const_expr(work.held is not None):
        block, head = left
        if block >= 0:
            add_dq(work, block, head, work.held, work.consumer.plan.dq_slices - 1)


def store_part(consumer, rounded: cute.Tensor, name: str, stage: Int32, part: int) -> None:
    """Stores a part of P or dS in this block's (query, key) tile."""
    consumer.store(rounded, name, stage, part)


def publish(ring, state) -> None:
    """Tells both warpgroups that this one's P or dS is in shared memory."""
    cute.arch.fence_view_async_shared()
    commit(ring, state)


@cute.jit
def take_turn(work, place, own):
    """In a deterministic kernel, waits until the tiles that add to this block's dQ before this one have done so."""
    consumer = work.consumer
    if cutlass.const_expr(consumer.spec.deterministic):
        counter = copies.address(consumer.g.dq_counter, work.tile.batch, place.head, place.block)
        dq_order.wait(counter, load.told_turn(consumer, own.q))


@cute.jit
def pass_turn(work, place):
    """In a deterministic kernel, lets the next tile add to this block's dQ."""
    consumer = work.consumer
    if cutlass.const_expr(consumer.spec.deterministic):
        cute.arch.barrier(barrier_id=Barrier.DQ_ADDED + consumer.warpgroup, number_of_threads=128)
        if consumer.thread < 32:
            dq_order.release(copies.address(consumer.g.dq_counter, work.tile.batch, place.head, place.block))
