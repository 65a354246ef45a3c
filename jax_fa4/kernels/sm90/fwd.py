"""Forward attention for Hopper: what is launched, what shared memory holds, and which warp plays which role.

One producer warp loads Q, K and V by TMA (`load`). Each consumer warpgroup owns 64 query rows: it computes scores and
output with WGMMA and keeps the softmax in registers (`consumer`), then writes its rows (`epilogue`). CTAs stay for many
tiles.
The schedule of products follows FlashAttention-3 (Shah et al., 2024): the next block's scores are computed while the
previous block's P multiplies V, and warpgroups take turns on the tensor cores.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import LayoutEnum, SmemAllocator

from jax_fa4 import masks
from jax_fa4.kernels.common import abi, copies, pipelines, scheduler, segments, softmax
from jax_fa4.kernels.common.by_length import launch, launch_by_length
from jax_fa4.kernels.common.entry import DTYPES
from jax_fa4.kernels.sm90 import consumer, load, pieces
from jax_fa4.kernels.sm90.plans import L2_SECTION_BYTES, STATIC_BLOCKS, ForwardPlan


@dataclasses.dataclass(frozen=True)
class Transfers:
    """TMA atoms and coordinate tensors: k (T, D, K, B), v (E, T, K, B), q (S, D, H, B) or packed ((G, S), D, K, B), and
    o like q, or None where threads store it."""

    q_atom: cute.CopyAtom
    q: cute.Tensor
    k_atom: cute.CopyAtom
    k: cute.Tensor
    v_atom: cute.CopyAtom
    v: cute.Tensor
    o_atom: cute.CopyAtom | None
    o: cute.Tensor | None


@dataclasses.dataclass(frozen=True)
class Products:
    """Both tiled products, per CTA: scores = Q K^T and output = P V with P from registers; and a warpgroup's output."""

    scores: cute.TiledMma
    output: cute.TiledMma
    group_output: cute.TiledMma


