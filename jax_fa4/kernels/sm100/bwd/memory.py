"""Shared memory and tensor memory of the backward kernel."""

from __future__ import annotations

import dataclasses

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import tcgen05
from cutlass.memory import SmemAllocator

from jax_fa4.kernels.common import copies
from jax_fa4.kernels.common.key_tiles import NUMBER_STAGES
from jax_fa4.kernels.sm100.bwd.plan import BLOCK, NUMBER_BYTES, BackwardPlan

_LANE = 1 << 16
"""Distance of two lanes in the addresses of tensor memory; that of two columns is 1."""


@dataclasses.dataclass(frozen=True)
class Shared:
    """Tiles in shared memory: (rows, columns[, stage]), see the plan's `tiles`; `ds` and `ds_out` are (key, query).

    Where the plan has no tile of its own, `q_columns`, `do_columns` and `k_columns` are the matrix itself.
    `dq` is (4, lane, vector of columns, stage): chunks of dQ on their way out. Statistics are (4, vector, stage).
    `tmem_freed` is a barrier.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    do: cute.Tensor
    q_columns: cute.Tensor
    k_columns: cute.Tensor
    do_columns: cute.Tensor
    p: cute.Tensor | None
    ds: cute.Tensor
    ds_out: cute.Tensor | None
    dq: cute.Tensor
    lse: cute.Tensor
    delta: cute.Tensor
    numbers: cute.Tensor
    tmem_address: cute.Tensor
    tmem_freed: cute.Tensor

    @classmethod
    def allocate(cls, dtype, plan: BackwardPlan) -> Shared:
        memory = SmemAllocator()

        def plain(dtype, layout, align=128):
            return memory.allocate_tensor(dtype, layout, align)

        numbers = cute.make_layout((NUMBER_STAGES,), stride=(NUMBER_BYTES // 4,))
        statistics = cute.make_layout((4, BLOCK // 4, plan.statistic_stages))
        small = dict(  # before the tiles: it fills what aligning these leaves
            lse=plain(Float32, statistics), delta=plain(Float32, statistics),
            numbers=plain(Int32, numbers, 16), tmem_address=plain(Int32, cute.make_layout((1,)), 16),
            tmem_freed=plain(Int64, cute.make_layout((1,)), 16),
        )  # fmt: skip
        tiles: dict[str, cute.Tensor] = {}
        for name, tile in plan.tiles.items():
            layout = copies.rows_layout(dtype, tile.rows, tile.columns, tile.stages, tile.panel)
            if name in plan.aliases:
                pointer = cute.recast_ptr(tiles[plan.aliases[name]].iterator, layout.inner)
                tiles[name] = cute.make_tensor(pointer, layout.outer)
            else:
                tiles[name] = memory.allocate_tensor(dtype, layout.outer, 1024, layout.inner)
        for name in ("q", "k", "do"):
            tiles.setdefault(f"{name}_columns", tiles[name])
        chunks = cute.make_layout((4, BLOCK, plan.dq_chunk // 4, plan.dq_stages))
        return cls(**{"p": None, "ds_out": None} | tiles, dq=plain(Float32, chunks, 1024), **small)


def columns_of(tmem, column, width: int) -> cute.Tensor:
    """Tensor memory (128 lanes, width) of float32 words from a column on."""
    return cute.make_tensor(tmem + column, cute.make_layout((BLOCK, width), stride=(_LANE, 1)))


def _copy(tmem, operation, column, width: int, thread):
    """(copy, this thread's place): moves `width` columns of a lane between tensor memory and registers."""
    tensor = columns_of(tmem, column, width)
    atom = cute.make_copy_atom(operation(tcgen05.copy.Repetition(width)), Float32)
    copy = tcgen05.make_tmem_copy(atom, tensor).get_slice(thread)
    load = operation is tcgen05.copy.Ld32x32bOp
    return copy, copy.partition_S(tensor) if load else copy.partition_D(tensor)


def load_columns(tmem, column, width: int, thread) -> cute.Tensor:
    """A lane's `width` float32 words; `cute.arch.fence_view_async_tmem_load` must follow before they are used."""
    copy, source = _copy(tmem, tcgen05.copy.Ld32x32bOp, column, width, thread)
    shape = copy.partition_D(cute.make_identity_tensor((BLOCK, width))).shape
    values = cute.make_rmem_tensor(shape, Float32)
    cute.copy(copy, source, values)
    return values


def store_columns(tmem, values: cute.Tensor, column, thread) -> None:
    """Stores a lane's 16-bit values, two to a word."""
    width = cute.size(values) // 2
    copy, target = _copy(tmem, tcgen05.copy.St32x32bOp, column, width, thread)
    shape = copy.partition_S(cute.make_identity_tensor((BLOCK, width))).shape
    words = cute.make_tensor(cute.recast_ptr(values.iterator, dtype=Float32), cute.make_layout(shape))
    cute.copy(copy, words, target)
