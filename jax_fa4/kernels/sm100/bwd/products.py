"""The products of a step, as the tensor cores are told of them."""

from __future__ import annotations

import dataclasses

import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import tcgen05
from cutlass.cute.nvgpu.tcgen05 import CtaGroup, OperandMajorMode, OperandSource

from jax_fa4.kernels.sm100.bwd.plan import BLOCK, BackwardPlan


def cta_group(plan: BackwardPlan) -> CtaGroup:
    return CtaGroup.TWO if plan.paired else CtaGroup.ONE


@dataclasses.dataclass(frozen=True)
class Products:
    """The tiled products of a step. Keys are the rows of the scores: S^T = K Q^T and dP^T = V dO^T (both `scores`).

    dV = P^T dO and dK = dS^T Q have P and dS in tensor memory (in a narrow pair in shared memory); dQ = dS K has dS in
    shared memory, transposed. In a pair each CTA has half of the rows of every product.
    """

    scores: cute.TiledMma
    dv: cute.TiledMma
    dk: cute.TiledMma
    dq: cute.TiledMma

    @classmethod
    def make(cls, dtype, plan: BackwardPlan) -> Products:
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        p_source = OperandSource.SMEM if plan.narrow else OperandSource.TMEM

        def product(a_major, b_major, rows, columns, source=OperandSource.SMEM):
            return blackwell.make_trivial_tiled_mma(
                dtype, dtype, a_major, b_major, Float32, cta_group(plan), (rows, columns), source
            )

        keys = plan.block_k
        return cls(
            scores=product(k_major, k_major, keys, BLOCK),
            dv=product(k_major, mn_major, keys, plan.tile_e, p_source),
            dk=product(k_major, mn_major, keys, plan.tile_d, p_source),
            dq=product(mn_major, mn_major, BLOCK, plan.tile_d),
        )


def accumulator(product: cute.TiledMma, tmem, column: int) -> cute.Tensor:
    """A product's result, at a column of tensor memory."""
    shape = product.partition_shape_C((product.shape_mnk[0], product.shape_mnk[1]))
    return cute.make_tensor(tmem + column, product.get_slice(0).make_fragment_C(shape).layout)


def multiply(product: cute.TiledMma, result: cute.Tensor, a, b, accumulate, number: Int32) -> None:
    """result (+)= a b over the depth of `b`; `a` is a tensor or the parts of one, equal in depth.

    `b` may be (tensor, part): it meets that part of a's depth.

    `number` is the step's: with addresses that change from step to step, the compiler works them out where they are
    used. Else it does so for all depths of all products ahead of the loop, and has no registers to hold them.
    """
    product = cute.make_tiled_mma(product.op)  # of its own: `set` changes it
    b, part = b if isinstance(b, tuple) else (b, 0)
    depth = cute.size(b, mode=[2])
    nothing = number >> 31  # 0, as only we know
    b = _shifted(b, nothing)
    a = tuple(_shifted(part, nothing) for part in a) if isinstance(a, tuple) else _shifted(a, nothing)
    for i in range(depth):
        if isinstance(a, tuple):
            steps = depth // len(a)
            left = a[i // steps][None, None, i % steps]
        else:
            left = a[None, None, part * depth + i]
        product.set(tcgen05.Field.ACCUMULATE, accumulate if i == 0 else True)
        cute.gemm(product, result, left, b[None, None, i], result)


def _shifted(operand: cute.Tensor, offset: Int32) -> cute.Tensor:
    places = cute.make_tensor(operand.iterator, cute.append(operand.layout, cute.make_layout(2)))
    return places[None, None, None, offset]
