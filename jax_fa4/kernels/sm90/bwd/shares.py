"""What each warpgroup of a wide plan sums of dV and dK, and the products that do it."""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.utils import hopper_helpers

from jax_fa4.kernels.common.copies import rows_layout
from jax_fa4.kernels.sm90.bwd.layouts import MN_MAJOR, multiply, transposed
from jax_fa4.kernels.sm90.bwd.plan import Share


@dataclasses.dataclass(frozen=True)
class Sum:
    """A share of dV = P^T dO or dK = dS^T Q, or of its transpose, and what a warpgroup needs to add to it.

    Attributes:
      share: which part it is, for either warpgroup.
      product: one warpgroup's.
      accumulator: its registers.
      is_second: whether this warpgroup is the second.
    """

    share: Share
    product: cute.TiledMma
    accumulator: cute.Tensor
    is_second: Any

    @classmethod
    def make(cls, kernel, share: Share, group: Int32) -> Sum:
        m, n = (share.width, share.keys) if kernel.plan.dkv_transposed else (share.keys, share.width)
        product = hopper_helpers.make_trivial_tiled_mma(
            kernel.dtype, kernel.dtype, MN_MAJOR, MN_MAJOR, Float32, (1, 1, 1), (64, n), warpgroup.OperandSource.SMEM
        )
        accumulator = cute.make_rmem_tensor(product.partition_shape_C((m, n)), Float32)
        return cls(share, product, accumulator, group == 1)

    def choose(self, first, second):
        """What belongs to this warpgroup, of two numbers."""
        if first is second or (isinstance(first, int | float) and first == second):
            return first
        kind = {int: Int32, float: Float32}.get(type(first), lambda value: value)
        return cutlass.select_(self.is_second, kind(second), kind(first))

    def target(self, outputs: dict[str, Any]) -> Any:
        """Where this share goes, of where dV and dK go (an `epilogue.Target` each)."""
        first, second = (
            dataclasses.replace(outputs[output], column=column, key=key)
            for output, (column, key) in zip(self.share.outputs, self.share.starts, strict=True)
        )
        names = [field.name for field in dataclasses.fields(first)]
        return type(first)(**{name: self.choose(getattr(first, name), getattr(second, name)) for name in names})

    def issue(self, consumer, block) -> None:
        """Adds the product of a block of queries."""
        plan, shared, share = consumer.plan, consumer.shared, self.share
        rows = {"dv": (shared.do, plan.tile_e * block.do.index), "dk": (shared.q, plan.tile_d * block.q.index)}
        scores = {"dv": (shared.p, plan.block_k * block.do.index), "dk": (shared.ds, plan.block_k * block.do.index)}
        panel = plan.panel_e if share.outputs[0] == "dv" else plan.panel_d
        columns, keys = zip(*share.starts, strict=True)
        operands = (
            self._operand(plan, [scores[output] for output in share.outputs], keys, share.keys, plan.panel_q),
            self._operand(plan, [rows[output] for output in share.outputs], columns, share.width, panel),
        )
        a, b = operands[::-1] if plan.dkv_transposed else operands
        part = self.product.get_slice(0)
        a, b = part.make_fragment_A(part.partition_A(a)), part.make_fragment_B(part.partition_B(b))
        multiply(self.product, self.accumulator, a, b, True)

    def _operand(self, plan, places, starts, columns: int, panel: int) -> cute.Tensor:
        """A tile (columns, queries) of a ring of tiles (queries, columns), for this warpgroup.

        The `places` are the ring's tensor and how many columns lie before the block, `starts` where the tile begins.
        """
        (tensor, before), (other, other_before) = places
        offsets = [plan.block_q * (before + starts[0]), plan.block_q * (other_before + starts[1])]
        if other is not tensor:
            bytes_between = other.iterator.toint() - tensor.iterator.toint()
            offsets[1] += bytes_between // (tensor.element_type.width // 8)
        offset = cute.assume(Int32(self.choose(*offsets)), divby=plan.block_q * panel)
        layout = rows_layout(tensor.element_type, plan.block_q, columns, panel=panel)
        return transposed(cute.make_tensor(tensor.iterator + offset, layout.outer))
