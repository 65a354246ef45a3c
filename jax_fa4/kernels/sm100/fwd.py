"""The forward kernel for sm_100a: host function, storage and the dispatch of warps to roles.

Structure and schedule follow FlashAttention-4: asynchronous tensor-core products that accumulate in tensor memory, two
query tiles whose softmax alternates, and a correction warpgroup that rescales O off the critical path.
"""


import dataclasses
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils as utils
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.tcgen05 import OperandMajorMode, OperandSource
from cutlass.memory import TmemAllocator

from jax_fa4.kernels.common import abi, segments
from jax_fa4.kernels.common.copies import permuted
from jax_fa4.kernels.common.entry import DTYPES
from jax_fa4.kernels.common.scheduler import TileSchedule, section_heads
from jax_fa4.kernels.sm100 import combine, correction, dispatch, epilogue, load, mma, softmax
from jax_fa4.kernels.sm100.context import (
    TMEM_BARRIER,
    Context,
    Global,
    Layouts,
    Shared,
    cta_group,
    make_barriers,
    storage_type,
)
from jax_fa4.kernels.sm100.groups import Groups
from jax_fa4.kernels.sm100.plans import (
    BLOCK_K,
    BLOCK_Q,
    GROUP_SLOTS,
    GROUP_WORDS,
    SLOTS,
    TMEM_COLUMNS,
    ForwardPlan,
)
from jax_fa4.kernels.sm100.tiles import WorkList


