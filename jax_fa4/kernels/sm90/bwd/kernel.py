"""Backward attention for Hopper: what is launched, and which warp plays which role.

A block owns a tile of keys and loops over the blocks of queries that see it (`key_tiles`). One warp loads (`load`), one
adds dQ to a float32 accumulator in global memory (`store`), and each consumer warpgroup owns 64 keys
(`consumer`), whose dK and dV stay in its registers. Where heads are wide, warpgroups share dK and dV, take turns with
the blocks of queries, and add dQ themselves (`wide`). Two small kernels go before and after (`prepare`, `finish`);
spare warps of the main one do what they can of their work meanwhile (`dq_zeros`, `rounding`).
Recomputing P from LSE and the five products are those of FlashAttention-2 (Dao, 2023); keys as rows of the scores, so
that P and dS need not pass through shared memory for dV and dK, and the bulk reduction of dQ are FlashAttention-3's
(Shah et al., 2024).
"""

from __future__ import annotations

import copy
import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from jax_fa4.kernels.common import abi, copies, dq_zeros, key_tiles, last_wave, segments, softmax
from jax_fa4.kernels.common.entry import DTYPES
from jax_fa4.kernels.common.prepare import THREADS as PREPARE_THREADS
from jax_fa4.kernels.common.prepare import prepare
from jax_fa4.kernels.sm90.bwd import consumer, keys, load, pieces, rounding, store, wide
from jax_fa4.kernels.sm90.bwd.finish import finish
from jax_fa4.kernels.sm90.bwd.layouts import Products, Shared
from jax_fa4.kernels.sm90.bwd.pipes import Pipes
from jax_fa4.kernels.sm90.bwd.plan import BackwardPlan


@dataclasses.dataclass(frozen=True)
class Loads:
    """TMA atoms and coordinate tensors: q (S, D, H, B), do (S, E, H, B), k (T, D, K, B), v (T, E, K, B).

    `lse` and `delta` are (rows padded to the block, H, B) in plain memory.
    """

    q_atom: cute.CopyAtom
    q: cute.Tensor
    do_atom: cute.CopyAtom
    do: cute.Tensor
    k_atom: cute.CopyAtom
    k: cute.Tensor
    v_atom: cute.CopyAtom
    v: cute.Tensor
    lse: cute.Tensor
    delta: cute.Tensor