@dataclasses.dataclass(frozen=True)
class Shared:
    """Tiles in shared memory (o: if it has a buffer), the rings that guard them, the KV block in each K buffer, and the
    queue of work."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: cute.Tensor | None
    q_pipeline: Any
    k_pipeline: Any
    v_pipeline: Any
    blocks: cute.Tensor
    work: scheduler.WorkQueue


class Forward:
    """The kernel for one spec and plan; see `kernels.common.entry` for the calling convention."""

    def __init__(self, spec, plan: ForwardPlan):
        self.spec = spec
        self.plan = plan
        self.short = Forward(spec, plan.short) if plan.short else None
        self.few = Forward(spec, plan.few) if plan.few else None
        scratch = (abi.scratch("next_tile", "int32", (1,)),)
        if plan.few or plan.cutting:
            scratch += pieces.scratch(spec, plan.few or plan)
        if segments.in_mask(spec.mask):
            scratch += segments.scratch(plan.block_positions, plan.block_k)
        self.buffers = abi.forward_buffers(spec) + scratch
        self.dtype = DTYPES[spec.dtype]
        self.buffers_output = plan.buffers_output and not spec.float32_out
        # With score mods the scale is applied to every score before them, and only log2(e) remains in the exponent.
        self.scale_log2 = softmax.LOG2_E * (1.0 if spec.score_mods else spec.scale)

    def layouts(self):
        """Shared memory layouts of Q (rows, D, stage), K (keys, D, stage) and V (E, keys, stage)."""
        plan = self.plan
        rows, keys, dim, value_dim = plan.block_q, plan.block_k, plan.tile_dim, plan.value_tile_dim
        q = hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (rows, keys, dim), self.dtype, plan.q_stages)
        k = hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (rows, keys, dim), self.dtype, plan.stages)
        v = hopper.make_smem_layout_b(LayoutEnum.COL_MAJOR, (rows, value_dim, keys), self.dtype, plan.stages)
        return q, k, v

    def products(self) -> Products:
        plan, kmajor = self.plan, OperandMajorMode.K
        atoms = (plan.warpgroups, 1, 1)
        scores = hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, kmajor, kmajor, Float32, atoms, (64, plan.block_k)
        )
        output, group_output = (
            hopper.make_trivial_tiled_mma(
                self.dtype, self.dtype, kmajor, OperandMajorMode.MN, Float32, groups, (64, plan.value_tile_dim),
                warpgroup.OperandSource.RMEM,
            )
            for groups in (atoms, (1, 1, 1))
        )  # fmt: skip
        return Products(scores, output, group_output)

    @cute.jit
    def __call__(self, g, dims, stream):
        if const_expr(self.few is None):
            self._launch_by_length(g, dims, stream)
        else:
            self._launch_by_count(g, dims, stream)

    @cute.jit
    def _launch_by_count(self, g, dims, stream):
        if self.few.schedule(dims).cut > 0:
            launch(self.few, g, dims, stream)
        else:
            self._launch_by_length(g, dims, stream)

    def _launch_by_length(self, g, dims, stream):
        if self.short is None:
            launch(self, g, dims, stream)
        else:
            launch_by_length(self, g, dims, stream)

    def launch(self, g, dims, stream):
        """Launches the kernel on tensors `g` (see `kernels.common.entry`)."""
        plan = self.plan
        q_layout, k_layout, v_layout = self.layouts()
        q_atom, q = copies.tma_load_atom(
            copies.packed_rows(g.q, plan.packed_heads), cute.select(q_layout, mode=[0, 1]), plan.q_tile
        )
        k_atom, k = copies.tma_load_atom(
            copies.permuted(g.k, 1, 3, 2, 0), cute.select(k_layout, mode=[0, 1]), plan.k_tile
        )
        v_atom, v = copies.tma_load_atom(
            copies.permuted(g.v, 3, 1, 2, 0), cute.select(v_layout, mode=[0, 1]), plan.v_tile
        )
        o_atom, o = None, None
        if self.buffers_output:
            o_layout = copies.rows_layout(self.dtype, 16, 64)
            o_atom, o = copies.tma_store_atom(copies.packed_rows(g.o, plan.packed_heads), o_layout, plan.store_tile)
        schedule = self.schedule(dims)
        grid = cutlass.min(dims.sm_count, schedule.numbers)
        scheduler.launch_reset(schedule, g.next_tile, stream)
        if segments.in_mask(self.spec.mask):
            segments.launch_bounds(g, dims, plan.block_positions, plan.block_k, stream)
        self.kernel(
            Transfers(q_atom, q, k_atom, k, v_atom, v, o_atom, o), self.products(), (q_layout, k_layout, v_layout),
            copy.copy(g), dims, schedule,
        ).launch(
            grid=(grid, 1, 1),
            block=(128 * (plan.warpgroups + 1), 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )
        if plan.cutting:
            pieces.Combine(self.spec, plan).launch(schedule, copy.copy(g), dims, stream)

    def schedule(self, dims) -> scheduler.CountedSchedule:
        """Which tiles there are, and who hands them out."""
        plan = self.plan
        q_blocks = (dims.S + (plan.block_positions - 1)) // plan.block_positions
        kv_bytes = Int64(dims.T) * (2 * (self.spec.head_dim + self.spec.value_head_dim))
        sharing = self.spec.group // plan.packed_heads
        section = scheduler.section_heads(plan.longest_first, sharing, kv_bytes, L2_SECTION_BYTES)
        rounds = Int32(1)
        if not plan.longest_first:  # tiles of equal length
            rounds = cutlass.max(STATIC_BLOCKS // cute.ceil_div(dims.T, plan.block_k), Int32(1))
        tiles = scheduler.CountedSchedule(
            q_blocks, dims.H // plan.packed_heads, dims.B, section, rounds * dims.sm_count
        )
        if plan.cutting is None:
            return tiles
        equal = Boolean(plan.equal_length)
        if plan.longest_first:
            equal = equal & (dims.S <= dims.T // 8)  # few rows, all of which see most keys
        return scheduler.share_out(tiles, self.longest_blocks(dims), dims.sm_count, plan.cutting, equal)

    def longest_blocks(self, dims) -> Int32:
        """KV blocks of the longest tile, as far as is known before the run."""
        plan = self.plan
        keys = masks.most_keys(self.spec.mask, plan.block_positions)
        blocks = cute.ceil_div(dims.T, plan.block_k)
        return blocks if keys is None else cutlass.min(blocks, Int32(keys // plan.block_k + 1))

    @cute.kernel
    def kernel(self, transfers: Transfers, products: Products, layouts, g, dims, schedule):
        plan = self.plan
        q_layout, k_layout, v_layout = layouts
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            cpasync.prefetch_descriptor(transfers.q_atom)
            cpasync.prefetch_descriptor(transfers.k_atom)
            cpasync.prefetch_descriptor(transfers.v_atom)

        storage = SmemAllocator()
        barriers = storage.allocate_array(Int64, 2 * (plan.q_stages + 2 * plan.stages + load.QUEUE_SLOTS))
        work_words = scheduler.WORK_WORDS + (1 if plan.cutting else 0)
        words = storage.allocate_tensor(Int32, cute.make_layout((work_words, load.QUEUE_SLOTS)), 16)
        blocks = storage.allocate_tensor(Int32, cute.make_layout(plan.stages), 16)
        tensor = lambda layout: storage.allocate_tensor(  # noqa: E731
            self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner
        )
        q, k, v = tensor(q_layout), tensor(k_layout), tensor(v_layout)
        o = None
        if const_expr(self.buffers_output):
            o = tensor(copies.rows_layout(self.dtype, 64, plan.value_tile_dim, plan.warpgroups))
        size = lambda layout: cute.size_in_bytes(self.dtype, cute.select(layout, mode=[0, 1]))  # noqa: E731
        rings = []
        for layout, stages in ((q_layout, plan.q_stages), (k_layout, plan.stages), (v_layout, plan.stages)):
            rings.append(pipelines.tma_load_pipeline(barriers, stages, size(layout), 4 * plan.warpgroups))
            barriers = barriers + 2 * stages
        queue = scheduler.work_queue(barriers, words, 4 * plan.warpgroups)
        shared = Shared(q, k, v, o, *rings, blocks, queue)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if warp < 4:
            cute.arch.setmaxregister_decrease(plan.producer_registers)
            if warp == 0:
                load.run(self, transfers, shared, g, dims, schedule)
        else:
            cute.arch.setmaxregister_increase(plan.consumer_registers)
            consumer.run(self, products, shared, transfers, g, dims)
