"""What the roles of the backward kernel share: products, memory, barriers, and the rings' states."""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import tcgen05
from cutlass.cute.nvgpu.tcgen05 import OperandMajorMode, OperandSource
from cutlass.pipeline import MbarrierArray, PipelineAsync, PipelineOp, PipelineTmaUmma

from jax_fa4.kernels.common.copies import rows_layout
from jax_fa4.kernels.common.key_tiles import NUMBER_STAGES
from jax_fa4.kernels.common.prepare import STATISTIC_BYTES
from jax_fa4.kernels.sm100.bwd.plan import BLOCK, DQ_CHUNK, DQ_STAGES, BackwardPlan
from jax_fa4.kernels.sm100.context import threads

# Named barriers: of the warps that use tensor memory, of the reducing warpgroup, and of the computing ones.
TMEM_BARRIER = 1
REDUCE_BARRIER = 2
COMPUTE_BARRIER = 3

HALF = BLOCK // 2
"""Queries of one computing warpgroup."""


@dataclasses.dataclass(frozen=True)
class Products:
    """The tiled products of a step. Keys are the rows of the scores: S^T = K Q^T and dP^T = V dO^T (both `scores`).

    dV = P^T dO and dK = dS^T Q have P and dS in tensor memory; dQ = dS K has dS in shared memory, transposed.
    """

    scores: cute.TiledMma
    dv: cute.TiledMma
    dk: cute.TiledMma
    dq: cute.TiledMma

    @classmethod
    def make(cls, dtype, plan: BackwardPlan) -> Products:
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN

        def product(a_major, b_major, columns, source=OperandSource.SMEM):
            return blackwell.make_trivial_tiled_mma(
                dtype, dtype, a_major, b_major, Float32, tcgen05.CtaGroup.ONE, (BLOCK, columns), source
            )

        return cls(
            scores=product(k_major, k_major, BLOCK),
            dv=product(k_major, mn_major, plan.tile_e, OperandSource.TMEM),
            dk=product(k_major, mn_major, plan.tile_d, OperandSource.TMEM),
            dq=product(mn_major, mn_major, plan.tile_d),
        )


@dataclasses.dataclass(frozen=True)
class Shared:
    """Tiles in shared memory: (rows, columns[, stage]) in swizzled panels of 64 columns; `ds` is (key, query).

    `dq` is (4, row, vector of columns, stage): chunks of dQ on their way out. Statistics are (query, stage).
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    do: cute.Tensor
    ds: cute.Tensor
    dq: cute.Tensor
    lse: cute.Tensor
    delta: cute.Tensor
    numbers: cute.Tensor
    tmem_address: cute.Tensor

    @classmethod
    def allocate(cls, dtype, plan: BackwardPlan) -> Shared:
        memory = cutlass.utils.SmemAllocator()

        def tile(columns, stages=None):
            layout = rows_layout(dtype, BLOCK, columns, stages)
            return memory.allocate_tensor(dtype, layout.outer, 1024, layout.inner)

        def plain(dtype, *shape, align=128):
            return memory.allocate_tensor(dtype, cute.make_layout(shape), align)

        small = dict(  # before the tiles: it fills what aligning these leaves
            lse=plain(Float32, BLOCK, plan.q_stages), delta=plain(Float32, BLOCK, plan.q_stages),
            numbers=plain(Int32, NUMBER_STAGES, align=16), tmem_address=plain(Int32, 1, align=16),
        )  # fmt: skip
        return cls(
            q=tile(plan.tile_d, plan.q_stages), k=tile(plan.tile_d), v=tile(plan.tile_e),
            do=tile(plan.tile_e, plan.do_stages), ds=tile(BLOCK),
            dq=plain(Float32, 4, BLOCK, DQ_CHUNK // 4, DQ_STAGES, align=1024), **small,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Pipes:
    """Barriers.

    Attributes:
      q: ring of Q with LSE and delta; emptied by mma and by each computing warp, which reads the statistics.
      do: ring of dO.
      k, v: one buffer each, for a tile.
      numbers: hands tile numbers from load to all others.
      scores_full, dp_full: S, dP of a step are computed.
      p_full, ds_full: P, dS of a step are stored, dS also in shared memory. Neither needs an empty side: the next S
        and dP are issued after the products that read P and dS.
      dq_full, dq_empty: dQ of a step is computed, and read by the reduce role.
      dkv_full, dkv_empty: dK and dV of a tile are computed, and read by the compute role.
    """

    q: PipelineTmaUmma
    do: PipelineTmaUmma
    k: PipelineTmaUmma
    v: PipelineTmaUmma
    numbers: PipelineAsync
    scores_full: MbarrierArray
    dp_full: MbarrierArray
    p_full: MbarrierArray
    ds_full: MbarrierArray
    dq_full: MbarrierArray
    dq_empty: MbarrierArray
    dkv_full: MbarrierArray
    dkv_empty: MbarrierArray

    @classmethod
    def make(cls, plan: BackwardPlan) -> Pipes:
        """Initialises all barriers (warp 0); a block-wide synchronisation must follow."""
        singles = 8
        count = 2 * (plan.q_stages + plan.do_stages + 2 + NUMBER_STAGES) + singles
        free = cutlass.utils.SmemAllocator().allocate_array(Int64, count)

        def take(words):
            nonlocal free
            here, free = free, free + words
            return here

        def ring(stages, columns, statistic=0, readers=1):
            return PipelineTmaUmma.create(
                barrier_storage=take(2 * stages), num_stages=stages, producer_group=threads(1),
                consumer_group=threads(readers), tx_count=BLOCK * (2 * columns + statistic), defer_sync=True,
            )

        def single(kind, arrivals):
            return MbarrierArray(take(1), 1, (kind, threads(arrivals)))

        product, warps = PipelineOp.TCGen05Mma, PipelineOp.AsyncThread
        return cls(
            q=ring(plan.q_stages, plan.tile_d, 2 * STATISTIC_BYTES, readers=9), do=ring(plan.do_stages, plan.tile_e),
            k=ring(1, plan.tile_d), v=ring(1, plan.tile_e),
            numbers=PipelineAsync.create(
                barrier_storage=take(2 * NUMBER_STAGES), num_stages=NUMBER_STAGES, producer_group=threads(1),
                consumer_group=threads(plan.warps.numbers_readers), defer_sync=True,
            ),
            scores_full=single(product, 1), dp_full=single(product, 1),
            p_full=single(warps, 8), ds_full=single(warps, 8),
            dq_full=single(product, 1), dq_empty=single(warps, 4),
            dkv_full=single(product, 1), dkv_empty=single(warps, 8),
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Context:
    """Everything a role gets; `tmem` is the address of the block's tensor memory."""

    kernel: Any
    products: Products
    shared: Shared
    pipes: Pipes
    g: Any
    dims: Any
    schedule: Any
    tmem: Any = None

    @property
    def plan(self) -> BackwardPlan:
        return self.kernel.plan

    @property
    def spec(self):
        return self.kernel.spec

    @property
    def dtype(self):
        return self.kernel.dtype


