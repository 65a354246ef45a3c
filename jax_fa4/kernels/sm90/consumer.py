"""A consumer warpgroup: scores and output of 64 query rows, softmax in registers.

Per KV block, with the previous block's P in registers: issue S = Q K^T of this block and O += P V of the previous one,
wait for S, do its softmax while P V still runs, then (after a lazy step only if it has to be) rescale O. A tile's first
scores are issued before the epilogue of the tile before.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, pipeline
from cutlass.cute.nvgpu import warpgroup

from jax_fa4.kernels.common import mask, pipelines, scheduler, sequence, softmax
from jax_fa4.kernels.sm90 import epilogue, load
from jax_fa4.kernels.sm90.accumulators import packed_rows, rows_view


@dataclasses.dataclass(frozen=True)
class Operand:
    """Fragments of both products: descriptors of Q, K and V in shared memory, P and O in registers."""

    q: Any
    k: Any
    v: Any
    p: Any
    o: Any


@dataclasses.dataclass(frozen=True)
class Lane:
    """This thread's share of a tile: warpgroup, and first row and column in every accumulator."""

    warpgroup: Int32
    row: Int32
    column: Int32


def multiply(product, accumulator, a, b, accumulate: bool) -> None:
    """Issues accumulator (+)= a b as one group of asynchronous products; does not wait."""
    atom = cute.make_mma_atom(product.op)
    warpgroup.fence()
    for k in range(cute.size(a, mode=[2])):
        atom.set(warpgroup.Field.ACCUMULATE, accumulate or k > 0)
        cute.gemm(atom, accumulator, a[None, None, k], b[None, None, k], accumulator)
    warpgroup.commit_group()


@cute.jit
def run(kernel, products, shared, transfers, g, dims):
    """All tiles of this CTA."""
    plan = kernel.plan
    thread = cute.arch.thread_idx()[0] - 128
    group = cute.arch.make_warp_uniform(thread // 128)
    in_group = thread % 128
    lane = Lane(group, group * 64 + in_group // 32 * 16 + in_group % 32 // 4, in_group % 4 * 2)
    scores_slice, output_slice = products.scores.get_slice(group * 128), products.output.get_slice(group * 128)
    operand = Operand(
        scores_slice.make_fragment_A(scores_slice.partition_A(shared.q)),
        scores_slice.make_fragment_B(scores_slice.partition_B(shared.k)),
        output_slice.make_fragment_B(output_slice.partition_B(shared.v)),
        output_slice.make_fragment_A(output_slice.partition_shape_A((plan.block_q, plan.block_k))),
        cute.make_rmem_tensor(output_slice.partition_shape_C((plan.block_q, plan.value_tile_dim)), Float32),
    )
    scores = cute.make_rmem_tensor(scores_slice.partition_shape_C((plan.block_q, plan.block_k)), Float32)
    statistics = softmax.OnlineSoftmax(2, 4, kernel.scale_log2)
    turns = pipelines.Turns(1 if plan.turns == "none" else plan.warpgroups)
    turns.begin(group)
    store = epilogue.Store.make(kernel, products, transfers, in_group)
    work = Work(kernel, products, shared, operand, scores, lane, statistics, turns, store, g, dims)

    state = [pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, n) for n in (plan.q_stages, plan.stages)]
    q_state, kv_state = state
    queue_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, load.QUEUE_SLOTS)
    todo, queue_state = scheduler.receive(shared.work, queue_state)
    _begin(work, todo, q_state, kv_state, (q_state.index, kv_state.index))
    while todo.tile.q_block >= 0:
        todo, queue_state, q_state, kv_state = _tile(work, todo, queue_state, q_state, kv_state)
    if cutlass.const_expr(kernel.buffers_output):
        epilogue.wait_until_read()


@cute.jit
def _begin(work, todo, q_state, kv_state, used):
    """Issues the scores of a tile's first block, if there is a tile.

    Without one the product runs too, on buffers that were `used` before (of Q and K), and nobody looks at the result:
    products stay outside of control flow, where the assembler would make them wait for each other.
    """
    exists = todo.tile.q_block >= 0
    if exists:
        work.shared.q_pipeline.consumer_wait(q_state)
        work.shared.k_pipeline.consumer_wait(kv_state)
    q_buffer = cutlass.select_(exists, q_state.index, used[0])
    _issue_scores(work, q_buffer, cutlass.select_(exists, kv_state.index, used[1]))