class Forward:
    """O and LSE from Q, K and V."""

    def __init__(self, spec, plan: ForwardPlan):
        self.spec, self.plan = spec, plan
        self.buffers = abi.forward_buffers(spec) + (combine.partial_buffers(spec) if plan.split_kv else ())
        if plan.key_blocks == "ids":
            self.buffers += segments.scratch(plan.tile_positions, BLOCK_K)
        self.dtype = DTYPES[spec.dtype]
        rows = plan.q_rows
        self.qk_tiler = (rows, BLOCK_K, plan.head_dim)
        self.pv_tiler = (rows, plan.value_head_dim, BLOCK_K)
        # What a stage of the ring holds of K and V.
        self.k_tiler = (rows, BLOCK_K, plan.head_dim // plan.kv_chunks)
        self.v_tiler = (rows, plan.value_head_dim, BLOCK_K // plan.kv_chunks)

    @cute.jit
    def __call__(self, g, dims, stream):
        plan = self.plan
        qk, pv = self._products()
        layouts = self._layouts(qk, pv)
        schedule = self._schedule(dims)
        splits, partial = Int32(1), None
        if cutlass.const_expr(plan.split_kv):
            splits = combine.splits(schedule.count, dims)
            partial = combine.partial_tensors(plan, schedule, splits, g)
        memory = self._memory(g, qk, pv, layouts, partial)
        if cutlass.const_expr(plan.key_blocks == "ids"):
            segments.launch_bounds(g, dims, plan.tile_positions, BLOCK_K, stream)
        grid = [dispatch.grid(plan, schedule.count * splits, dims.sm_count), 1, 1]
        # A copy of g: launching a kernel leaves the kernel's own values in the namespace.
        self.kernel(memory, schedule, splits, qk, pv, layouts, SimpleNamespace(**vars(g)), dims).launch(
            grid=grid,
            block=[plan.warps.threads, 1, 1],
            cluster=[plan.cta_group, 1, 1] if plan.cta_group > 1 else None,
            stream=stream,
            min_blocks_per_mp=1,
        )
        if cutlass.const_expr(plan.split_kv):
            combine.launch(self.spec, plan, partial, splits, g, dims, stream)

    def _schedule(self, dims) -> TileSchedule:
        plan, spec = self.plan, self.spec
        q_blocks = cute.ceil_div(dims.S * plan.packed_heads, plan.q_tiles * plan.q_rows)
        kv_bytes = dims.T * (spec.head_dim + spec.value_head_dim) * plan.itemsize
        most = section_heads(plan.longest_first, spec.group // plan.packed_heads, kv_bytes, plan.l2_bytes)
        heads = dims.H // plan.packed_heads
        return TileSchedule(q_blocks, heads, dims.B, most)

    def _products(self):
        """S = Q K^T from shared memory, O += P V with P in tensor memory."""
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        group = cta_group(self.plan.cta_group)
        qk = blackwell.make_trivial_tiled_mma(
            self.dtype, self.dtype, k_major, k_major, Float32, group, self.qk_tiler[:2]
        )
        pv = blackwell.make_trivial_tiled_mma(
            self.dtype, self.dtype, k_major, mn_major, Float32, group, self.pv_tiler[:2], OperandSource.TMEM
        )
        return qk, pv

    def _layouts(self, qk, pv):
        """Shared memory of Q, K, V and O, and P's arrangement in tensor memory. K and V share one ring of stages."""
        plan, dtype = self.plan, self.dtype
        q = blackwell.make_smem_layout_a(qk, self.qk_tiler, dtype, plan.q_tiles)
        k = blackwell.make_smem_layout_b(qk, self.k_tiler, dtype, plan.kv_stages)
        v = blackwell.make_smem_layout_b(pv, self.v_tiler, dtype, plan.kv_stages)
        o = blackwell.make_smem_layout_epi(
            dtype, utils.LayoutEnum.ROW_MAJOR, (BLOCK_Q, plan.value_head_dim), plan.q_tiles
        )
        stage = plan.kv_stage_bytes // plan.itemsize
        if plan.o_over_q:
            tile = plan.q_tile_bytes // plan.itemsize
            q, o = with_stage_stride(q, plan.q_tiles, tile), with_stage_stride(o, plan.q_tiles, tile)
        return Layouts(
            q=q,
            k=with_stage_stride(k, plan.kv_stages, stage),
            v=with_stage_stride(v, plan.kv_stages, stage),
            p=blackwell.make_smem_layout_a(pv, self.pv_tiler, dtype, 1),
            o=o,
        )

    def _memory(self, g, qk, pv, layouts, partial) -> Global:
        """TMA atoms and the tensors they address: rows, columns, head, batch (columns, rows for V)."""
        plan = self.plan
        cluster = (plan.cta_group, 1, 1, 1)
        load_op = cpasync.CopyBulkTensorTileG2SOp(cta_group(plan.cta_group))
        q, o = (packed(permuted(t, 1, 3, 2, 0), plan.packed_heads) for t in (g.q, g.o))
        k, v = permuted(g.k, 1, 3, 2, 0), permuted(g.v, 3, 1, 2, 0)
        a, b = cute.nvgpu.make_tiled_tma_atom_A, cute.nvgpu.make_tiled_tma_atom_B
        load_q, q = a(load_op, q, one_stage(layouts.q), self.qk_tiler, qk, cluster)
        load_k, k = b(load_op, k, one_stage(layouts.k), self.k_tiler, qk, cluster)
        load_v, v = b(load_op, v, one_stage(layouts.v), self.v_tiler, pv, cluster)
        store_o = None
        if not plan.float32_out:
            store_op, tile = cpasync.CopyBulkTensorTileS2GOp(), (BLOCK_Q, plan.value_head_dim)
            store_o, o = cpasync.make_tiled_tma_atom(store_op, o, cute.select(layouts.o, mode=[0, 1]), tile)
        lse = permuted(g.lse, 2, 1, 0)
        if plan.float32_out:
            o, lse = partial if plan.split_kv else (permuted(g.o, 1, 3, 2, 0), lse)
        return Global(load_q, q, load_k, k, load_v, v, store_o, o, lse)

    @cute.kernel
    def kernel(
        self, memory: Global, schedule, splits, qk: cute.TiledMma, pv: cute.TiledMma, layouts: Layouts, g, dims
    ):
        plan, warps = self.plan, self.plan.warps
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == warps.load:
            for atom in (memory.load_q, memory.load_k, memory.load_v, memory.store_o):
                if cutlass.const_expr(atom is not None):
                    cpasync.prefetch_descriptor(atom)
        storage = utils.SmemAllocator().allocate(storage_type(plan, self.dtype, layouts))
        tx_bytes = {
            name: cute.size_in_bytes(self.dtype, one_stage(getattr(layouts, name))) * plan.cta_group for name in "qkv"
        }
        barriers = make_barriers(plan, storage, tx_bytes)
        tmem = TmemAllocator(
            storage.tmem_address.ptr,
            barrier_for_retrieve=pipeline.NamedBarrier(TMEM_BARRIER, warps.tmem_threads),
            allocator_warp_id=warps.mma,
            is_two_cta=plan.cta_group == 2,
            two_cta_tmem_dealloc_mbar_ptr=storage.tmem_freed.ptr if plan.cta_group == 2 else None,
        )
        ctas = cute.make_layout((plan.cta_group, 1))
        pipeline.pipeline_init_arrive(ctas, is_relaxed=True)
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) if plan.cta_group == 2 else 0
        shared = self._shared(storage, layouts)
        work = WorkList(self.spec, plan, schedule, splits, g, dims)
        blocks = None
        if cutlass.const_expr(plan.key_blocks == "ids"):
            blocks = Groups(shared.groups, barriers.groups_full, barriers.groups_empty, rank)
        context = Context(
            self.spec, plan, barriers, shared, memory, work, qk, pv, layouts.p, layouts.o, tx_bytes, rank, blocks
        )
        pipeline.pipeline_init_wait(ctas)

        if warp == warps.scheduler:
            cute.arch.setmaxregister_decrease(plan.registers.other)
            if cutlass.const_expr(plan.key_blocks == "ids"):
                dispatch.run(context)
            elif cutlass.const_expr(plan.scheduler == "clc"):
                if rank == 0:
                    dispatch.run(context)
        if warp == warps.load:
            cute.arch.setmaxregister_decrease(plan.registers.other)
            load.run(context)
        if warp == warps.mma:
            cute.arch.setmaxregister_decrease(plan.registers.other)
            tmem.allocate(TMEM_COLUMNS)
            tmem.wait_for_alloc()
            address = tmem.retrieve_ptr(Float32)
            if rank == 0:
                mma.run(dataclasses.replace(context, tmem=address))
            tmem.relinquish_alloc_permit()
            tmem.wait_for_alloc()
            tmem.free(address)
        if warp == warps.epilogue:
            cute.arch.setmaxregister_decrease(plan.registers.other)
            if cutlass.const_expr(not plan.float32_out):
                epilogue.run(context)
        if warp < warps.correction:
            cute.arch.setmaxregister_increase(plan.registers.softmax)
            tmem.wait_for_alloc()
            softmax.run(dataclasses.replace(context, tmem=tmem.retrieve_ptr(Float32)))
            tmem.wait_for_alloc()
        if warp >= warps.correction and warp < warps.mma:
            cute.arch.setmaxregister_decrease(plan.registers.correction)
            tmem.wait_for_alloc()
            correction.run(dataclasses.replace(context, tmem=tmem.retrieve_ptr(Float32)))
            tmem.wait_for_alloc()

    def _shared(self, storage, layouts) -> Shared:
        plan = self.plan
        q = storage.s_q.get_tensor(layouts.q.outer, swizzle=layouts.q.inner)
        k = storage.s_kv.get_tensor(layouts.k.outer, swizzle=layouts.k.inner)
        v = cute.make_tensor(cute.recast_ptr(k.iterator, layouts.v.inner), layouts.v.outer)
        o = None
        if plan.o_over_q:
            o = cute.make_tensor(cute.recast_ptr(q.iterator, layouts.o.inner), layouts.o.outer)
        elif not plan.float32_out:
            o = storage.s_o.get_tensor(layouts.o.outer, swizzle=layouts.o.inner)
        rows = cute.make_layout((SLOTS, BLOCK_Q), stride=(BLOCK_Q, 1))
        statistics = (getattr(storage, name).get_tensor(rows) for name in ("scale", "inverse"))
        groups = storage.groups.get_tensor(cute.make_layout((GROUP_WORDS, GROUP_SLOTS)))
        return Shared(q, k, v, o, *statistics, storage.response.data_ptr(), groups)


def packed(tensor: cute.Tensor, heads: int) -> cute.Tensor:
    """Rows, columns, head, batch with so many heads moved into the rows: row r is head r % heads of row r // heads."""
    if heads == 1:
        return tensor
    rows, columns, all_heads, batch = tensor.shape
    row_stride, column_stride, head_stride, batch_stride = tensor.stride
    layout = cute.make_layout(
        ((heads, rows), columns, all_heads // heads, batch),
        stride=((head_stride, row_stride), column_stride, head_stride * heads, batch_stride),
    )
    return cute.make_tensor(tensor.iterator, layout)


def one_stage(layout):
    return cute.select(layout, mode=[0, 1, 2])


def with_stage_stride(layout, stages: int, stride: int):
    """The staged layout with another distance between its stages."""
    tile = cute.select(layout.outer, mode=list(range(cute.rank(layout) - 1)))
    outer = cute.append(tile, cute.make_layout(stages, stride=stride))
    return cute.make_composed_layout(layout.inner, 0, outer)
