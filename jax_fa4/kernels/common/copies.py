"""Views and copies that kernels of all architectures use."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import cpasync, warpgroup


def permuted(tensor: cute.Tensor, *modes: int) -> cute.Tensor:
    """The same memory with its modes in another order."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=list(modes)))


def packed_rows(tensor: cute.Tensor, packed_heads: int) -> cute.Tensor:
    """[B, S, H, D] as (S, D, H, B), or with heads packed into the rows as ((heads, S), D, H / heads, B)."""
    batch, length, heads, dim = tensor.shape
    batch_stride, row_stride, head_stride, dim_stride = tensor.stride
    if packed_heads == 1:
        return permuted(tensor, 1, 3, 2, 0)
    shape = ((packed_heads, length), dim, heads // packed_heads, batch)
    stride = ((head_stride, row_stride), dim_stride, head_stride * packed_heads, batch_stride)
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))


def tma_load_atom(tensor: cute.Tensor, smem_layout, tile: tuple):
    """(atom, coordinate tensor) that loads `tile` of the first two modes; what lies outside the tensor arrives as 0."""
    info = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, smem_layout, tile)
    return info[0], info[1]


def tma_store_atom(tensor: cute.Tensor, smem_layout, tile: tuple):
    """(atom, coordinate tensor) that stores `tile` of the first two modes, but not what lies outside the tensor."""
    info = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), tensor, smem_layout, tile)
    return info[0], info[1]


def tma_partition(atom: cute.CopyAtom, shared: cute.Tensor, tiles: cute.Tensor):
    """(shared, global) views with one mode per copy: mode 0 of both is the tile, the rest stages and tiles."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
    )


def rows_layout(dtype, rows: int, columns: int, stages: int | None = None, panel: int = 64) -> cute.ComposedLayout:
    """(rows, columns[, stages]) with contiguous columns, swizzled, in panels of 64, 32 or 16 columns."""
    kinds = warpgroup.SmemLayoutAtomKind
    atom = warpgroup.make_smem_layout_atom({64: kinds.K_SW128, 32: kinds.K_SW64, 16: kinds.K_SW32}[panel], dtype)
    shape = (rows, columns) if stages is None else (rows, columns, stages)
    return cute.tile_to_shape(atom, shape, order=tuple(range(len(shape))))


def address(tensor: cute.Tensor, *index) -> cute.Pointer:
    """Where an element of a global tensor lies."""
    return tensor.iterator + cute.crd2idx(index, tensor.layout)


def reduce_add(source: cute.Pointer, target: cute.Pointer, size_bytes: int) -> None:
    """Adds float32 in shared memory to global memory, asynchronously, as part of the thread's next bulk group."""
    cute.arch.inline_ptx(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
        read_only_args=[target.toint(), source.toint(), Int32(size_bytes)],
    )


def transpose_quad(words: list[Uint32], lane: Int32) -> list[Uint32]:
    """Transposes a 4x4 matrix of words held by four neighbouring lanes: lane i's word j becomes lane j's word i.

    Two exchange steps with lanes at distance 1 and 2, two shuffles each.
    """
    for distance in (1, 2):
        upper = (lane & distance) != 0
        result = list(words)
        for i in range(4):
            if i & distance:
                continue
            low, high = words[i], words[i | distance]
            sent = Uint32(cutlass.select_(upper, low, high))
            received = cute.arch.shuffle_sync_bfly(sent, offset=distance)
            result[i] = Uint32(cutlass.select_(upper, received, low))
            result[i | distance] = Uint32(cutlass.select_(upper, high, received))
        words = result
    return words


def transpose_matrix(word: Uint32, lane: Int32) -> Uint32:
    """Transposes an 8x8 matrix of 16-bit elements of which lane 4 i + j holds (i, 2 j) and (i, 2 j + 1)."""
    # Lane 4 k + j gets column k of rows 2 j and 2 j + 1: half k % 2 of the words of lanes 8 j + k // 2 and 4 further.
    source = lane % 4 * 8 + lane // 8
    low, high = (Uint32(cute.arch.shuffle_sync(word, source + step)) for step in (0, 4))
    odd = lane // 4 % 2 != 0
    even_word = (low & Uint32(0xFFFF)) | (high << 16)
    odd_word = (low >> 16) | (high & Uint32(0xFFFF0000))
    return Uint32(cutlass.select_(odd, odd_word, even_word))


def store_words(address: Int64, words: list[Uint32], predicate: Boolean) -> None:
    """Stores 1, 2 or 4 words to global memory at a byte address, where `predicate` holds."""
    names = ", ".join(f"{{$r{i + 1}}}" for i in range(len(words)))
    suffix, value = ("", names) if len(words) == 1 else (f".v{len(words)}", "{" + names + "}")
    cute.arch.inline_ptx(
        f"st.global{suffix}.b32 [{{$r0}}], {value};", read_only_args=[address, *words], predicate=predicate
    )


def add_float32(address: Int64, values: list) -> None:
    """Adds two or four float32 values to global memory at a byte address that is a multiple of their size."""
    # Not `cute.arch.inline_ptx`, which copies its arguments to registers that the assembler then keeps apart.
    operands = ", ".join(f"${i + 1}" for i in range(len(values)))
    llvm.inline_asm(
        None, [Int64(address).ir_value(), *(Float32(value).ir_value() for value in values)],
        f"red.relaxed.gpu.global.add.v{len(values)}.f32 [$0], {{{operands}}};", ",".join(["l"] + ["f"] * len(values)),
        has_side_effects=True,
    )  # fmt: skip
