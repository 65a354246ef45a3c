"""What the roles of the forward kernel share: shared-memory layout, barriers and the tensors they work on."""

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Boolean, Float32, Int32, Uint32
from cutlass.cute.nvgpu import tcgen05
from cutlass.cutlass_dsl import dsl_user_op
from cutlass.pipeline import Agent, CooperativeGroup, MbarrierArray, PipelineOp

from jax_fa4.kernels.sm100.plans import BLOCK_K, BLOCK_Q, GROUP_SLOTS, GROUP_WORDS, SLOTS, ForwardPlan
from jax_fa4.kernels.sm100.tiles import WorkList

# Named barrier 0 is the whole block's; from SCALE_BARRIER on, one for each slot and warp pair.
TMEM_BARRIER = 1
SCALE_BARRIER = 2


def threads(count: int) -> CooperativeGroup:
    return CooperativeGroup(Agent.Thread, count)


@dataclasses.dataclass(frozen=True)
class Barriers:
    """The kernel's mbarriers. Those of tile or slot have one per tile or slot; arrivals are per warp.

    Attributes:
      q, kv: the TMA pipelines from load to mma. With `o_over_q`, q's empty side also waits for the epilogue.
      score_full: S of a slot is computed (mma to softmax). S needs no empty barrier: the next S of a slot is issued
        after the product that read the slot's P, which itself waited for softmax.
      p_full: the first three quarters of P are stored (softmax) and O is rescaled, or free at a tile's first block
        (correction), in all CTAs that share the product; mma may start the second product.
      p_tail: the last quarter of P is stored.
      o_full: O is accumulated: of the whole tile with two query tiles, of every block with one.
      inverse_full, inverse_empty: the factors that normalise a tile's rows, softmax to correction.
      o_store_full, o_store_empty: a tile's O in shared memory, correction to epilogue.
      work: answers to the scheduler's requests for work, to all roles; None with a static schedule.
      groups_full, groups_empty: slots of `groups`, scheduler to all roles but the epilogue; None where there are none.
    """

    q: pipeline.PipelineTmaUmma
    kv: pipeline.PipelineTmaUmma
    score_full: MbarrierArray
    p_full: MbarrierArray
    p_tail: MbarrierArray
    o_full: MbarrierArray
    inverse_full: MbarrierArray
    inverse_empty: MbarrierArray
    o_store_full: MbarrierArray
    o_store_empty: MbarrierArray
    groups_full: Any
    groups_empty: Any
    work: Any


@dataclasses.dataclass(frozen=True)
class Shared:
    """Tensors in shared memory. Statistics are float32, a row per thread."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: Any
    scale: cute.Tensor  # [slot, row] factor by which a block changes O
    inverse: cute.Tensor  # [tile, row] factor that normalises O at the end
    response: Any  # 16 bytes: the hardware's answer to a request for work
    groups: cute.Tensor  # (word, slot) of key blocks by ids


@dataclasses.dataclass(frozen=True)
class Global:
    """TMA atoms and the tensors they address; O and LSE, or their parts under split-KV."""

    load_q: cute.CopyAtom
    q: cute.Tensor
    load_k: cute.CopyAtom
    k: cute.Tensor
    load_v: cute.CopyAtom
    v: cute.Tensor
    store_o: Any
    o: cute.Tensor
    lse: cute.Tensor


@dataclasses.dataclass(frozen=True)
class Layouts:
    """Swizzled shared-memory layouts of Q, K, V and O (last mode: tile or stage), and P's as an operand."""

    q: cute.ComposedLayout
    k: cute.ComposedLayout
    v: cute.ComposedLayout
    p: cute.ComposedLayout
    o: cute.ComposedLayout


@dataclasses.dataclass(frozen=True)
class Context:
    """Everything a role gets.

    Attributes:
      qk, pv: the two products, S = Q K^T and O += P V.
      p_layout: arrangement of P as an operand of the second product.
      o_layout: swizzled layout of O in shared memory.
      tx_bytes: bytes that a load of a K or V tile brings, to all CTAs that share it.
      rank: this CTA's place among those that share their products; 0 leads: its mma role issues them.
      groups: the queue of key blocks by ids, or None.
      tmem: the address of the block's tensor memory, for the roles that use it.
    """

    spec: Any
    plan: ForwardPlan
    barriers: Barriers
    shared: Shared
    memory: Global
    work: WorkList
    qk: cute.TiledMma
    pv: cute.TiledMma
    p_layout: Any
    o_layout: Any
    tx_bytes: dict[str, int]
    rank: Any
    groups: Any = None
    tmem: Any = None

    def visits(self, work, read) -> tuple:
        """The key blocks of a work, and the cursor before the first one; `read`: groups of them read before."""
        return self.work.visits(work) if self.groups is None else self.groups.begin(read)

    @property
    def dtype(self):
        return self.shared.q.element_type

    @property
    def q_tile(self) -> tuple[int, int]:
        return self.plan.q_rows, self.plan.head_dim

    @property
    def k_tile(self) -> tuple[int, int]:
        return BLOCK_K, self.plan.head_dim // self.plan.kv_chunks

    @property
    def v_tile(self) -> tuple[int, int]:
        return self.plan.value_head_dim, BLOCK_K // self.plan.kv_chunks


