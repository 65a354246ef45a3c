"""Tensor maps, tile copies, bulk reductions."""

import numpy as np
import pytest
from emu import tensor_maps, units

# What CuTe DSL 4.8.1 encodes for a kernel's TMA atoms (address 0x7f0012345000): words 2 to 14, then the meaning.
ENCODED = [
    ("00246312 18 0 0 0 0 bf fff 0 0 0 3f000000 7f", dict(rank=2, type=6, swizzle=3, size=[192, 4096], stride=[2, 384],
                                                         box=[64, 128])),
    ("00244312 18 0 0 0 0 bf fff 0 0 0 1f000000 7f", dict(rank=2, type=6, swizzle=2, size=[192, 4096], stride=[2, 384],
                                                         box=[32, 128])),
    ("00242312 18 0 0 0 0 bf fff 0 0 0 f000000 7f", dict(rank=2, type=6, swizzle=1, size=[192, 4096], stride=[2, 384],
                                                        box=[16, 128])),
    ("00240312 18 0 0 0 0 bf fff 0 0 0 7000000 7f", dict(rank=2, type=6, swizzle=0, size=[192, 4096], stride=[2, 384],
                                                        box=[8, 128])),
    ("00246512 18 0 0 0 0 bf fff 0 0 0 3f000000 7f", dict(rank=2, type=10, swizzle=3, size=[192, 4096],
                                                         stride=[2, 384], box=[64, 128])),
    ("00246392 30 0 0 0 0 bf fff 0 0 0 1f000000 7f", dict(rank=2, type=7, swizzle=3, size=[192, 4096], stride=[4, 768],
                                                         box=[32, 128])),
    ("00246342 a8 18 a8000 348000 0 bf fff 6 4 2 3f000000 1011f",
     dict(rank=5, type=6, swizzle=3, size=[192, 4096, 7, 5, 3], stride=[2, 2688, 384, 11010048, 55050240],
          box=[64, 32, 2, 2, 1])),
    ("00246342 0 0 0 0 1248 bf 3 2 2 2 3f000000 7",
     dict(rank=5, type=6, swizzle=3, size=[192, 4, 3, 3, 3], stride=[2, 2**39, 2**38, 2**37, 2**36],
          box=[64, 8, 1, 1, 1])),
]


@pytest.mark.parametrize(("words", "expected"), ENCODED)
def test_decode(words, expected):
    encoded = np.zeros(32, np.uint32)
    encoded[:2] = 0x12345000, 0x7F00
    encoded[2:15] = [int(w, 16) for w in words.split()]
    fields = units.tensor_map_fields(encoded)
    assert fields["address"] == 0x7F0012345000
    for name, value in expected.items():
        assert fields[name][:len(value)] == value if isinstance(value, list) else fields[name] == value
    assert fields["box"][expected["rank"]:] == [1] * (5 - expected["rank"])


def swizzled(offset: np.ndarray, swizzle: str) -> np.ndarray:
    lines = {"none": 0, "32B": 1, "64B": 3, "128B": 7}[swizzle]
    return offset ^ ((offset >> 7 & lines) << 4)


def box_elements(tensor: np.ndarray, coordinate, box, outside) -> np.ndarray:
    """The box of a C-ordered tensor (coordinate and box innermost first), out-of-bounds elements replaced."""
    out = np.full(box[::-1], outside, tensor.dtype)
    for index in np.ndindex(*out.shape):
        at = [c + i for c, i in zip(coordinate[::-1], index, strict=False)]
        if all(0 <= a < n for a, n in zip(at, tensor.shape, strict=False)):
            out[index] = tensor[tuple(at)]
    return out


