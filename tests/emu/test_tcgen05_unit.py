"""tcgen05: tensor memory, its load and store shapes, MMA in every layout, against exact integer products."""

import numpy as np
import pytest
from emu import operands as op
from emu import units

# ---- allocation ------------------------------------------------------------------------------------------------------

def test_allocation():
    tensor = units.TensorMemory()
    assert [tensor.allocate(n) for n in (128, 256, 128)] == [0, 128, 384]
    assert tensor.allocate(32) is None  # full: the instruction would wait
    tensor.release(128, 256)
    assert tensor.allocate(64) == 128
    assert tensor.allocated() == 320
    with pytest.raises(units.UnitError, match="not allocated"):
        tensor.release(128, 256)  # another size
    tensor.release(0, 128)
    with pytest.raises(units.UnitError, match="already freed"):
        tensor.release(0, 128)
    with pytest.raises(units.UnitError, match="48 columns"):
        tensor.allocate(48)
    tensor.relinquish()
    with pytest.raises(units.UnitError, match="relinquish"):
        tensor.allocate(32)


def test_fresh_columns_hold_no_value():
    tensor = units.TensorMemory(64)
    assert not tensor.written(0, 0, 1)
    tensor.store("32x32b", 1, 0, 5, np.zeros((1, 32)))
    assert tensor.written(31, 5, 1) and not tensor.written(0, 4, 2) and not tensor.written(32, 5, 1)
    tensor.release(0, 64)
    tensor.allocate(64)
    assert not tensor.written(31, 5, 1)
    with pytest.raises(units.UnitError, match="nothing was ever written"):
        tensor.load("32x32b", 1, 0, 5)
    tensor.store("32x32b", 1, 0, 5, np.zeros((1, 32)))
    with pytest.raises(units.UnitError, match="some of them were never written"):
        tensor.load("32x32b", 2, 0, 5)
    assert tensor.cells()[0, 6] == 0x7FBADBAD


# ---- load and store shapes -------------------------------------------------------------------------------------------

def position(shape: str, thread: int, reg: int) -> tuple[int, int]:
    """(lane, column) of a register: the manual's fragment figures, written as bit fields of thread and register."""
    t = [(thread >> i) & 1 for i in range(5)]
    r = [(reg >> i) & 1 for i in range(8)]
    if shape == "32x32b":
        return thread, reg
    if shape == "16x64b":
        return t[2] + 2 * t[3] + 4 * t[4] + 8 * t[0], t[1] + 2 * reg
    if shape == "16x128b":
        return t[2] + 2 * t[3] + 4 * t[4] + 8 * r[0], t[0] + 2 * t[1] + 4 * (reg >> 1)
    if shape == "16x256b":
        return t[2] + 2 * t[3] + 4 * t[4] + 8 * r[1], r[0] + 2 * t[0] + 4 * t[1] + 8 * (reg >> 2)
    return thread & 15, reg  # 16x32bx2, before the split


@pytest.mark.parametrize("warp", [0, 3])
@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize(("shape", "repeat"), [("32x32b", 1), ("32x32b", 32), ("32x32b", 128), ("16x64b", 1),
                                               ("16x64b", 16), ("16x128b", 8), ("16x256b", 1), ("16x256b", 16),
                                               ("16x32bx2", 4)])
def test_load_store(shape, repeat, pack, warp):
    rng = np.random.default_rng(repeat)
    cells = rng.integers(0, 2**32, (128, 512), dtype=np.uint32)
    if pack and repeat == 128:
        repeat = 64
    column, lane = 8, 32 * warp + (16 if shape != "32x32b" and warp else 0)
    split = 100 if shape == "16x32bx2" else 0
    tensor = units.TensorMemory(512)
    tensor.set_cells(cells)
    loaded = tensor.load(shape, repeat, warp, lane << 16 | column, pack, split)
    expected, after = np.empty_like(loaded), cells.copy()
    values = rng.integers(0, 2**32, loaded.shape, dtype=np.uint32)
    for reg in range(loaded.shape[0]):
        for thread in range(32):
            row, offset = position(shape, thread, reg)
            first = column + offset * (2 if pack else 1) + (split if thread >= 16 else 0)
            if pack:
                low, high = (int(x) & 0xFFFF for x in cells[lane + row, first:first + 2])
                expected[reg, thread] = low | high << 16
                after[lane + row, first:first + 2] = values[reg, thread] & 0xFFFF, values[reg, thread] >> 16
            else:
                expected[reg, thread] = cells[lane + row, first]
                after[lane + row, first] = values[reg, thread]
    np.testing.assert_array_equal(loaded, expected)
    tensor.store(shape, repeat, warp, lane << 16 | column, values, pack, split)
    np.testing.assert_array_equal(tensor.cells(), after)