@cute.jit
def _tile(work, todo, queue_state, q_state, kv_state):
    """One tile, whose first scores are under way; returns the next work and the states of its first buffers."""
    spec, plan, tile = work.kernel.spec, work.kernel.plan, todo.tile
    geometry = sequence.geometry(spec, work.g, work.dims, tile.batch)
    packed = tuple(tile.q_block * plan.block_q + work.lane.row + step for step in (0, 8))
    rows = tuple(row // plan.packed_heads for row in packed)
    heads = tuple(tile.head * plan.packed_heads + row % plan.packed_heads for row in packed)
    element_mask = sequence.element_mask(spec, work.g, tile.batch, rows, geometry)
    block = Block(work, tile, todo.slot, q_state, geometry, rows, heads, element_mask)

    steps = todo.masked_steps + todo.full_steps
    ready = _first(block, kv_state, steps == 0)
    for i in cutlass.range(todo.masked_steps, unroll=1):
        kv_state, ready = _step(block, kv_state, ready, True, i == steps - 1)
    for i in cutlass.range(todo.full_steps, unroll=1):
        kv_state, ready = _step(block, kv_state, ready, False, i == todo.full_steps - 1)
    if cutlass.const_expr(plan.q_stages > 1):
        work.shared.q_pipeline.consumer_release(q_state)
    used = (q_state.index, kv_state.index)
    q_state.advance()
    following, queue_state = scheduler.receive(work.shared.work, queue_state)

    last = kv_state.clone()
    kv_state.advance()
    work.shared.v_pipeline.consumer_wait(last)
    _issue_output(work, last)
    if cutlass.const_expr(plan.q_stages > 1):  # the next tile's Q is there: its first scores run under this epilogue
        _begin(work, following, q_state, kv_state, used)
        warpgroup.wait_group(1)
        work.shared.v_pipeline.consumer_release(last)
        epilogue.run(block)
    else:
        warpgroup.wait_group(0)
        work.shared.v_pipeline.consumer_release(last)
        half = epilogue.begin(block)
        _begin(work, following, q_state, kv_state, used)
        epilogue.end(block, half)
    return following, queue_state, q_state, kv_state


@dataclasses.dataclass(frozen=True)
class Work:
    """What all tiles of a consumer share."""

    kernel: Any
    products: Any
    shared: Any
    operand: Operand
    scores: Any
    lane: Lane
    statistics: softmax.OnlineSoftmax
    turns: pipelines.Turns
    store: epilogue.Store
    g: Any
    dims: Any


@dataclasses.dataclass(frozen=True)
class Block:
    """What the steps of one tile share: tile, slot of its partial result (see `scheduler.Piece`), where its Q is,
    geometry of its example, this lane's query rows and their heads, its element mask."""

    work: Work
    tile: Any
    slot: Int32 | None
    q_state: Any
    geometry: Any
    rows: tuple
    heads: tuple
    element_mask: mask.ElementMask


def _issue_scores(work, q_buffer, k_buffer):
    queries, keys = work.operand.q[None, None, None, q_buffer], work.operand.k[None, None, None, k_buffer]
    multiply(work.products.scores, work.scores, queries, keys, False)


def _issue_output(work, state):
    values = work.operand.v[None, None, None, state.index]
    multiply(work.products.output, work.operand.o, work.operand.p, values, True)


def _scores_fragment(block, kv_block, masked: bool):
    """The block's scores after score mods and mask, as a row fragment."""
    work, spec, plan = block.work, block.work.kernel.spec, block.work.kernel.plan
    columns = tuple(8 * n + i for n in range(plan.block_k // 8) for i in range(2))
    fragment = softmax.RowFragment(rows_view(work.scores), work.lane.row, (0, 8), work.lane.column, columns, 4)
    place = mask.Place(block.tile.batch, block.heads, block.rows, kv_block * plan.block_k, spec.positions)
    if spec.score_mods:
        operands = sequence.operands(work.g, "score_operands", sequence.score_functions(spec))
        mask.apply_scores(spec.score_mods, spec.scale, fragment, place, block.geometry, operands)
    if masked:
        block.element_mask.apply(fragment, place, block.geometry)
    return fragment


def _first(block, state, last):
    """The first block, whose scores are under way: no P yet, nothing to rescale."""
    work = block.work
    warpgroup.wait_group(0)
    kv_block = _block_number(work, state.index)
    _release_scores(block, state, last)
    ready = _look_ahead(work, state)
    work.statistics.reset()
    work.operand.o.fill(0.0)
    _turn(work, "tiles", work.turns.wait)
    work.statistics.step(_scores_fragment(block, kv_block, True), True)
    _turn(work, "tiles", work.turns.pass_on)
    softmax.convert_pairs(work.scores, work.operand.p)
    return ready


@cute.jit
def _block_number(work, stage):
    """Which KV block a buffer holds, for the whole warp: the lane reads it that will give the buffer back for all."""
    number = Int32(0)
    if work.shared.k_pipeline.is_signaling_thread:
        number = work.shared.blocks[stage]
    return cute.arch.shuffle_sync(number, 0)


def _release_scores(block, state, last):
    """Gives back K; with the tile's `last` block also Q, if the next tile's has to wait for its buffer."""
    work = block.work
    work.shared.k_pipeline.consumer_release(state)
    if work.kernel.plan.q_stages == 1:  # no branch: it would make products wait for each other
        pipelines.release_if(last, work.shared.q_pipeline, block.q_state)


def _turn(work, of: str, action) -> None:
    """Waits for this warpgroup's turn or passes it on, if the plan has turns of this kind."""
    if work.kernel.plan.turns == of:
        action(work.lane.warpgroup)


def _look_ahead(work, state):
    """Whether the next step's K and V are there: asked before the exponentials, so that the answer costs no time."""
    following = state.clone()
    following.advance()
    return pipelines.is_full(work.shared.k_pipeline, following), pipelines.is_full(work.shared.v_pipeline, state)


def _step(block, state, ready, masked: bool, last):
    """Another block, with the previous block's P in registers.

    `ready` says which of its buffers are known to be full, `last` whether the tile ends with it. Returns the state of
    the block's buffers, and `ready` for the next block.
    """
    work = block.work
    previous = state.clone()
    state.advance()
    work.shared.k_pipeline.consumer_wait(state, ready[0])
    _turn(work, "blocks", work.turns.wait)
    _issue_scores(work, block.q_state.index, state.index)
    work.shared.v_pipeline.consumer_wait(previous, ready[1])
    _issue_output(work, previous)
    _turn(work, "blocks", work.turns.pass_on)
    warpgroup.wait_group(1)
    kv_block = _block_number(work, state.index) if masked or work.kernel.spec.score_mods else Int32(0)
    _release_scores(block, state, last)
    ready = _look_ahead(work, state)
    fragment = _scores_fragment(block, kv_block, masked)
    if work.kernel.plan.is_lazy(masked):
        next_p = cute.make_rmem_tensor_like(work.operand.p)
        packed = packed_rows(next_p, work.kernel.dtype)
        sums, fits = work.statistics.lazy_step(fragment, packed)
        _finish_before_wait(sums)
        warpgroup.wait_group(0)
        work.shared.v_pipeline.consumer_release(previous)
        _settle(work, fragment, packed, masked, sums, fits)
        _move_words(next_p, work.operand.p)
    else:
        work.statistics.step(fragment, masked)
        _finish_before_wait(work.statistics.row_sum)
        warpgroup.wait_group(0)
        work.shared.v_pipeline.consumer_release(previous)
        softmax.convert_pairs(work.scores, work.operand.p)
        _rescale(work)
    return state, ready


def _move_words(source: cute.Tensor, target: cute.Tensor) -> None:
    """Copies registers by instructions of their own, after the wait for the product that reads `target`.

    Otherwise the compiler lets the instructions that make `source` define the product's operands directly; the
    assembler sees operands change while products run, and makes all products wait for each other.
    """
    words, moved = cute.recast_tensor(source, Uint32), cute.recast_tensor(target, Uint32)
    for i in range(cute.size(words)):
        moved[i] = cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[words[i]])


@cute.jit
def _settle(work, fragment, packed, masked: cutlass.Constexpr, sums, fits):
    """Keeps a lazy step's result, or does the step again exactly."""
    if fits:
        _accept(work, sums)
    else:
        _exact(work, fragment, packed, masked)


def _accept(work, sums) -> None:
    work.statistics.accept(sums)


def _exact(work, fragment, packed, masked: bool) -> None:
    work.statistics.step(fragment, masked or bool(sequence.score_functions(work.kernel.spec)))
    packed.store_rows(fragment.scores)
    _rescale(work)


def _rescale(work) -> None:
    output = rows_view(work.operand.o)
    for r in range(2):
        for c in range(cute.size(output, mode=[1])):
            output[r, c] = output[r, c] * work.statistics.rescale[r]


def _finish_before_wait(sums) -> None:
    """Keeps the exponentials before the wait that follows.

    The assembler moves a wait for products up as far as it can, past the exponentials, which would then no longer run
    under them. It moves nothing across control flow, so here is a branch that depends on all of P and is never taken:
    sums of exponentials are not negative.
    """
    cute.arch.inline_ptx(
        "{ .reg .pred p; setp.lt.f32 p, {$r0}, 0f00000000; @p exit; }",
        read_only_args=[sums[0] + sums[1]],
    )
