"""Tensor maps in the hardware's 128-byte format, as cuTensorMapEncodeTiled makes them."""

import numpy as np

TYPES = {"u8": 0, "u16": 1, "u32": 2, "s32": 3, "u64": 4, "s64": 5, "f16": 6, "f32": 7, "f64": 9, "bf16": 10}
BYTES = {"u8": 1, "u16": 2, "u32": 4, "s32": 4, "u64": 8, "s64": 8, "f16": 2, "f32": 4, "f64": 8, "bf16": 2}
SWIZZLES = {"none": 0, "32B": 1, "64B": 2, "128B": 3}


def encode(address: int, dtype: str, sizes, strides, box, swizzle="none", fill_nan=False) -> np.ndarray:
    """32 words. Sizes, strides (bytes, of dimensions 1 and up) and box are innermost first."""
    rank = len(sizes)
    words = np.zeros(32, np.uint32)
    words[0], words[1] = address & 0xFFFFFFFF, address >> 32
    words[2] = rank - 1 << 4 | TYPES[dtype] << 7 | SWIZZLES[swizzle] << 13 | int(fill_nan) << 15 | 2 << 17
    for d, stride in enumerate(strides):
        assert stride % 16 == 0
        words[3 + d] = stride // 16 & 0xFFFFFFFF
        words[7] |= np.uint32(stride // 16 >> 32 << 4 * d)
    for d in range(rank):
        words[8 + d] = sizes[d] - 1
    words[13] = box[0] - 1 << 24
    for d in range(1, rank):
        words[14] |= np.uint32(box[d] - 1 << 8 * (d - 1))
    return words
