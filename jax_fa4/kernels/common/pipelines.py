"""Pipelines between warp roles, and the order in which warpgroups take turns."""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, pipeline
from cutlass._mlir.dialects import nvvm

WARPGROUP_THREADS = 128


def tma_load_pipeline(barriers: cute.Pointer, stages: int, stage_bytes: int, consumer_warps: int):
    """A ring of `stages` buffers filled by TMA from one thread, each released once by every consumer warp."""
    return pipeline.PipelineTmaAsync.create(
        barrier_storage=barriers,
        num_stages=stages,
        producer_group=_threads(1),
        consumer_group=_threads(consumer_warps),
        tx_count=stage_bytes,
        defer_sync=True,
    )


def thread_pipeline(barriers: cute.Pointer, stages: int, producers: int, consumers: int):
    """A ring of `stages` buffers filled and released by ordinary threads: that many arrive each time."""
    return pipeline.PipelineAsync.create(
        barrier_storage=barriers,
        num_stages=stages,
        producer_group=_threads(producers),
        consumer_group=_threads(consumers),
        defer_sync=True,
    )


def is_full(ring: pipeline.PipelineAsync, state: pipeline.PipelineState) -> cutlass.Boolean:
    """Whether the buffer of a consumer's state is full; does not wait."""
    barrier = ring.sync_object_full.get_barrier(state.index)
    return cute.arch.mbarrier_test_wait(barrier, state.phase)


def buffer(number: Int32, stages: int) -> pipeline.PipelineState:
    """Where a consumer stands when it waits for the buffer that is filled as the `number`th."""
    index, lap = _position(number, stages)
    return pipeline.PipelineState(stages, number, index, lap & 1)


def free_buffer(number: Int32, stages: int) -> pipeline.PipelineState:
    """Where the producer stands when it fills a buffer as the `number`th."""
    index, lap = _position(number, stages)
    return pipeline.PipelineState(stages, number, index, (lap & 1) ^ 1)


def _position(number: Int32, stages: int) -> tuple[Int32, Int32]:
    """The buffer that is filled as the `number`th, and how often it was filled before.

    Without a division where one can be spared: quotient and remainder would live in registers from step to step.
    """
    if stages & (stages - 1) == 0:
        return number & (stages - 1), number >> (stages.bit_length() - 1)
    return number % stages, number // stages


@cute.jit
def release(ring, state):
    """Tells the producer that this warp has no more use for a buffer; what its other lanes have read is read.

    By a predicate: a branch between products moves instructions across them.
    """
    cute.arch.sync_warp()
    _arrive_if(Boolean(nvvm.elect_sync()), ring, state)


def release_if(condition, ring, state) -> None:
    """Like a consumer warp's release of a buffer, if `condition` (the same in the whole warp) holds; has no branch."""
    _arrive_if(condition & (cute.arch.lane_idx() == 0), ring, state)


def _arrive_if(condition, ring, state) -> None:
    cute.arch.inline_ptx(
        "mbarrier.arrive.shared::cta.b64 _, [{$r0}];",
        read_only_args=[Int32(ring.sync_object_empty.get_barrier(state.index).toint())],
        predicate=condition,
    )


def _threads(count: int) -> pipeline.CooperativeGroup:
    return pipeline.CooperativeGroup(pipeline.Agent.Thread, count)


@dataclasses.dataclass(frozen=True)
class Turns:
    """Ping-pong: warpgroups issue their products one after the other, so that one's softmax meets another's products.

    Warpgroup i waits at named barrier `first_barrier + i`, where warpgroup i - 1 arrives when it has issued its own.
    """

    warpgroups: int
    first_barrier: int = 1

    def begin(self, warpgroup) -> None:
        """Once, before the first `wait`: opens warpgroup 0's barrier."""
        if cutlass.const_expr(self.warpgroups > 1):
            self._open(warpgroup)

    @cute.jit
    def _open(self, warpgroup: cutlass.Int32):
        if warpgroup == self.warpgroups - 1:
            cute.arch.barrier_arrive(barrier_id=self.first_barrier, number_of_threads=2 * WARPGROUP_THREADS)

    def wait(self, warpgroup) -> None:
        if cutlass.const_expr(self.warpgroups > 1):
            cute.arch.barrier(barrier_id=self.first_barrier + warpgroup, number_of_threads=2 * WARPGROUP_THREADS)

    def pass_on(self, warpgroup) -> None:
        if cutlass.const_expr(self.warpgroups > 1):
            following = cutlass.select_(warpgroup == self.warpgroups - 1, cutlass.Int32(0), warpgroup + 1)
            cute.arch.barrier_arrive(
                barrier_id=self.first_barrier + following, number_of_threads=2 * WARPGROUP_THREADS
            )