CASES = [
    ("f16", (40, 64), (64, 8), "128B", (0, 0)), ("f16", (40, 64), (64, 16), "128B", (8, 32)),
    ("bf16", (40, 96), (32, 8), "64B", (80, -3)), ("f16", (16, 64), (16, 6), "128B", (8, 5)),
    ("f32", (9, 24), (8, 8), "32B", (-4, 3)),
    ("u8", (5, 6, 32), (16, 3, 2), "none", (-16, 5, 4)), ("f32", (3, 4, 5, 16), (8, 2, 3, 2), "32B", (12, -1, 3, 2)),
    ("u16", (2, 3, 4, 5, 24), (16, 2, 2, 2, 2), "32B", (16, 4, -1, 2, 1)), ("f64", (64,), (32,), "none", (48,)),
]
NUMPY = {"u8": np.uint8, "u16": np.uint16, "f16": np.uint16, "bf16": np.uint16, "f32": np.uint32, "f64": np.uint64}


@pytest.mark.parametrize(("dtype", "shape", "box", "swizzle", "coordinate"), CASES)
@pytest.mark.parametrize("fill_nan", [False, True])
def test_tile_load_and_store(dtype, shape, box, swizzle, coordinate, fill_nan):
    rng = np.random.default_rng(1)
    size = tensor_maps.BYTES[dtype]
    tensor = rng.integers(0, 2**min(8 * size, 63), shape).astype(NUMPY[dtype])
    words = tensor_maps.encode(tensor.ctypes.data, dtype, shape[::-1], tensor.strides[-2::-1], box, swizzle, fill_nan)
    shared = np.full(65536, 0xA5, np.uint8)
    start = 2048
    count = units.tile(words, coordinate, start, shared)
    assert count == int(np.prod(box)) * size
    nan = {"f16": 0x7FF7, "bf16": 0x7FF7, "f32": 0x7FF77FF7, "f64": 0x7FF77FF77FF77FF7}
    outside = nan.get(dtype, 0) if fill_nan else 0
    expected = box_elements(tensor, coordinate, box, outside)
    # A swizzled row takes a whole line of the swizzle in shared memory.
    row_bytes = box[0] * size
    pitch = row_bytes if swizzle == "none" else {"32B": 32, "64B": 64, "128B": 128}[swizzle]
    where = swizzled(start + np.arange(count) // row_bytes * pitch + np.arange(count) % row_bytes, swizzle)
    np.testing.assert_array_equal(shared[where].view(NUMPY[dtype]), expected.reshape(-1))
    untouched = np.ones(shared.size, bool)
    untouched[where] = False
    assert (shared[untouched] == 0xA5).all()

    # Back: only elements inside the tensor are written. A store may not begin before it.
    coordinate = tuple(max(0, x) for x in coordinate)
    values = rng.integers(0, 2**min(8 * size, 63), int(np.prod(box))).astype(NUMPY[dtype])
    shared[where] = values.view(np.uint8)
    before = tensor.copy()
    units.tile(words, coordinate, start, shared, store=True)
    for index in np.ndindex(*box[::-1]):
        at = tuple(c + i for c, i in zip(coordinate[::-1], index, strict=False))
        if all(0 <= a < n for a, n in zip(at, shape, strict=False)):
            before[at] = values.reshape(box[::-1])[index]
    np.testing.assert_array_equal(tensor, before)


def test_tile_reduction():
    tensor = np.arange(8 * 32, dtype=np.float32).reshape(8, 32)
    words = tensor_maps.encode(tensor.ctypes.data, "f32", (32, 8), (128,), (32, 4), "128B")
    shared = np.zeros(8192, np.uint8)
    values = np.linspace(-1, 1, 128, dtype=np.float32)
    shared[swizzled(1024 + np.arange(512), "128B")] = values.view(np.uint8)
    expected = tensor.copy()
    expected[6:8] += values.reshape(4, 32)[:2]
    units.tile(words, (0, 6), 1024, shared, store=True, reduction="add")
    np.testing.assert_array_equal(tensor, expected)


def test_refusals():
    tensor, shared = np.zeros((8, 64), np.float16), np.zeros(4096, np.uint8)
    words = tensor_maps.encode(tensor.ctypes.data, "f16", (64, 8), (128,), (64, 8), "128B")
    units.tile(words, (0, 0), 0, shared)
    for change, message in [((2, 1 << 11), "interleaved"), ((13, 1), "element strides"), ((2, 9 << 7), "element type"),
                            ((2, 7 << 4), "rank 8"), ((2, 8), "is this a tensor map"), ((0, 8), "multiple of 16")]:
        damaged = words.copy()
        damaged[change[0]] |= np.uint32(change[1])
        with pytest.raises(units.UnitError, match=message):
            units.tile(damaged, (0, 0), 0, shared)
    with pytest.raises(units.UnitError, match="begin at a multiple of 16 bytes"):
        units.tile(words, (4, 0), 0, shared)
    units.tile(words, (-8, -1), 0, shared)
    with pytest.raises(units.UnitError, match="may not begin before 0"):
        units.tile(words, (0, -1), 0, shared, store=True)
    with pytest.raises(units.UnitError, match="3D instruction with a tensor map of rank 2"):
        units.tile(words, (0, 0, 0), 0, shared)
    with pytest.raises(units.UnitError, match="not a multiple of 128"):
        units.tile(words, (0, 0), 64, shared)
    with pytest.raises(units.UnitError, match="the block has 4096 bytes"):
        units.tile(words, (0, 0), 3584, shared)


@pytest.mark.parametrize(("bulk_type", "dtype", "reduction"), [
    ("f32", np.float32, "add"), ("f64", np.float64, "add"), ("f16", np.float16, "add"), ("f16", np.float16, "max"),
    ("u32", np.uint32, "add"), ("s32", np.int32, "min"), ("u64", np.uint64, "add"), ("b32", np.uint32, "xor"),
    ("b32", np.uint32, "and"), ("b64", np.uint64, "or")])
def test_bulk_reduce(bulk_type, dtype, reduction):
    rng = np.random.default_rng(2)
    if np.issubdtype(dtype, np.floating):
        a, b = (rng.standard_normal(64).astype(dtype) for _ in range(2))
    else:
        a, b = (rng.integers(0, 2**31, 64).astype(dtype) for _ in range(2))
    operation = {"add": np.add, "min": np.minimum, "max": np.maximum, "xor": np.bitwise_xor, "and": np.bitwise_and,
                 "or": np.bitwise_or}[reduction]
    expected = operation(a, b)
    units.bulk_reduce(a, b, reduction, bulk_type)
    np.testing.assert_array_equal(a, expected)


def test_bulk_add_bf16_rounds_to_nearest_even():
    # 1 + 2^-8 is half way between 1 and 1 + 2^-7: to even gives 1. 1 + 3 * 2^-8 is half way too: gives 1 + 2^-6.
    a = np.array([0x3F80, 0x3F80, 0x3F81, 0x7F7F], np.uint16)
    b = np.array([0x3B80, 0x3C40, 0x3B80, 0x7F7F], np.uint16)
    units.bulk_reduce(a, b, "add", "bf16")
    assert [hex(x) for x in a] == ["0x3f80", "0x3f82", "0x3f82", "0x7f80"]


def test_half_conversions_round_like_numpy():
    rng = np.random.default_rng(5)
    a = rng.integers(0, 0x7C00, 4096).astype(np.uint16)
    b = rng.integers(0, 0xFC00, 4096).astype(np.uint16)
    b[(b & 0x7C00) == 0x7C00] = 0
    b[:64] = np.arange(64)  # subnormals
    a[:64] = np.arange(64) * 3
    with np.errstate(over="ignore"):
        expected = (a.view(np.float16).astype(np.float64) + b.view(np.float16)).astype(np.float16)
    units.bulk_reduce(a, b, "add", "f16")
    np.testing.assert_array_equal(a, expected.view(np.uint16))
