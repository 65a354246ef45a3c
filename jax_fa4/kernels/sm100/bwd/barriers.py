"""Barriers of the backward kernel: rings of shared memory, and single ones between the roles."""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass._mlir.dialects.nvvm import MemScopeKind
from cutlass.memory import SmemAllocator
from cutlass.pipeline import MbarrierArray, PipelineAsync, PipelineOp, PipelineState, PipelineTmaAsync, PipelineTmaUmma

from jax_fa4.kernels.common import pipelines
from jax_fa4.kernels.common.key_tiles import NUMBER_STAGES
from jax_fa4.kernels.common.planning import STATISTIC_BYTES
from jax_fa4.kernels.sm100.bwd.plan import BLOCK, COMPUTED, BackwardPlan, DqOver
from jax_fa4.kernels.sm100.bwd.products import cta_group
from jax_fa4.kernels.sm100.context import threads

# Named barriers: of the warps that use tensor memory, of the reducing warpgroup, and of the pairs of computing warps
# that share lanes (one for each of the four).
TMEM_BARRIER = 1
REDUCE_BARRIER = 2
LANES_BARRIER = 3

BOTH_CTAS = 0b11
LEADER = 0
"""The CTA of a pair that issues the products; all roles report to its barriers."""


@dataclasses.dataclass(frozen=True)
class Feed:
    """What the load role brings for every step, in `parts` buffers each; there are buffers for so many `tiles`.

    Where two tiles share buffers they take turns, `turn` 0 and 1 of 2 `uses`, in the order in which the products read
    them: that may `swap` the second of a step with the first of the next.
    """

    ring: PipelineTmaUmma
    tiles: int
    parts: int = 1
    uses: int = 1
    turn: int = 0
    swap: bool = False

    def full(self, number: Int32, part: int = 0, at_end=False) -> PipelineState:
        """Where a consumer of step `number` stands; `at_end`: at a tile's begin or end, with nothing to swap with."""
        return self._buffer(part, pipelines.buffer(self._use(number, at_end), self.tiles))

    def empty(self, number: Int32, part: int = 0, at_end=False) -> PipelineState:
        return self._buffer(part, pipelines.free_buffer(self._use(number, at_end), self.tiles))

    def _use(self, number: Int32, at_end) -> Int32:
        use = number * self.uses + self.turn
        if self.swap:
            use += Int32(cutlass.select_(Boolean(at_end), Int32(0), Int32(1 if self.turn else -1)))
        return use

    def _buffer(self, part: int, tile: PipelineState) -> PipelineState:
        return PipelineState(self.tiles * self.parts, tile.count, tile.index * self.parts + part, tile.phase)


