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
from jax_fa4.kernels.common.planning import STATISTIC_BYTES


class Barrier(enum.IntEnum):
    """Named barriers. Those with a number per warpgroup take that many ids."""

    DQ_ADDED = 1  # per consumer warpgroup of a deterministic wide plan: its warps have added a block's dQ
    DQ_FULL = 4  # per consumer warpgroup: consumer -> store warp
    DQ_EMPTY = 8  # per consumer warpgroup: store warp -> consumer
    TURN = 12  # per consumer warpgroup: to it from the one after it


WARPGROUP_AND_WARP = 128 + 32
"""Threads that meet at a barrier between a consumer warpgroup and the store warp."""


@dataclasses.dataclass(frozen=True)
class Pipes:
    """Rings filled by the producer warp: Q with LSE, dO with delta, K, and one buffer for V.

    `ds` is the ring of dS: every consumer warp fills its part, and waits for the whole. A part is filled again when its
    warp knows by other means that all have read it, so that ring has no use for its empty barriers. In a wide plan the
    warps of one warpgroup fill a buffer, and `p` is a ring like it.
    `numbers` hands tile numbers from the producer warp to all others.
    """

    q: PipelineTmaAsync
    do: PipelineTmaAsync
    k: PipelineTmaAsync
    v: PipelineTmaAsync
    ds: PipelineAsync
    p: PipelineAsync | None
    numbers: PipelineAsync

    @classmethod
    def make(cls, plan) -> Pipes:
        p = plan
        warps = 4 * p.consumers
        readers = warps + (0 if p.wide else 1) + p.zeroes_ahead + p.rounds_behind  # with spare warps
        fillers = 4 if p.wide else warps
        barriers = cutlass.utils.SmemAllocator().allocate_array(
            Int64, 2 * (p.q_stages + p.do_stages + p.k_stages + 1 + 2 * p.ds_stages + NUMBER_STAGES)
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
            k=ring(p.k_stages, p.block_k, p.dq_columns), v=ring(1, p.block_k, p.tile_e),
            ds=ring(p.ds_stages, writers=fillers), p=ring(p.ds_stages, writers=fillers) if p.wide else None,
            numbers=ring(NUMBER_STAGES, writers=1, readers=readers),
        )


@cute.jit
def commit(ring, state):
    """Tells all consumers that this warp's part of a buffer of dS or P is in shared memory."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        ring.producer_commit(state)