def block_of(context: Context, work, tile):
    """Index of this CTA's block of 128 rows of a query tile, in the sequence."""
    return (work.first_tile + tile) * context.plan.cta_group + context.rank


def query_of(context: Context, work, tile, row):
    """(query head, row of the sequence) of a row of a tile; under GQA packing neighbouring rows differ in head."""
    packed = context.plan.packed_heads
    position = block_of(context, work, tile) * BLOCK_Q + row
    if packed == 1:
        return work.head, position
    return work.head * packed + position % packed, position // packed


def result_of(context: Context, work, tile, row):
    """((row, head, batch) of a tile's row in the results `memory.o` and `memory.lse`, whether it exists)."""
    if context.plan.split_kv:  # partial results: rows as packed, a batch for each split
        return (block_of(context, work, tile) * BLOCK_Q + row, work.head, (work.split, work.batch)), Boolean(True)
    head, q_row = query_of(context, work, tile, row)
    return (q_row, head, work.batch), q_row < context.memory.lse.shape[0]


# Tensor memory: the slots of S, then the tiles' O. P takes the upper half of its slot's columns, two 16-bit elements to
# a column; S has been read by then.


def _accumulator(context: Context, product: cute.TiledMma, shape, column):
    fragment = product.get_slice(0).make_fragment_C(product.partition_shape_C(shape))
    return cute.make_tensor(context.tmem + column, fragment.layout)


def scores(context: Context, slot):
    """S of a slot in tensor memory."""
    return _accumulator(context, context.qk, (context.plan.q_rows, BLOCK_K), slot * BLOCK_K)


def products(context: Context, tile):
    """O of a query tile in tensor memory."""
    plan = context.plan
    return _accumulator(context, context.pv, (plan.q_rows, plan.value_head_dim), plan.output_column(tile))


