"""Floating-point results in numpy, rounded as the instructions round them."""

import numpy as np


def f32(bits):
    return bits.view(np.float32)


def flush(x):
    """Subnormals to zero of the same sign."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x).astype(np.float32)


def rounded_sum(a: np.ndarray, b: np.ndarray, direction: int) -> np.ndarray:
    """a + b in float32, towards -infinity (-1), +infinity (1) or zero (0)."""
    with np.errstate(all="ignore"):
        near = a + b
        big, small = np.where(np.abs(a) >= np.abs(b), a, b), np.where(np.abs(a) >= np.abs(b), b, a)
        error = small - (near - big)  # exact: the sum is near + error
        towards = np.where(near > 0, -1, 1) if direction == 0 else np.full(near.shape, direction)
        wrong = np.where(towards < 0, error < 0, error > 0)
        moved = np.nextafter(near, (towards * np.inf).astype(np.float32))
        return np.where(wrong & np.isfinite(near), moved, near).astype(np.float32)


def exact_fma(a, b, c):
    """Correct for the inputs used here: products are exact in float64, sums are rounded to odd first."""
    product = a.astype(np.float64) * b
    total = product + c
    with np.errstate(all="ignore"):
        lost = np.where(np.abs(product) >= np.abs(c), (product - total) + c, (c - total) + product)
    bits = total.view(np.int64)
    away = np.where((lost > 0) == (total > 0), 1, -1)
    odd = np.where((lost != 0) & np.isfinite(lost) & (bits & 1 == 0), bits + away, bits)
    return odd.view(np.float64).astype(np.float32)


def maximum(a, b):
    equal = np.where(np.signbit(a), b, a)  # +0 above -0
    return np.where(a == b, equal, np.fmax(a, b))


def minimum(a, b):
    return -maximum(-a, -b)


def bf16_bits(x: np.ndarray) -> np.ndarray:
    bits = x.astype(np.float32).view(np.uint32)
    out = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, out & 0xFFFF).astype(np.uint64)


def relu_bf16(x: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(x), 0x7FFF, bf16_bits(np.where(x > 0, x, 0))).astype(np.uint64)


def f16_bits(x: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.where(np.isnan(x), 0x7FFF, x.astype(np.float16).view(np.uint16)).astype(np.uint64)


def bf16_value(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def saturated(x: np.ndarray, is_signed: bool) -> np.ndarray:
    """Integral float32 to a 32-bit integer; NaN gives 0."""
    low, high = (-(2**31), 2**31 - 1) if is_signed else (0, 2**32 - 1)
    whole = np.where(np.isnan(x), 0, np.clip(x.astype(np.float64), low, high)).astype(np.int64)
    return whole.astype(np.uint64) & np.uint64(0xFFFFFFFF)
