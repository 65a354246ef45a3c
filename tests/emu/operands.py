"""Matrices laid out in shared memory as tensor cores read them, written the way a TMA load leaves them: an independent
statement of the layouts that the software GPU's descriptors decode."""

import numpy as np

SPAN = {"none": 16, "32B": 32, "64B": 64, "128B": 128}
WGMMA_MODE = {"none": 0, "128B": 1, "64B": 2, "32B": 3}
TCGEN05_MODE = {"none": 0, "128B": 2, "64B": 4, "32B": 6}


def to_bits(x: np.ndarray, dtype: str) -> np.ndarray:
    """Float array to 16-bit patterns (bfloat16 by truncation: give values that it holds)."""
    if dtype == "f16":
        return x.astype(np.float16).view(np.uint16)
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_bits(x: np.ndarray, dtype: str) -> np.ndarray:
    return x.view(np.float16).astype(np.float32) if dtype == "f16" else (x.astype(np.uint32) << 16).view(np.float32)


def place(shared: np.ndarray, start: int, matrix: np.ndarray, swizzle: str, mn_major: bool) -> tuple[int, int]:
    """Write 16-bit `matrix` [rows, k] at byte `start` (a multiple of 1024) of `shared`; gives (leading, stride) bytes.

    The matrix is cut into tiles whose contiguous side spans one swizzle line; K-major tiles follow one another along K,
    MN-major ones along the rows. Without swizzle the tiles are 16 bytes wide.
    """
    lines = matrix.T if mn_major else matrix  # [line, contiguous]
    width = SPAN[swizzle] // 2
    count, length = lines.shape
    tile_bytes = count * SPAN[swizzle]
    chunks = SPAN[swizzle] // 16
    data = np.ascontiguousarray(lines).view(np.uint8).reshape(count, length // width, chunks, 16)
    line, index, chunk = np.meshgrid(range(count), range(length // width), range(chunks), indexing="ij")
    # 128B: every line of 128 bytes has its own permutation; 64B: every second line; 32B: every fourth.
    moved = chunk ^ (line % 8 * SPAN[swizzle] // 128 if swizzle != "none" else 0)
    target = start + index * tile_bytes + line * SPAN[swizzle] + moved * 16
    shared[target[..., None] + np.arange(16)] = data
    eight_lines = 8 * SPAN[swizzle]
    if swizzle == "none":  # the two offsets trade places with the major-ness
        return (eight_lines, tile_bytes) if mn_major else (tile_bytes, eight_lines)
    return (tile_bytes, eight_lines) if mn_major else (16, eight_lines)


def k_step(matrix_rows: int, swizzle: str, mn_major: bool, k: int) -> int:
    """Bytes from the start of an operand to the part that begins at `k` (a multiple of 16), as kernels advance it."""
    if mn_major:
        return k * SPAN[swizzle]
    per_tile = SPAN[swizzle] // 2
    return k // per_tile * matrix_rows * SPAN[swizzle] + k % per_tile * 2


def wgmma_descriptor(start: int, leading: int, stride: int, swizzle: str) -> int:
    return start >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | WGMMA_MODE[swizzle] << 62


def tcgen05_descriptor(start: int, leading: int, stride: int, swizzle: str) -> int:
    return start >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | 1 << 46 | TCGEN05_MODE[swizzle] << 61


def instruction_descriptor(m: int, n: int, dtype="bf16", transpose_a=False, transpose_b=False, negate_a=False,
                           negate_b=False, d_f32=True) -> int:
    kind = int(dtype == "bf16")
    return (int(d_f32) << 4 | kind << 7 | kind << 10 | int(negate_a) << 13 | int(negate_b) << 14
            | int(transpose_a) << 15 | int(transpose_b) << 16 | n >> 3 << 17 | m >> 4 << 24)


def gaussian(rng: np.random.Generator, shape) -> np.ndarray:
    """Normal values that bfloat16 holds."""
    return from_bits(to_bits(rng.standard_normal(shape), "bf16"), "bf16")


def integers(rng: np.random.Generator, shape) -> np.ndarray:
    """Small integers: every product and sum is exact in float32, so results are compared bit by bit."""
    return rng.integers(-8, 9, shape).astype(np.float32)
