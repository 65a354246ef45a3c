"""WGMMA: every operand layout, against exact integer products."""

import numpy as np
import pytest
from emu import operands as op
from emu import units


def accumulators(d: np.ndarray, n: int) -> np.ndarray:
    """[4 warps, registers, 32 lanes] float32 to [64, n], by the fragment figure of the PTX manual."""
    out = np.empty((64, n), np.float32)
    for warp in range(4):
        for i in range(n // 2):
            for lane in range(32):
                out[16 * warp + lane // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + lane % 4 * 2 + i % 2] = d[warp, i, lane]
    return out


def register_operand(bits: np.ndarray) -> np.ndarray:
    """A [64, 16] to registers [4 warps, 4, 32 lanes]."""
    out = np.zeros((4, 4, 32), np.uint32)
    for warp in range(4):
        for reg in range(4):
            for lane in range(32):
                row, k = 16 * warp + lane // 4 + 8 * (reg % 2), 8 * (reg // 2) + lane % 4 * 2
                out[warp, reg, lane] = int(bits[row, k]) | int(bits[row, k + 1]) << 16
    return out


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("swizzle", ["none", "32B", "64B", "128B"])
@pytest.mark.parametrize(("major_a", "major_b"), [(False, False), (True, True)])
@pytest.mark.parametrize("n", [8, 64, 136, 256])
def test_shared_operands(dtype, swizzle, major_a, major_b, n):
    rng = np.random.default_rng(n)
    depth = 64
    # MN-major operands are whole swizzle lines wide.
    columns = n if not major_b else -(-n // 64) * 64
    a, b = op.integers(rng, (64, depth)), op.integers(rng, (columns, depth))
    shared = np.zeros(1 << 17, np.uint8)
    start_a, start_b = 1024, 65536
    layout_a = op.place(shared, start_a, op.to_bits(a, dtype), swizzle, major_a)
    layout_b = op.place(shared, start_b, op.to_bits(b, dtype), swizzle, major_b)
    d = np.full((4, n // 2, 32), 0x7FC00000, np.uint32)
    for k in range(0, depth, 16):
        units.wgmma(shared, d, n=n, dtype=dtype, transpose_a=major_a, transpose_b=major_b, accumulate=k > 0,
                    a=op.wgmma_descriptor(start_a + op.k_step(64, swizzle, major_a, k), *layout_a, swizzle),
                    b=op.wgmma_descriptor(start_b + op.k_step(columns, swizzle, major_b, k), *layout_b, swizzle))
    np.testing.assert_array_equal(accumulators(d.view(np.float32), n), a @ b[:n].T)


@pytest.mark.parametrize(("scale_a", "scale_b"), [(1, 1), (-1, 1), (1, -1)])
def test_a_in_registers_and_scales(scale_a, scale_b):
    rng = np.random.default_rng(3)
    a, b, old = op.integers(rng, (64, 16)), op.integers(rng, (32, 16)), op.integers(rng, (4, 16, 32))
    shared = np.zeros(8192, np.uint8)
    layout = op.place(shared, 1024, op.to_bits(b, "bf16"), "32B", False)
    d = old.view(np.uint32).copy()
    units.wgmma(shared, d, n=32, a=register_operand(op.to_bits(a, "bf16")), accumulate=True, scale_a=scale_a,
                scale_b=scale_b, b=op.wgmma_descriptor(1024, *layout, "32B"))
    expected = scale_a * scale_b * (a @ b.T) + accumulators(old, 32)
    np.testing.assert_array_equal(accumulators(d.view(np.float32), 32), expected)


def test_half_precision_accumulators():
    rng = np.random.default_rng(4)
    a, b = op.integers(rng, (64, 16)), op.integers(rng, (16, 16))
    shared = np.zeros(8192, np.uint8)
    layout = op.place(shared, 1024, op.to_bits(b, "f16"), "32B", False)
    d = np.full((4, 4, 32), 0x3C003C00, np.uint32)  # ones
    units.wgmma(shared, d, n=16, a=register_operand(op.to_bits(a, "f16")), accumulate=True, d_type="f16", dtype="f16",
                b=op.wgmma_descriptor(1024, *layout, "32B"))
    halves = d[:, :, :, None].copy().view(np.float16)  # [4, 4, 32, 2]
    elements = halves.transpose(0, 1, 3, 2).reshape(4, 8, 32).astype(np.float32)
    np.testing.assert_array_equal(accumulators(elements, 16), (a @ b.T + 1).astype(np.float16).astype(np.float32))


def test_refusals():
    shared, d = np.zeros(4096, np.uint8), np.zeros((4, 4, 32), np.uint32)
    with pytest.raises(units.UnitError, match="base offset 3"):
        units.wgmma(shared, d, n=8, a=op.wgmma_descriptor(1024, 16, 1024, "128B") | 3 << 49, b=0)
    with pytest.raises(units.UnitError, match="the block has 4096 bytes"):
        units.wgmma(shared, d, n=8, a=op.wgmma_descriptor(3072, 16, 1024, "128B"), b=0)
    with pytest.raises(units.UnitError, match="n = 12"):
        units.wgmma(shared, d, n=12, a=0, b=0)
    with pytest.raises(units.UnitError, match="only f16 and bf16"):
        units.wgmma(shared, d, n=8, d_type="f16", dtype="bf16", a=0, b=0)
