"""A consumer warpgroup: 64 rows of the transposed scores, and its rows of dK and dV in registers.

One step (a block of queries) of the loop:

    issue S^T = K Q^T and dP^T = V dO^T
    P^T = exp2(S^T - LSE)                      while dP runs
    dS^T = P^T * (dP^T - delta), also into shared memory
    issue dV += P^T dO and dK += dS^T Q
    issue dQ = dS K of the step before         needs dS of all warpgroups
    dQ to shared memory, for the store warp

dQ lags one step behind so that warpgroups need not keep step with each other: while one computes P and dS, the others'
products keep the tensor cores busy. `Turns` of the first step of a tile set them apart.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp, warpgroup

from jax_fa4.kernels.common import backward, softmax
from jax_fa4.kernels.sm90.bwd import epilogue, schedule
from jax_fa4.kernels.sm90.bwd.layouts import as_left_operand, multiply, transposed
from jax_fa4.kernels.sm90.bwd.pipes import Barrier, buffer


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

    @classmethod
    def make(cls, products, shared, plan, thread: Int32) -> "Operands":
        p = plan
        scores, dv, dk, dq = (m.get_slice(thread) for m in (products.scores, products.dv, products.dk, products.dq))

        def left(product, tensor):
            return product.make_fragment_A(product.partition_A(tensor))

        def right(product, tensor):
            return product.make_fragment_B(product.partition_B(tensor))

        def accumulator(product, rows, columns):
            return cute.make_rmem_tensor(product.partition_shape_C((rows, columns)), Float32)

        return cls(
            scores_k=left(scores, shared.k), scores_q=right(scores, shared.q),
            dp_v=left(scores, shared.v), dp_do=right(scores, shared.do),
            dv_do=right(dv, transposed(shared.do)), dk_q=right(dk, transposed(shared.q)),
            dq_ds=left(dq, transposed(shared.ds)), dq_k=right(dq, transposed(shared.k)),
            dk=accumulator(dk, p.block_k, p.tile_d), dv=accumulator(dv, p.block_k, p.tile_e),
        )


class Consumer:
    """One warpgroup's view of the kernel; its methods are the parts of a step."""

    def __init__(self, kernel, products, shared, pipes, g, dims):
        self.kernel, self.plan, self.spec = kernel, kernel.plan, kernel.spec
        self.products, self.shared, self.pipes, self.g, self.dims = products, shared, pipes, g, dims
        thread = cute.arch.thread_idx()[0] - 128
        self.thread = thread
        self.warpgroup = cute.arch.make_warp_uniform(thread // 128)
        # Descriptors depend on the warpgroup alone; with its first thread's slice they stay in uniform registers.
        self.operands = Operands.make(products, shared, kernel.plan, self.warpgroup * 128)
        in_group = thread % 128
        self.quad_lane = in_group % 4
        self.key = self.warpgroup * 64 + in_group // 32 * 16 + in_group % 32 // 4
        self.first_column = lambda accumulator: 0
        self.ds_copy = cute.make_tiled_copy_C(
            cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), kernel.dtype), products.scores
        ).get_slice(thread)
        self.ds_target = self.ds_copy.partition_D(shared.ds)


