"""Backward attention for Blackwell: what is launched, and which warp plays which role.

A block owns a tile of 128 keys and loops over the blocks of 128 queries that see it, of all query heads that share the
KV head. One warp loads (`load`), one issues the products (`mma`), two warpgroups compute P and dS (`compute`), one adds
dQ to a float32 accumulator in global memory (`reduce`); dK and dV stay in tensor memory. Two blocks may work as a pair,
a cluster: each owns its keys, and half of the queries' dQ, which then is summed over the keys of both before it leaves
(`pair`). Small kernels go before and after (`prepare`, `finish`). The five products, keys as rows of the scores, P and
dS as operands from tensor memory, and the pairs are those of FlashAttention-4's backward.
"""

from __future__ import annotations

import copy
import dataclasses

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import TmemAllocator

from jax_fa4.kernels.common import abi, key_tiles, segments, softmax
from jax_fa4.kernels.common.entry import DTYPES
from jax_fa4.kernels.common.prepare import THREADS as PREPARE_THREADS
from jax_fa4.kernels.common.prepare import prepare
from jax_fa4.kernels.sm100.bwd import compute, load, mma, reduce
from jax_fa4.kernels.sm100.bwd.barriers import TMEM_BARRIER, Pipes
from jax_fa4.kernels.sm100.bwd.context import Context
from jax_fa4.kernels.sm100.bwd.finish import THREADS as FINISH_THREADS
from jax_fa4.kernels.sm100.bwd.finish import finish
from jax_fa4.kernels.sm100.bwd.memory import Shared
from jax_fa4.kernels.sm100.bwd.plan import BLOCK, BackwardPlan
from jax_fa4.kernels.sm100.bwd.products import Products
from jax_fa4.kernels.sm100.plans import TMEM_COLUMNS


class Backward:
    """The kernel for one spec and plan; see `kernels.common.entry` for the calling convention."""

    def __init__(self, spec, plan: BackwardPlan):
        self.spec, self.plan = spec, plan
        self.dtype = DTYPES[spec.dtype]
        blocks, rows = ("ceil", "S", plan.block_q), ("round_up", "S", plan.block_q)
        self.buffers = abi.backward_buffers(spec) + (
            abi.scratch("dq_accumulator", "float32", ("B", "H", blocks, plan.dq_floats)),
            abi.scratch("lse_log2", "float32", ("B", "H", rows)),
            abi.scratch("delta_rows", "float32", ("B", "H", rows)),
            abi.scratch("tile_counter", "int32", (1,)),
        )
        if segments.in_mask(spec.mask):
            self.buffers += segments.scratch(plan.block_q, plan.block_k)
        if spec.deterministic:
            self.buffers += (abi.scratch("dq_counter", "int32", ("B", "H", blocks)),)
        # With score mods the scale is applied to every score before them, and only log2(e) remains in the exponent.
        self.scale_log2 = softmax.LOG2_E * (1.0 if spec.score_mods else spec.scale)

    @cute.jit
    def __call__(self, g, dims, stream):
        plan, spec = self.plan, self.spec
        row_blocks = (dims.S + (BLOCK - 1)) // BLOCK
        # A launch rebinds the namespace that it is given to the kernel's own arguments: each gets a copy.
        prepare(copy.copy(g), BLOCK, plan.dq_floats, spec.deterministic).launch(
            grid=(row_blocks, dims.H, dims.B), block=(PREPARE_THREADS, 1, 1), stream=stream
        )
        if cutlass.const_expr(segments.in_mask(spec.mask)):
            segments.launch_bounds(g, dims, plan.block_q, plan.block_k, stream)
        key_schedule = key_tiles.key_schedule(plan, spec, dims)
        products = Products.make(self.dtype, plan)
        workers = cutlass.max(cutlass.min(dims.sm_count // plan.ctas, key_schedule.count), 1)
        self.main(load.Sources.make(self.dtype, plan, g), products, copy.copy(g), dims, key_schedule).launch(
            grid=(workers * plan.ctas, 1, 1), block=(plan.warps.threads, 1, 1), cluster=(plan.ctas, 1, 1),
            stream=stream, min_blocks_per_mp=1,
        )  # fmt: skip
        finish(g.dq_accumulator, g.dq, plan, spec.scale).launch(
            grid=(row_blocks, dims.H, dims.B), block=(FINISH_THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def main(self, sources: load.Sources, products: Products, g, dims, key_schedule):
        plan, warps, registers = self.plan, self.plan.warps, self.plan.registers
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) if plan.paired else 0
        if warp == warps.load:
            for matrix in sources.matrices:
                cpasync.prefetch_descriptor(matrix.atom)
        pipes = Pipes.make(plan)
        shared = Shared.allocate(self.dtype, plan)
        tmem = TmemAllocator(
            shared.tmem_address.iterator,
            barrier_for_retrieve=pipeline.NamedBarrier(TMEM_BARRIER, warps.tmem_threads),
            allocator_warp_id=warps.mma,
            is_two_cta=plan.paired,
            two_cta_tmem_dealloc_mbar_ptr=shared.tmem_freed.iterator,
        )
        cute.arch.mbarrier_init_fence()
        self._meet()
        context = Context(self, products, shared, pipes, g, dims, key_schedule, rank)

        if warp >= warps.mma:
            cute.arch.setmaxregister_decrease(registers.other)
            if warp == warps.load:
                load.run(context, sources)
            if warp == warps.mma:
                tmem.allocate(TMEM_COLUMNS)
                tmem.wait_for_alloc()
                address = tmem.retrieve_ptr(Float32)
                mma.run(dataclasses.replace(context, tmem=address))
                tmem.relinquish_alloc_permit()
                tmem.wait_for_alloc()
                tmem.free(address)
        if warp < warps.compute:
            cute.arch.setmaxregister_increase(registers.reduce)
            tmem.wait_for_alloc()
            reduce.run(dataclasses.replace(context, tmem=tmem.retrieve_ptr(Float32)))
            tmem.wait_for_alloc()
        if warp >= warps.compute and warp < warps.mma:
            cute.arch.setmaxregister_increase(registers.compute)
            tmem.wait_for_alloc()
            compute.run(dataclasses.replace(context, tmem=tmem.retrieve_ptr(Float32)))
            tmem.wait_for_alloc()
        if cutlass.const_expr(plan.paired):
            self._meet()  # the other CTA may still report to this one's barriers

    def _meet(self) -> None:
        """All threads of the block, or of the pair, wait for one another."""
        if self.plan.paired:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