@dataclasses.dataclass(frozen=True)
class Pipes:
    """Barriers. In a pair the leader's count for both CTAs, and products complete on those of both.

    Attributes:
      q, q_columns, do, do_columns: tiles of every step.
      k, k_columns, v: tiles of keys, one buffer each.
      statistics: ring of LSE and delta, emptied by each computing warp.
      numbers: hands tile numbers from load to all others.
      scores_full, dp_full: S, dP of a step are computed.
      scores_read: S of a step is in registers, where dQ lies over it; otherwise None.
      p_full, ds_full: P, dS of a step are stored. Neither needs an empty side: the next S and dP are issued after the
        products that read P and dS.
      exchange: dS of a step has arrived from the other CTA; `peer_exchange`: there too.
      dq_full, dq_empty: dQ of a step is computed, and read by the reduce role.
      dkv_full: dK and dV of a tile are computed.
    """

    q: Feed
    q_columns: Feed
    do: Feed
    do_columns: Feed
    k: Feed
    k_columns: Feed
    v: Feed
    statistics: PipelineTmaAsync
    numbers: PipelineAsync
    scores_full: MbarrierArray
    scores_read: MbarrierArray | None
    dp_full: MbarrierArray
    p_full: MbarrierArray
    ds_full: MbarrierArray
    exchange: MbarrierArray
    peer_exchange: MbarrierArray
    dq_full: MbarrierArray
    dq_empty: MbarrierArray
    dkv_full: MbarrierArray

    @classmethod
    def make(cls, plan: BackwardPlan) -> Pipes:
        """Initialises all barriers (warp 0); a synchronisation of the block, or of the pair, must follow."""
        free = SmemAllocator().allocate_array(Int64, 64)

        def take(words):
            nonlocal free
            here, free = free, free + words
            return here

        cluster = cute.make_layout((plan.ctas, 1, 1, 1))
        feeds: dict[str, Feed] = {}
        for name, tile in plan.tiles.items():
            if name in COMPUTED:
                continue
            if name in plan.aliases:
                feeds[name] = dataclasses.replace(feeds[plan.aliases[name]], turn=1)
                continue
            ring = PipelineTmaUmma.create(
                barrier_storage=take(2 * tile.stages), num_stages=tile.stages, producer_group=threads(1),
                consumer_group=threads(1), tx_count=plan.ctas * tile.stage_bytes, cta_layout_vmnk=cluster,
                defer_sync=True,
            )  # fmt: skip
            shared = name in plan.aliases.values()
            # Q's columns are for dS of the step before, whose products come after S; dO's for dV, which follows dP.
            parts, uses = plan.parts(name), 2 if shared else 1
            feeds[name] = Feed(ring, tile.stages // parts, parts, uses, swap=shared and name == "q")
        for name in ("q", "k", "do"):
            feeds.setdefault(f"{name}_columns", feeds[name])

        def single(kind, arrivals, tx_count=0):
            return MbarrierArray(take(1), 1, (kind, threads(arrivals)), tx_count)

        product, warps = PipelineOp.TCGen05Mma, PipelineOp.AsyncThread
        stages, ctas = plan.statistic_stages, plan.ctas
        numbers = PipelineAsync.create(
            barrier_storage=take(2 * NUMBER_STAGES), num_stages=NUMBER_STAGES, producer_group=threads(1),
            consumer_group=threads(ctas * (plan.warps.numbers_readers + 1) - 1), consumer_mask=_leader(plan),
            defer_sync=True,
        )  # fmt: skip
        return cls(
            **feeds, numbers=numbers,
            statistics=pipelines.tma_load_pipeline(take(2 * stages), stages, 2 * BLOCK * STATISTIC_BYTES, 8),
            scores_full=single(product, 1), dp_full=single(product, 1),
            scores_read=single(warps, 8 * ctas) if plan.tmem.dq_over is DqOver.SCORES else None,
            p_full=single(warps, 8 * ctas), ds_full=single(warps, 8 * ctas),
            exchange=single(PipelineOp.TmaLoad, 1, plan.exchange_bytes), peer_exchange=single(warps, 1),
            dq_full=single(product, 1), dq_empty=single(warps, 4 * ctas),
            dkv_full=single(product, 1),
        )  # fmt: skip


def _leader(plan: BackwardPlan):
    return Int32(LEADER) if plan.paired else None


def report(plan: BackwardPlan, barrier: MbarrierArray) -> None:
    """A warp's arrival, after all its lanes got here; at the leader's barrier in a pair."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        if plan.paired:
            cute.arch.mbarrier_arrive(barrier.get_barrier(0), LEADER, scope=MemScopeKind.CLUSTER)
        else:
            barrier.arrive(0, None)


def complete(plan: BackwardPlan, barrier: MbarrierArray) -> None:
    """An arrival when all products issued so far are complete, in both CTAs of a pair."""
    barrier.arrive(0, BOTH_CTAS if plan.paired else None, cta_group(plan))


def phase(number: Int32) -> Int32:
    """Parity of a barrier's `number`th completion."""
    return number & 1


def phase_before(number: Int32) -> Int32:
    """Parity of the completion before; waiting for it at number 0 does not wait."""
    return phase(number) ^ 1
