"""The kernel's rings of shared-memory buffers, named barriers, and where a warp stands in a ring."""

from __future__ import annotations

import dataclasses
import enum

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.pipeline import Agent, CooperativeGroup, PipelineAsync, PipelineState, PipelineTmaAsync

from jax_fa4.kernels.common import pipelines

STATISTIC_BYTES = 4
"""Of one row's LSE or delta."""


class Barrier(enum.IntEnum):
    """Named barriers. Those with a number per warpgroup take that many ids."""

    DQ_FULL = 4  # per consumer warpgroup: consumer -> store warp
    DQ_EMPTY = 8  # per consumer warpgroup: store warp -> consumer
    TURN = 12  # per consumer warpgroup: to the next one


def buffer(number: Int32, stages: int) -> PipelineState:
    """Where a consumer stands when it waits for the buffer that is filled as the `number`th."""
    return PipelineState(stages, number, number % stages, (number // stages) & 1)


def free_buffer(number: Int32, stages: int) -> PipelineState:
    """Where the producer stands when it fills a buffer as the `number`th."""
    return PipelineState(stages, number, number % stages, ((number // stages) & 1) ^ 1)


@dataclasses.dataclass(frozen=True)
class Pipes:
    """Rings filled by the producer warp: Q with LSE, dO with delta, and one buffer each for K and V.

    `ds` is the ring of dS: every consumer thread fills its part, and waits for the whole. A part is filled again when
    its thread knows by other means that all have read it, so that ring has no use for its empty barriers.
    """

    q: PipelineTmaAsync
    do: PipelineTmaAsync
    k: PipelineTmaAsync
    v: PipelineTmaAsync
    ds: PipelineAsync

    @classmethod
    def make(cls, plan) -> "Pipes":
        barriers = cutlass.utils.SmemAllocator().allocate_array(Int64, 2 * (plan.q_stages + plan.do_stages + 2 + plan.ds_stages))
        p, offset, rings = plan, 0, []
        for stages, rows, columns, statistic in (
            (p.q_stages, p.block_q, p.tile_d, STATISTIC_BYTES),
            (p.do_stages, p.block_q, p.tile_e, STATISTIC_BYTES),
            (1, p.block_k, p.tile_d, 0),
            (1, p.block_k, p.tile_e, 0),
        ):
            bytes_per_stage = rows * (2 * columns + statistic)
            rings.append(pipelines.tma_load_pipeline(barriers + offset, stages, bytes_per_stage, 4 * p.consumers))
            offset += 2 * stages
        everyone = CooperativeGroup(Agent.Thread, 128 * p.consumers)
        ds = PipelineAsync.create(
            barrier_storage=barriers + offset, num_stages=p.ds_stages, producer_group=everyone, consumer_group=everyone,
            defer_sync=True,
        )
        return cls(*rings, ds)
