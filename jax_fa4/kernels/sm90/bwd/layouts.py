"""Shared-memory layouts, matrix products and the kernel's arguments as its roles see them."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers

from jax_fa4.kernels.sm90.bwd.plan import BackwardPlan

K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN


def rows_layout(dtype, rows: int, columns: int, stages: int | None = None) -> cute.ComposedLayout:
    """(rows, columns[, stages]) with contiguous columns, swizzled over 128 bytes: 64-column panels one after another."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    shape = (rows, columns) if stages is None else (rows, columns, stages)
    return cute.tile_to_shape(atom, shape, order=tuple(range(len(shape))))


def transposed(tensor: cute.Tensor) -> cute.Tensor:
    """The same elements as (columns, rows[, stages])."""
    shape = (tensor.shape[1], tensor.shape[0], *tensor.shape[2:])
    return cute.composition(tensor, cute.make_ordered_layout(shape, order=(1, 0, *range(2, len(shape)))))


@dataclass(frozen=True)
class Products:
    """The tiled products of a step. Keys are the rows of the scores: S^T = K Q^T, dP^T = V dO^T.

    P^T and dS^T stay in registers as the left operand of dV = P^T dO and dK = dS^T Q; dQ = dS K reads dS from shared memory.
    """

    scores: cute.TiledMma
    dv: cute.TiledMma
    dk: cute.TiledMma
    dq: cute.TiledMma

    @classmethod
    def make(cls, dtype, plan: BackwardPlan) -> "Products":
        def product(a_major, b_major, columns, split=(plan.consumers, 1, 1), a=warpgroup.OperandSource.SMEM):
            return hopper_helpers.make_trivial_tiled_mma(dtype, dtype, a_major, b_major, Float32, split, (64, columns), a)

        registers = warpgroup.OperandSource.RMEM
        if plan.dq_by_rows:
            dq = product(MN_MAJOR, MN_MAJOR, plan.tile_d)
        else:
            dq = product(MN_MAJOR, MN_MAJOR, plan.tile_d // plan.consumers, split=(1, plan.consumers, 1))
        return cls(
            scores=product(K_MAJOR, K_MAJOR, plan.block_q),
            dv=product(K_MAJOR, MN_MAJOR, plan.tile_e, a=registers),
            dk=product(K_MAJOR, MN_MAJOR, plan.tile_d, a=registers),
            dq=dq,
        )


@cute.jit
def multiply(product: cute.TiledMma, accumulator: cute.Tensor, a: cute.Tensor, b: cute.Tensor,
             accumulate: cutlass.Constexpr[bool]):
    """Issues accumulator (+)= a b as one group of warpgroup products; `warpgroup.wait_group` ends it."""
    warpgroup.fence()
    atom = cute.make_mma_atom(product.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    for k in cutlass.range_constexpr(cute.size(a.shape[2])):
        cute.gemm(atom, accumulator, a[None, None, k], b[None, None, k], accumulator)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def as_left_operand(fragment: cute.Tensor) -> cute.Tensor:
    """A 16-bit accumulator fragment ((2, 2, N/8), 1, 1) seen as the left operand ((2, 2, 2), 1, N/16) of a product."""
    groups = fragment.shape[0][2]
    layout = cute.make_layout(((2, 2, 2), 1, groups // 2), stride=((1, 2, 4), 0, 8))
    return cute.make_tensor(fragment.iterator, layout)


@dataclass(frozen=True)
class Shared:
    """Tiles in shared memory. `ds` is (key, query, stage), `dq` (4, thread, vector, consumer) in accumulator order."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    do: cute.Tensor
    ds: cute.Tensor
    dq: cute.Tensor
    lse: cute.Tensor
    delta: cute.Tensor

    @classmethod
    def allocate(cls, dtype, plan: BackwardPlan) -> "Shared":
        memory = cutlass.utils.SmemAllocator()

        def tile(rows, columns, stages=None):
            layout = rows_layout(dtype, rows, columns, stages)
            return memory.allocate_tensor(dtype, layout.outer, 1024, layout.inner)

        p = plan
        ds = tile(p.block_k, p.block_q, p.ds_stages)
        consumers = p.consumers
        dq_layout = cute.make_layout((4, 128, p.dq_floats // (512 * consumers), consumers))
        dq = memory.allocate_tensor(Float32, dq_layout, 1024)
        return cls(
            q=tile(p.block_q, p.tile_d, p.q_stages), k=tile(p.block_k, p.tile_d), v=tile(p.block_k, p.tile_e),
            do=tile(p.block_q, p.tile_e, p.do_stages), ds=ds, dq=dq,
            lse=memory.allocate_tensor(Float32, cute.make_layout((p.block_q, p.q_stages)), 128),
            delta=memory.allocate_tensor(Float32, cute.make_layout((p.block_q, p.do_stages)), 128),
        )