class Statistics:
    """LSE or delta of this thread's query columns, read from shared memory where they are first used."""

    def __init__(self, consumer, tensor: cute.Tensor, stage: Int32):
        rows = consumer.plan.block_q
        self.pairs = cute.make_tensor(
            tensor.iterator + (stage * rows + 2 * consumer.quad_lane),
            cute.make_layout((2, rows // 8), stride=(1, 8)),
        )
        self.read = {}

    def __getitem__(self, slot: int) -> Float32:
        pair = slot // 2
        if pair not in self.read:
            self.read[pair] = cute.make_rmem_tensor((2,), Float32)
            cute.autovec_copy(self.pairs[None, pair], self.read[pair])
        return self.read[pair][slot % 2]


def scores_fragment(consumer, scores: cute.Tensor, block: Int32, head: Int32, tile) -> backward.Fragment:
    """Which scores this thread's accumulator ((2, 2, block_q / 8), 1, 1) holds: two keys, a quarter of the queries."""
    plan = consumer.plan
    return backward.Fragment(
        scores, lambda i: (i % 2 + 2 * (i // 4), i // 2 % 2),
        query=block * plan.block_q + 2 * consumer.quad_lane, key=tile.block * plan.block_k + consumer.key,
        query_steps=[8 * group + pair for group in range(plan.block_q // 8) for pair in range(2)],
        key_steps=(0, 8), batch=tile.batch, head=head,
    )


def begin(consumer, tiles_done: Int32) -> None:
    """Waits for K and V of a tile."""
    consumer.pipes.k.consumer_wait(buffer(tiles_done, 1))
    consumer.pipes.v.consumer_wait(buffer(tiles_done, 1))


def end(consumer, tiles_done: Int32) -> None:
    """Lets the producer replace K and V."""
    consumer.pipes.k.consumer_release(buffer(tiles_done, 1))
    consumer.pipes.v.consumer_release(buffer(tiles_done, 1))


def clear(consumer) -> None:
    """dK = dV = 0."""
    consumer.operands.dk.fill(0.0)
    consumer.operands.dv.fill(0.0)


@cute.jit
def run(kernel, products, shared, pipes, g, dims, key_schedule):
    """All tiles of this block."""
    plan, group = kernel.plan, kernel.spec.group
    consumer = Consumer(kernel, products, shared, pipes, g, dims)
    number, tiles_done, steps_done = cute.arch.block_idx()[0], Int32(0), Int32(0)
    while number < key_schedule.count:
        tile = key_schedule.tile(number)
        steps = schedule.steps(kernel, g, dims, tile)
        count = steps.count(group)
        clear(consumer)
        if count > 0:
            block, head = steps.start, tile.head * group
            begin(consumer, tiles_done)
            step(consumer, steps, tile, block, head, steps_done, True)
            for i in cutlass.range(1, count, unroll=1):
                block, head = steps.following(block, head)
                step(consumer, steps, tile, block, head, steps_done + i, False)
            last_dq(consumer, steps_done + count - 1)
            end(consumer, tiles_done)
            tiles_done += 1
            steps_done += count
        epilogue.run(consumer, tile)
        number += cute.arch.grid_dim()[0]


@cute.jit
def step(consumer, steps, tile, block, head, number, first: cutlass.Constexpr[bool]):
    """One block of queries, and dQ of the one before unless this is the tile's `first`."""
    plan, kernel, products, o, pipes = (
        consumer.plan, consumer.kernel, consumer.products, consumer.operands, consumer.pipes
    )
    q, do, ds_buffer = buffer(number, plan.q_stages), buffer(number, plan.do_stages), buffer(number, plan.ds_stages)
    before = buffer(number - 1, plan.ds_stages)
    # Fresh registers every step: a product takes its accumulator's old values as input, also where it ignores them.
    scores = cute.make_rmem_tensor(products.scores.partition_shape_C((plan.block_k, plan.block_q)), Float32)
    dp = cute.make_rmem_tensor(scores.shape, Float32)
    fragment = scores_fragment(consumer, scores, block, head, tile)
    if cutlass.const_expr(first):
        take_turn(consumer)
    pipes.q.consumer_wait(q)
    multiply(products.scores, scores, o.scores_k, o.scores_q[None, None, None, q.index], False)
    pipes.do.consumer_wait(do)
    multiply(products.scores, dp, o.dp_v, o.dp_do[None, None, None, do.index], False)

    warpgroup.wait_group(1)
    slopes = backward.apply_score_mods(kernel.spec, fragment, steps.geometry, consumer.g)
    if steps.masked(block):
        backward.apply_mask(kernel.spec, fragment, steps.geometry, consumer.g)
    backward.probabilities(fragment, Statistics(consumer, consumer.shared.lse, q.index), kernel.scale_log2)
    warpgroup.wait_group(0)
    backward.score_gradients(fragment, dp, Statistics(consumer, consumer.shared.delta, do.index), slopes)
    p = cute.make_rmem_tensor(scores.shape, kernel.dtype)
    softmax.convert_pairs(scores, p)
    ds = cute.make_rmem_tensor(scores.shape, kernel.dtype)
    softmax.convert_pairs(dp, ds)

    multiply(products.dv, o.dv, as_left_operand(p), o.dv_do[None, None, None, do.index], True)
    if cutlass.const_expr(first):
        pass_turn(consumer)
    elif cutlass.const_expr(plan.ds_stages == 2):
        pipes.ds.consumer_wait(before)  # the others have read this buffer's last contents
    cute.copy(consumer.ds_copy, consumer.ds_copy.retile(ds), consumer.ds_target[None, None, None, ds_buffer.index])
    cute.arch.fence_view_async_shared()
    if cutlass.const_expr(plan.block_q > 64):
        warpgroup.wait_group(0)  # registers do not suffice to have both products in flight
    multiply(products.dk, o.dk, as_left_operand(ds), o.dk_q[None, None, None, q.index], True)
    if cutlass.const_expr(first):
        warpgroup.wait_group(1)
        pipes.do.consumer_release(do)
        warpgroup.wait_group(0)
        pipes.q.consumer_release(q)
    else:
        if cutlass.const_expr(plan.ds_stages > 2):
            pipes.ds.consumer_wait(before)
        dq = cute.make_rmem_tensor(products.dq.partition_shape_C((plan.block_q, plan.tile_d)), Float32)
        multiply(products.dq, dq, o.dq_ds[None, None, None, before.index], o.dq_k, False)
        warpgroup.wait_group(2)
        pipes.do.consumer_release(do)
        warpgroup.wait_group(1)
        pipes.q.consumer_release(q)
        warpgroup.wait_group(0)
        epilogue.stage_dq(consumer, dq)
    publish_ds(consumer, ds_buffer)


@cute.jit
def last_dq(consumer, number):
    """dQ of a tile's last step."""
    plan, products, o = consumer.plan, consumer.products, consumer.operands
    state = buffer(number, plan.ds_stages)
    consumer.pipes.ds.consumer_wait(state)
    dq = cute.make_rmem_tensor(products.dq.partition_shape_C((plan.block_q, plan.tile_d)), Float32)
    multiply(products.dq, dq, o.dq_ds[None, None, None, state.index], o.dq_k, False)
    warpgroup.wait_group(0)
    epilogue.stage_dq(consumer, dq)


def publish_ds(consumer, state) -> None:
    """Tells the other warpgroups that this one's dS of a step is in shared memory, and that its dQ before is done."""
    consumer.pipes.ds.producer_commit(state)


@cute.jit
def take_turn(consumer):
    """At a tile's first step: waits until the warpgroup before has queued its last products of that step."""
    if consumer.warpgroup > 0:
        cute.arch.barrier(barrier_id=Barrier.TURN + consumer.warpgroup - 1, number_of_threads=256)


@cute.jit
def pass_turn(consumer):
    """Lets the next warpgroup begin the tile."""
    if consumer.warpgroup < consumer.plan.consumers - 1:
        cute.arch.barrier_arrive(barrier_id=Barrier.TURN + consumer.warpgroup, number_of_threads=256)