def test_lane_and_column_limits():
    tensor = units.TensorMemory(128)
    with pytest.raises(units.UnitError, match="it may touch lanes 32-63"):
        tensor.load("32x32b", 1, 1, 0)
    with pytest.raises(units.UnitError, match="not all allocated"):
        tensor.load("32x32b", 32, 0, 112)
    with pytest.raises(units.UnitError, match="128 lanes and 512 columns"):
        tensor.load("32x32b", 32, 0, 500)


# ---- MMA -------------------------------------------------------------------------------------------------------------

def run_mma(m, n, group, *, dtype="bf16", swizzle="128B", major_a=False, major_b=False, negate_a=False, depth=64,
            lane=0, a_in_tensor_memory=False, disable=(), old=None):
    """D of both CTAs ([128, 512] each) after A [m, depth] times B [n, depth]; and the operands."""
    rng = np.random.default_rng(m + n)
    a, b = op.integers(rng, (m, depth)), op.integers(rng, (n, depth))
    tensors = [units.TensorMemory(512) for _ in range(group)]
    shared = [np.zeros(1 << 17, np.uint8) for _ in range(group)]
    rows, columns = m // group, n // group
    d_column, a_column = 16, 400
    for rank in range(group):
        my_a = op.to_bits(a[rank * rows:(rank + 1) * rows], dtype)
        layout_a = op.place(shared[rank], 1024, my_a, swizzle, major_a)
        layout_b = op.place(shared[rank], 65536, op.to_bits(b[rank * columns:(rank + 1) * columns], dtype), swizzle,
                            major_b)
        if old is not None:
            tensors[rank].set_cells(old.view(np.uint32))
        if a_in_tensor_memory:
            cells = np.full((128, 512), 0x7FC00000, np.uint32) if old is None else old.view(np.uint32).copy()
            pairs = my_a.copy().view(np.uint32)  # [rows, depth / 2]
            if rows == 64 and group == 1:
                for i in range(4):
                    cells[lane + 32 * i:lane + 32 * i + 16, a_column:a_column + depth // 2] = pairs[16 * i:16 * i + 16]
            else:  # with 64 rows a CTA, the upper lanes hold them once more
                cells[:, a_column:a_column + depth // 2] = np.concatenate([pairs] * (128 // rows))
            tensors[rank].set_cells(cells)
    for k in range(0, depth, 16):
        address = lane << 16 | a_column + k // 2
        descriptor = op.tcgen05_descriptor(1024 + op.k_step(rows, swizzle, major_a, k), *layout_a, swizzle)
        units.mma(shared, tensors, d=lane << 16 | d_column, accumulate=k > 0 or old is not None, disable=disable,
                  instruction=op.instruction_descriptor(m, n, dtype, major_a, major_b, negate_a),
                  a=address if a_in_tensor_memory else descriptor, a_in_tensor_memory=a_in_tensor_memory,
                  b=op.tcgen05_descriptor(65536 + op.k_step(columns, swizzle, major_b, k), *layout_b, swizzle))
    return a, b, [t.cells().view(np.float32)[:, d_column:] for t in tensors]


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("swizzle", ["none", "32B", "64B", "128B"])
@pytest.mark.parametrize(("major_a", "major_b"), [(False, False), (True, False), (False, True)])
def test_mma_layouts(dtype, swizzle, major_a, major_b):
    a, b, (d,) = run_mma(128, 128, 1, dtype=dtype, swizzle=swizzle, major_a=major_a, major_b=major_b)
    np.testing.assert_array_equal(d[:, :128], a @ b.T)


@pytest.mark.parametrize("n", [16, 64, 208, 256])
@pytest.mark.parametrize("from_tensor_memory", [False, True])
def test_mma_m128(n, from_tensor_memory):
    a, b, (d,) = run_mma(128, n, 1, a_in_tensor_memory=from_tensor_memory)
    np.testing.assert_array_equal(d[:, :n], a @ b.T)


@pytest.mark.parametrize("lane", [0, 16])
@pytest.mark.parametrize("from_tensor_memory", [False, True])
def test_mma_m64_uses_half_the_lanes(lane, from_tensor_memory):
    a, b, (d,) = run_mma(64, 72, 1, lane=lane, a_in_tensor_memory=from_tensor_memory)
    lanes = [lane + row // 16 * 32 + row % 16 for row in range(64)]
    np.testing.assert_array_equal(d[lanes, :72], a @ b.T)


@pytest.mark.parametrize("from_tensor_memory", [False, True])
def test_mma_pair_m256(from_tensor_memory):
    a, b, d = run_mma(256, 128, 2, a_in_tensor_memory=from_tensor_memory)
    np.testing.assert_array_equal(np.concatenate([d[0][:, :128], d[1][:, :128]]), a @ b.T)


@pytest.mark.parametrize("from_tensor_memory", [False, True])
def test_mma_pair_m128_splits_columns_over_lanes(from_tensor_memory):
    a, b, d = run_mma(128, 64, 2, a_in_tensor_memory=from_tensor_memory)
    expected = a @ b.T
    for rank in range(2):
        mine = expected[64 * rank:64 * rank + 64]
        np.testing.assert_array_equal(d[rank][:64, :32], mine[:, :32])
        np.testing.assert_array_equal(d[rank][64:, :32], mine[:, 32:])


def test_mma_negates_accumulates_and_leaves_disabled_lanes():
    old = op.integers(np.random.default_rng(0), (128, 512))
    a, b, (d,) = run_mma(128, 64, 1, negate_a=True, old=old, disable=(0xFFFF0000, 0, 5, 0))
    expected = old[:, 16:80] - a @ b.T
    disabled = [*range(16, 32), 64, 66]
    expected[disabled] = old[disabled, 16:80]
    np.testing.assert_array_equal(d[:, :64], expected)
    np.testing.assert_array_equal(d[:, 64:], old[:, 80:])


def test_mma_refusals():
    tensor, shared = [units.TensorMemory(64)], [np.zeros(1 << 16, np.uint8)]
    descriptor = op.tcgen05_descriptor(1024, 16, 1024, "128B")

    def issue(**changes):
        units.mma(shared, tensor, **{"a": descriptor, "b": descriptor, "d": 0,
                                     "instruction": op.instruction_descriptor(128, 64), **changes})

    issue()
    with pytest.raises(units.UnitError, match="M=128 N=24"):
        issue(instruction=op.instruction_descriptor(128, 24))
    with pytest.raises(units.UnitError, match="not all allocated"):
        issue(instruction=op.instruction_descriptor(128, 128))
    with pytest.raises(units.UnitError, match="begins at lane 16"):
        issue(d=16 << 16)
    with pytest.raises(units.UnitError, match="bits 46-48"):
        issue(a=op.wgmma_descriptor(1024, 16, 1024, "128B"))
    tensor[0].release(0, 64)
    tensor[0].allocate(64)
    with pytest.raises(units.UnitError, match="A is read from tensor memory lane 0"):
        issue(a=0, a_in_tensor_memory=True)
    with pytest.raises(units.UnitError, match="accumulates onto lane 0"):
        issue(accumulate=True)
    with pytest.raises(units.UnitError, match="sparse"):
        issue(instruction=op.instruction_descriptor(128, 64) | 4)
    with pytest.raises(units.UnitError, match="the block has 65536 bytes"):
        issue(b=op.tcgen05_descriptor(65536 - 1024, 16, 1024, "128B"))


# ---- copy from shared memory -----------------------------------------------------------------------------------------

@pytest.mark.parametrize(("shape", "multicast", "rows", "chunks", "source"), [
    (0, 0, 128, 2, lambda lane: lane), (2, 0, 128, 1, lambda lane: lane),
    (3, 1, 64, 1, lambda lane: lane % 64), (3, 2, 64, 1, lambda lane: lane // 64 * 32 + lane % 32),
    (4, 3, 32, 1, lambda lane: lane % 32)])
def test_copy_to_tensor_memory(shape, multicast, rows, chunks, source):
    words = np.random.default_rng(shape).integers(0, 2**16, (rows, 8 * chunks), dtype=np.uint16)
    shared = np.zeros(16384, np.uint8)
    layout = op.place(shared, 1024, words, "none", False)
    tensor = units.TensorMemory(64)
    units.copy_to_tensor_memory(tensor, shape, multicast, 32, op.tcgen05_descriptor(1024, *layout, "none"), shared)
    expected = words.view(np.uint32)[[source(lane) for lane in range(128)]]
    np.testing.assert_array_equal(tensor.cells()[:, 32:32 + 4 * chunks], expected)
    assert not tensor.written(0, 31, 1) and tensor.written(127, 32, 4 * chunks)
