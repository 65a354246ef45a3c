"""The kernel's rings of shared-memory buffers, named barriers, and where a warp stands in a ring."""

from __future__ import annotations

import dataclasses
import enum

import cutlass
import cutlass.cute as cute
from cutlass import Int64
from cutlass.pipeline import Agent, CooperativeGroup, PipelineAsync, PipelineTmaAsync

from jax_fa4.kernels.common import pipelines
from jax_fa4.kernels.common.key_tiles import NUMBER_STAGES
from jax_fa4.kernels.common.prepare import STATISTIC_BYTES


class Barrier(enum.IntEnum):
    """Named barriers. Those with a number per warpgroup take that many ids."""

    CONSUMERS = 1  # all consumers of a wide plan: P and dS are in shared memory
    DQ_FULL = 4  # per consumer warpgroup: consumer -> store warp
    DQ_EMPTY = 8  # per consumer warpgroup: store warp -> consumer
    TURN = 12  # per consumer warpgroup: to the next one


@dataclasses.dataclass(frozen=True)
class Pipes:
    """Rings filled by the producer warp: Q with LSE, dO with delta, and one buffer each for K and V.

    `ds` is the ring of dS: every consumer warp fills its part, and waits for the whole. A part is filled again when its
    warp knows by other means that all have read it, so that ring has no use for its empty barriers.
    `numbers` hands tile numbers from the producer warp to all others.
    """

    q: PipelineTmaAsync
    do: PipelineTmaAsync
    k: PipelineTmaAsync
    v: PipelineTmaAsync
    ds: PipelineAsync
    numbers: PipelineAsync

    @classmethod
    def make(cls, plan) -> Pipes:
        p = plan
        warps = 4 * p.consumers
        readers = warps + 1  # the store warp
        barriers = cutlass.utils.SmemAllocator().allocate_array(
            Int64, 2 * (p.q_stages + p.do_stages + 2 + p.ds_stages + NUMBER_STAGES)
        )

        def ring(stages, rows=None, columns=0, statistic=0, writers=0, readers=warps):
            nonlocal barriers
            here, barriers = barriers, barriers + 2 * stages
            if rows:
                return pipelines.tma_load_pipeline(here, stages, rows * (2 * columns + statistic), readers)
            return PipelineAsync.create(
                barrier_storage=here, num_stages=stages, producer_group=CooperativeGroup(Agent.Thread, writers),
                consumer_group=CooperativeGroup(Agent.Thread, readers), defer_sync=True,
            )

        return cls(
            q=ring(p.q_stages, p.block_q, p.tile_d, STATISTIC_BYTES),
            do=ring(p.do_stages, p.block_q, p.tile_e, STATISTIC_BYTES),
            k=ring(1, p.block_k, p.dq_columns), v=ring(1, p.block_k, p.tile_e),
            ds=ring(p.ds_stages, writers=warps), numbers=ring(NUMBER_STAGES, writers=1, readers=readers),
        )


@cute.jit
def commit_ds(pipes, state):
    """Tells all consumers that this warp's part of a buffer of dS is in shared memory."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        pipes.ds.producer_commit(state)