def phase(number: Int32) -> Int32:
    """Parity of a barrier's `number`th completion."""
    return number & 1


def phase_before(number: Int32) -> Int32:
    """Parity of the completion before; waiting for it at number 0 does not wait."""
    return phase(number) ^ 1


def arrive_ring(ring, index: Int32) -> None:
    """A warp's arrival that it has read a ring's buffer."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(ring.sync_object_empty.get_barrier(index))


def columns_of(context: Context, column, width: int) -> cute.Tensor:
    """Tensor memory (128 lanes, width) of float32 words from a column on."""
    accumulator = context.products.scores.get_slice(0).make_fragment_C(
        context.products.scores.partition_shape_C((BLOCK, BLOCK))
    )
    whole = cute.make_tensor(context.tmem + column, accumulator.layout)[(None, None), 0, 0]
    return cute.make_tensor(whole.iterator, cute.composition(whole.layout, cute.make_layout((BLOCK, width))))


def tmem_copy(context: Context, operation, column, width: int, thread):
    """(copy, this thread's place): moves `width` columns of a lane between tensor memory and registers."""
    tensor = columns_of(context, column, width)
    atom = cute.make_copy_atom(operation(tcgen05.copy.Repetition(width)), Float32)
    copy = tcgen05.make_tmem_copy(atom, tensor).get_slice(thread)
    load = operation is tcgen05.copy.Ld32x32bOp
    return copy, copy.partition_S(tensor) if load else copy.partition_D(tensor)


def load_columns(context: Context, column, width: int, thread) -> cute.Tensor:
    """A lane's `width` float32 words; `cute.arch.fence_view_async_tmem_load` must follow before they are used."""
    copy, source = tmem_copy(context, tcgen05.copy.Ld32x32bOp, column, width, thread)
    shape = copy.partition_D(cute.make_identity_tensor((BLOCK, width))).shape
    values = cute.make_rmem_tensor(shape, Float32)
    cute.copy(copy, source, values)
    return values


def store_columns(context: Context, values: cute.Tensor, column, thread) -> None:
    """Stores a lane's 16-bit values, two to a word."""
    width = cute.size(values) // 2
    copy, target = tmem_copy(context, tcgen05.copy.St32x32bOp, column, width, thread)
    shape = copy.partition_S(cute.make_identity_tensor((BLOCK, width))).shape
    words = cute.make_tensor(cute.recast_ptr(values.iterator, dtype=Float32), cute.make_layout(shape))
    cute.copy(copy, words, target)
