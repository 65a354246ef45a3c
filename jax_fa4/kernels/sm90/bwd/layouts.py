"""Shared-memory layouts, matrix products and the kernel's arguments as its roles see them."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers

from jax_fa4.kernels.common.copies import rows_layout
from jax_fa4.kernels.common.key_tiles import NUMBER_STAGES
from jax_fa4.kernels.sm90.bwd.plan import BackwardPlan

K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN


def transposed(tensor: cute.Tensor) -> cute.Tensor:
    """The same elements as (columns, rows[, stages])."""
    shape = (tensor.shape[1], tensor.shape[0], *tensor.shape[2:])
    return cute.composition(tensor, cute.make_ordered_layout(shape, order=(1, 0, *range(2, len(shape)))))


@dataclass(frozen=True)
class Products:
    """The tiled products of a step. Keys are the rows of the scores: S^T = K Q^T, dP^T = V dO^T.

    Warpgroups share the keys: P^T and dS^T stay in registers as the left operand of dV = P^T dO and dK = dS^T Q. dQ =
    dS K reads dS from shared memory; they share its rows or columns, or the rows of its transpose.

    Where a warpgroup holds slices of V in registers, `dp` is their product.

    In a `wide` plan queries are the rows, S = Q K^T, dP = dO V^T and dQ = dS K are one warpgroup's, dQ with dS in
    registers; dP has a product of its own, and those of dV and dK are in `shares`.
    """

    scores: cute.TiledMma
    dp: cute.TiledMma | None
    dv: cute.TiledMma | None
    dk: cute.TiledMma | None
    dq: cute.TiledMma

    @classmethod
    def make(cls, dtype, plan: BackwardPlan) -> "Products":
        by_rows, by_columns = (plan.consumers, 1, 1), (1, plan.consumers, 1)
        shared, registers = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM

        def product(a_major, b_major, columns, split, a=shared):
            if split is by_columns:
                columns //= plan.consumers
            tile = (64, columns)
            return hopper_helpers.make_trivial_tiled_mma(dtype, dtype, a_major, b_major, Float32, split, tile, a)

        if plan.wide:
            alone = (1, 1, 1)
            return cls(
                scores=product(K_MAJOR, K_MAJOR, plan.block_k, alone),
                dp=product(K_MAJOR, K_MAJOR, plan.block_k // plan.dp_parts, alone),
                dv=None, dk=None,
                dq=product(K_MAJOR, MN_MAJOR, plan.tile_d // plan.dq_slices, alone, registers),
            )
        if plan.dq_transposed:
            dq = product(MN_MAJOR, MN_MAJOR, plan.block_q, by_rows)
        else:
            dq = product(MN_MAJOR, MN_MAJOR, plan.tile_d, by_rows if plan.dq_by_rows else by_columns)
        return cls(
            scores=product(K_MAJOR, K_MAJOR, plan.block_q, by_rows),
            dp=product(K_MAJOR, K_MAJOR, plan.block_q, by_rows, registers) if plan.v_slices else None,
            dv=product(K_MAJOR, MN_MAJOR, plan.tile_e, by_rows, registers),
            dk=product(K_MAJOR, MN_MAJOR, plan.tile_d, by_rows, registers),
            dq=dq,
        )


def multiply(
    product: cute.TiledMma, accumulator: cute.Tensor, a: cute.Tensor, b: cute.Tensor, accumulate: bool, held=None
) -> None:
    """Issues accumulator (+)= a b as one group of warpgroup products; `warpgroup.wait_group` ends it.

    Where one operand's inner dimension is padded further than the other's, the rest is zero and left out. The first
    slices of a may be `held` in registers: (product, operand) for these.
    """
    warpgroup.fence()
    slices = min(cute.size(a.shape[2]), cute.size(b.shape[2]))
    first = 0 if held is None else cute.size(held[1].shape[2])
    for k in range(slices):
        own, left = held if k < first else (product, a)
        atom = cute.make_mma_atom(own.op)
        atom.set(warpgroup.Field.ACCUMULATE, accumulate or k > 0)
        cute.gemm(atom, accumulator, left[None, None, k], b[None, None, k], accumulator)
    warpgroup.commit_group()


def as_left_operand(fragment: cute.Tensor) -> cute.Tensor:
    """A 16-bit accumulator fragment ((2, 2, N/8), 1, 1) seen as the left operand ((2, 2, 2), 1, N/16) of a product."""
    groups = fragment.shape[0][2]
    layout = cute.make_layout(((2, 2, 2), 1, groups // 2), stride=((1, 2, 4), 0, 8))
    return cute.make_tensor(fragment.iterator, layout)


@dataclass(frozen=True)
class Shared:
    """Tiles in shared memory.

    `ds` is (key, query, stage); `dq`, for the store warp, is (4, thread, vector, consumer), in accumulator order. In a
    wide plan `ds` and `p` are (query, key, stage), and there is no `dq`. `places` says of each buffer of Q where its
    block is, if the plan `spares_registers`.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    do: cute.Tensor
    ds: cute.Tensor
    p: cute.Tensor | None
    dq: cute.Tensor | None
    lse: cute.Tensor
    delta: cute.Tensor
    numbers: cute.Tensor
    places: cute.Tensor | None

    @classmethod
    def allocate(cls, dtype, plan: BackwardPlan) -> "Shared":
        memory = cutlass.utils.SmemAllocator()

        def tile(rows, columns, stages=None, panel=64):
            layout = rows_layout(dtype, rows, columns, stages, panel)
            return memory.allocate_tensor(dtype, layout.outer, 1024, layout.inner)

        def statistic(stages):
            return memory.allocate_tensor(Float32, cute.make_layout((p.block_q, stages)), 128)

        p = plan
        rows, columns = (p.block_q, p.block_k) if p.wide else (p.block_k, p.block_q)
        return cls(
            q=tile(p.block_q, p.tile_d, p.q_stages, p.panel_d),
            k=tile(p.block_k, p.dq_columns, p.k_stages if p.k_stages > 1 else None, p.panel_k),
            v=tile(p.block_k, p.tile_e, None, p.panel_e), do=tile(p.block_q, p.tile_e, p.do_stages, p.panel_e),
            ds=tile(rows, columns, p.ds_stages, p.panel_q),
            p=tile(rows, columns, p.ds_stages, p.panel_q) if p.wide else None,
            dq=None if p.wide else memory.allocate_tensor(
                Float32, cute.make_layout((4, 128, p.dq_floats // (512 * p.consumers), p.consumers)), 1024
            ),
            lse=statistic(p.q_stages), delta=statistic(p.do_stages),
            numbers=memory.allocate_tensor(Int32, cute.make_layout((NUMBER_STAGES,)), 16),
            places=memory.allocate_tensor(Int32, cute.make_layout((4, p.q_stages)), 16) if p.spares_registers else None,
        )