class Backward:
    """The kernel for one spec and plan; see `kernels.common.entry` for the calling convention."""

    def __init__(self, spec, plan: BackwardPlan):
        self.spec = spec
        self.plan = plan
        self.dtype = DTYPES[spec.dtype]
        self.buffers = abi.backward_buffers(spec) + _scratch(spec, plan)
        # With score mods the scale is applied to every score before them, and only log2(e) remains in the exponent.
        self.scale_log2 = softmax.LOG2_E * (1.0 if spec.score_mods else spec.scale)

    @cute.jit
    def __call__(self, g, dims, stream):
        self.launch(g, dims, stream)

    def launch(self, g, dims, stream) -> None:
        """Launches the kernels."""
        plan, spec = self.plan, self.spec
        row_blocks = (dims.S + (plan.block_q - 1)) // plan.block_q
        products = Products.make(self.dtype, plan)
        key_schedule = key_tiles.key_schedule(plan, spec, dims, keys.tile_heads(plan, dims))
        if plan.piece_costs:
            key_schedule = last_wave.cut(key_schedule, plan, dims)
        beforehand = dq_zeros.Beforehand.make(key_schedule, dims) if plan.zeroes_ahead else None
        # A launch rebinds the namespace that it is given to the kernel's own arguments: each gets a copy.
        prepare(copy.copy(g), plan.block_q, plan.dq_floats, spec.deterministic, beforehand).launch(
            grid=(row_blocks, dims.H, dims.B), block=(PREPARE_THREADS, 1, 1), stream=stream
        )
        if plan.tile_heads < spec.group:
            keys.launch_clear(g, stream)
        if segments.in_mask(spec.mask):
            segments.launch_bounds(g, dims, plan.block_q, plan.block_k, stream)
        sections = rounding.Sections.make(key_schedule, plan, dims) if plan.rounds_behind else None
        self.main(self.loads(g), products, copy.copy(g), dims, key_schedule, sections).launch(
            grid=(self.blocks(dims, key_schedule), 1, 1), block=(plan.threads, 1, 1), stream=stream, min_blocks_per_mp=1
        )
        if plan.tile_heads < spec.group:
            keys.launch_round(g, stream)
        elif plan.piece_costs:
            pieces.launch(g.dk_slabs, g.dk, g.dv_slabs, g.dv, key_schedule, stream)
        drawn = (g.dq_drawn, sections.shares) if plan.rounds_behind else None
        finish(products.dq, g.dq_accumulator, g.dq, plan, spec.scale, drawn).launch(
            grid=(row_blocks, dims.H, dims.B), block=(128 * plan.dq_parts, 1, 1), stream=stream
        )

    def blocks(self, dims, key_schedule):
        """How many blocks are launched: one for each multiprocessor, if there is work for them."""
        return cutlass.min(dims.sm_count, key_schedule.count)

    def loads(self, g) -> Loads:
        plan = self.plan

        def atom(tensor, rows, columns, panel):
            layout = copies.rows_layout(self.dtype, rows, columns, panel=panel)
            return copies.tma_load_atom(copies.permuted(tensor, 1, 3, 2, 0), layout, (rows, columns))

        return Loads(
            *atom(g.q, plan.block_q, plan.tile_d, plan.panel_d),
            *atom(g.do, plan.block_q, plan.tile_e, plan.panel_e),
            *atom(g.k, plan.block_k, plan.dq_columns, plan.panel_k),
            *atom(g.v, plan.block_k, plan.tile_e, plan.panel_e),
            copies.permuted(g.lse_log2, 2, 1, 0), copies.permuted(g.delta_rows, 2, 1, 0),
        )  # fmt: skip

    @cute.kernel
    def main(self, loads: Loads, products: Products, g, dims, key_schedule, sections):
        plan = self.plan
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom in (loads.q_atom, loads.do_atom, loads.k_atom, loads.v_atom):
                cpasync.prefetch_descriptor(atom)
        pipes = Pipes.make(plan)
        shared = Shared.allocate(self.dtype, plan)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp < 4:
            cute.arch.setmaxregister_decrease(plan.producer_registers)
            if warp == 0:
                load.run(self, loads, shared, pipes, g, dims, key_schedule)
            behind = rounding.Rounding(self, pipes, g, key_schedule, sections) if plan.rounds_behind else None
            if cutlass.const_expr(plan.rounds_behind):
                if warp == 2:
                    rounding.run(behind, shared)
            if cutlass.const_expr(plan.zeroes_ahead):
                if warp == 3:
                    dq_zeros.run(self, shared, pipes, g, dims, key_schedule, behind)
            if cutlass.const_expr(not plan.wide):
                if warp == 1:
                    store.run(self, shared, pipes, g, dims, key_schedule)
        else:
            cute.arch.setmaxregister_increase(plan.consumer_registers)
            role = wide if plan.wide else consumer
            role.run(self, products, shared, pipes, g, dims, key_schedule)


def _scratch(spec, plan: BackwardPlan) -> tuple[abi.Buffer, ...]:
    blocks = ("ceil", "S", plan.block_q)
    rows = ("mul", blocks, plan.block_q)
    buffers = (
        abi.scratch("dq_accumulator", "float32", ("B", "H", blocks, plan.dq_floats)),
        abi.scratch("lse_log2", "float32", ("B", "H", rows)),
        abi.scratch("delta_rows", "float32", ("B", "H", rows)),
        abi.scratch("tile_counter", "int32", (1,)),
    )
    buffers += dq_zeros.scratch()
    if plan.rounds_behind:
        buffers += rounding.scratch()
    if plan.tile_heads < spec.group:
        buffers += keys.scratch(spec)
    elif plan.piece_costs:
        buffers += pieces.scratch(spec, plan)
    if segments.in_mask(spec.mask):
        buffers += segments.scratch(plan.block_q, plan.block_k)
    if spec.deterministic:
        buffers += (abi.scratch("dq_counter", "int32", ("B", "H", blocks)),)
    return buffers
