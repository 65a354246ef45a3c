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


def load_columns(tmem, column, width: int, warp) -> cute.Tensor:
    """A lane's `width` float32 words, a multiple of 16; `warp` is that of the thread, in its block.

    Load and wait are one statement: apart, the compiler may put uses of the words between them.
    """
    at_once = 16 if width % 32 else 32
    loads = []
    for first in range(0, width, at_once):
        words = ", ".join(f"{{$w{first + i}}}" for i in range(at_once))
        loads.append(f"tcgen05.ld.sync.aligned.32x32b.x{at_once}.b32 {{{words}}}, [{{$r0}} + {first}];")
    address = tmem.toint() + column + warp % 4 * (32 * _LANE)
    loaded = cute.arch.inline_ptx(
        "\n".join((*loads, "tcgen05.wait::ld.sync.aligned;")),
        write_only_types=[Float32] * width, read_only_args=[Int32(address)],
    )  # fmt: skip
    values = cute.make_rmem_tensor((width,), Float32)
    for i, value in enumerate(loaded):
        values[i] = value
    return values


def store_columns(tmem, values: cute.Tensor, column, thread) -> None:
    """Stores a lane's 16-bit values, two to a word; `thread` is that of its warpgroup."""
    width = cute.size(values) // 2
    tensor = cute.make_tensor(tmem + column, cute.make_layout((BLOCK, width), stride=(_LANE, 1)))
    atom = cute.make_copy_atom(tcgen05.copy.St32x32bOp(tcgen05.copy.Repetition(width)), Float32)
    copy = tcgen05.make_tmem_copy(atom, tensor).get_slice(thread)
    shape = copy.partition_S(cute.make_identity_tensor((BLOCK, width))).shape
    words = cute.make_tensor(cute.recast_ptr(values.iterator, dtype=Float32), cute.make_layout(shape))
    cute.copy(copy, words, copy.partition_D(tensor))