def probabilities(context: Context, slot):
    """P of a slot in tensor memory, as first operand of the second product."""
    column = slot * BLOCK_K + BLOCK_K // 2
    layout = cute.make_tensor(scores(context, 0).iterator, context.p_layout.outer)
    fragment = context.pv.get_slice(0).make_fragment_A(layout)[None, None, None, 0]
    return cute.make_tensor(fragment.iterator + column * (32 // context.dtype.width), fragment.layout)


def storage_type(plan: ForwardPlan, dtype, layouts):
    """The struct of the block's shared memory."""
    tiles, stages = plan.q_tiles, plan.kv_stages
    barrier = cute.struct.MemRange[cutlass.Int64, SLOTS]
    statistics = cute.struct.MemRange[cutlass.Float32, SLOTS * BLOCK_Q]

    def tile_memory(elements):
        return cute.struct.Align[cute.struct.MemRange[dtype, elements], 1024]

    class Storage:
        pass

    Storage.__annotations__ = {
        "q": cute.struct.MemRange[cutlass.Int64, 2 * tiles],
        "kv": cute.struct.MemRange[cutlass.Int64, 2 * stages],
        **dict.fromkeys(BARRIER_NAMES, barrier),
        "tmem_address": cutlass.Int32,
        "tmem_freed": cutlass.Int64,
        "work": cute.struct.MemRange[cutlass.Int64, 2],
        "response": cute.struct.Align[cute.struct.MemRange[cutlass.Int32, 4], 16],
        "groups": cute.struct.Align[cute.struct.MemRange[cutlass.Int32, GROUP_WORDS * GROUP_SLOTS], 16],
        "scale": statistics,
        "inverse": statistics,
        "s_q": tile_memory(max(cute.cosize(layouts.q), cute.cosize(layouts.o) if plan.o_over_q else 0)),
        "s_kv": tile_memory(max(cute.cosize(layouts.k), cute.cosize(layouts.v))),
        "s_o": tile_memory(0 if plan.o_over_q or plan.float32_out else cute.cosize(layouts.o)),
    }
    storage = cute.struct(Storage)
    if storage.size_in_bytes() > plan.smem_bytes:
        raise ValueError(f"shared memory: the kernel takes {storage.size_in_bytes()} bytes, planned {plan.smem_bytes}")
    return storage


BARRIER_NAMES = tuple(f.name for f in dataclasses.fields(Barriers) if f.name not in ("q", "kv", "work"))


def make_barriers(plan: ForwardPlan, storage, tx_bytes: dict[str, int]) -> Barriers:
    """Initialises all barriers (warp 0); a block-wide synchronisation must follow."""

    group = plan.cta_group
    ctas = cute.make_layout((group, 1, 1, 1))

    def tma(name, stages, arrivals, stage_bytes):
        return pipeline.PipelineTmaUmma.create(
            barrier_storage=getattr(storage, name).data_ptr(),
            num_stages=stages,
            producer_group=threads(1),
            consumer_group=threads(arrivals),
            tx_count=stage_bytes,
            cta_layout_vmnk=ctas,
            defer_sync=True,
        )

    def array(name, kind, arrivals, count=SLOTS):
        return MbarrierArray(getattr(storage, name).data_ptr(), count, (kind, threads(arrivals)))

    work = None
    if plan.scheduler == "clc":
        work = pipeline.PipelineClcFetchAsync.create(
            barrier_storage=storage.work.data_ptr(),
            num_stages=1,
            producer_group=threads(1),
            consumer_group=threads(plan.answer_readers),
            tx_count=16,
            cta_layout_vmnk=ctas,
            defer_sync=True,
        )
    by_ids = plan.key_blocks == "ids"
    mma, warps = PipelineOp.TCGen05Mma, PipelineOp.AsyncThread
    return Barriers(
        q=tma("q", plan.q_tiles, 2 if plan.o_over_q else 1, tx_bytes["q"]),
        kv=tma("kv", plan.kv_stages, 1, tx_bytes["k"]),
        score_full=array("score_full", mma, 1),
        p_full=array("p_full", warps, 8 * group),
        p_tail=array("p_tail", warps, 4 * group),
        o_full=array("o_full", mma, 1),
        inverse_full=array("inverse_full", warps, 4),
        inverse_empty=array("inverse_empty", warps, 4),
        o_store_full=array("o_store_full", warps, 4),
        o_store_empty=array("o_store_empty", warps, 1),
        groups_full=array("groups_full", warps, 1) if by_ids else None,
        groups_empty=array("groups_empty", warps, plan.group_readers) if by_ids else None,
        work=work,
    )


@dsl_user_op
def arrive_warp(barrier: MbarrierArray, index, rank=None, *, loc=None, ip=None) -> None:
    """One arrival for the calling warp, after all its lanes got here; at the barrier of the CTA `rank`, or its own."""
    cute.arch.sync_warp(loc=loc, ip=ip)
    with cute.arch.elect_one(loc=loc, ip=ip):
        barrier.arrive(index, rank, loc=loc, ip=ip)


def arrive_leader(context: Context, barrier: MbarrierArray, index) -> None:
    """`arrive_warp` at the CTA whose mma role issues this CTA's products."""
    arrive_warp(barrier, index, None if context.plan.cta_group == 1 else 0)


def commit(barrier: MbarrierArray, index, ctas: int = 1) -> None:
    """An arrival when all products issued so far are complete, in each of the `ctas` that share them."""
    barrier.arrive(index, None if ctas == 1 else (1 << ctas) - 1, cta_group(ctas))


def cta_group(ctas: int) -> tcgen05.CtaGroup:
    """So many CTAs that share a product, as the DSL names them."""
    return tcgen05.CtaGroup.ONE if ctas == 1 else tcgen05.CtaGroup.TWO


def read_tmem(source: cute.Tensor, values: cute.Tensor) -> None:
    """Fills float32 registers from successive columns of the thread's row; `source` begins at the first of them.

    Written out, not a copy of tensors: values that do not pass through the wait the compiler moves before it.
    """
    count, most = cute.size(values), 32
    registers = cute.make_tensor(values.iterator, cute.make_layout(count))
    parts = [range(first, min(first + most, count)) for first in range(0, count, most)]
    loaded = [_load_columns(source.iterator + part[0], len(part)) for part in parts]
    wait = "tcgen05.wait::ld.sync.aligned; "
    for part, words in zip(parts, loaded, strict=True):
        results = cute.arch.inline_ptx(
            wait + " ".join(f"mov.b32 {{$w{i}}}, {{$r{i}}};" for i in range(len(part))),
            write_only_types=[Uint32] * len(part),
            read_only_args=list(words),
        )
        for i, value in zip(part, results, strict=True):
            registers[i] = value.bitcast(Float32)
        wait = ""


def _load_columns(address, count: int):
    names = ", ".join(f"{{$w{i}}}" for i in range(count))
    return cute.arch.inline_ptx(
        f"tcgen05.ld.sync.aligned.32x32b.x{count}.b32 {{{names}}}, [{{$r0}}];",
        write_only_types=[Uint32] * count,
        read_only_args=[Int32(address.toint())],
    )


@dsl_user_op
def finish_tmem_stores(*, loc=None, ip=None) -> None:
    """The warp's stores to tensor memory are done, and what follows a barrier may rely on them."""
    cute.arch.fence_view_async_tmem_store(loc=loc, ip=ip)
    tmem_fence("before", loc=loc, ip=ip)


@dsl_user_op
def tmem_fence(side: str, *, loc=None, ip=None) -> None:
    """Orders tensor-memory operations with the synchronisation they come "before" or "after"."""
    cute.arch.inline_ptx(f"tcgen05.fence::{side}_thread_sync;", loc=loc, ip=ip)
