"""Small kernels, their inputs, and the results they must give: one list, run on the software GPU by test_ptx.py and on
a real Hopper part by hopper/record.py."""

import functools
import pathlib

import numpy as np
from emu import elementwise, tensor_maps
from emu import operands as op
from emu.ptx_case import Case, Map
from emu.ptx_tensor_cases import tcgen05, wgmma

PTX = pathlib.Path(__file__).with_name("ptx")


def _file(name: str) -> str:
    return (PTX / f"{name}.ptx").read_text()


def _words(*shape) -> np.ndarray:
    return np.full(shape, 0xDEADBEEF, np.uint32)


# ---- families of per-lane instructions -------------------------------------------------------------------------------

def _elementwise(name: str) -> Case:
    family = elementwise.FAMILIES[name]
    values = elementwise.family_inputs(family)

    def check(results: np.ndarray) -> None:
        wrong = []
        for form, got in zip(family.forms, results, strict=True):
            if form.expected is None:
                continue
            expected = form.expected(values)
            bad = np.flatnonzero(~elementwise.agree(form, got, expected))
            if bad.size:
                i = bad[0]
                operands = ", ".join(f"{n}={int(values[n][i]):#x}" for n in "abcABCxyz")
                wrong.append(f"{form.text}: {bad.size} threads, first {i}: got {int(got[i]):#x}, expected "
                             f"{int(expected[i]):#x} ({operands})")
        assert not wrong, "\n".join(wrong)

    return Case(name, elementwise.kernel(family.forms, family.target),
                {"results": np.zeros((len(family.forms), elementwise.THREADS), np.uint64),
                 "inputs": elementwise.pack(values)}, ("results", "inputs"), {"results": check},
                block=elementwise.THREADS, target=family.target)


# ---- warps, memory, barriers -----------------------------------------------------------------------------------------

def _shuffle() -> Case:
    v = np.random.default_rng(1).integers(-1000, 1000, 64).astype(np.int32)
    out = []
    lanes, halves = np.arange(32), v.reshape(2, 32)

    def per_warp(function):
        out.append(np.concatenate([np.asarray(function(h), np.int64) * np.ones(32, np.int64) for h in halves]))

    def source(index, valid):
        return lambda h: h[np.where(valid, index, lanes)]

    per_warp(lambda h: h[5])
    per_warp(source(lanes - 3, lanes >= 3))
    per_warp(lambda h: lanes >= 3)
    per_warp(source((lanes + 7) % 32, lanes + 7 < 32))
    per_warp(lambda h: lanes + 7 < 32)
    per_warp(lambda h: h[lanes ^ 9])
    per_warp(lambda h: h[lanes // 8 * 8 + 3])
    per_warp(source(np.minimum(lanes + 3, 31), lanes % 8 + 3 < 8))
    per_warp(lambda h: lanes % 8 + 3 < 8)
    per_warp(lambda h: h)
    per_warp(lambda h: 0xAAAAAAAA)
    per_warp(lambda h: 1)
    per_warp(lambda h: 1)
    per_warp(lambda h: lanes == 0)
    per_warp(lambda h: int(h.sum()))
    per_warp(lambda h: int(h.max()))
    per_warp(lambda h: int(np.bitwise_xor.reduce(h)))
    per_warp(lambda h: [sum(1 << j for j in lanes if (h[j] & 3) == (h[i] & 3)) for i in lanes])
    per_warp(lambda h: np.where(lanes % 2, h[7], 0))
    return Case("shuffle", _file("shuffle"), {"results": _words(19, 64), "values": v}, ("results", "values"),
                {"results": np.array(out).astype(np.uint32)}, block=64)


def _divergence() -> Case:
    counts = np.random.default_rng(2).integers(-3, 40, 64).astype(np.int32)
    expected = _words(64)
    for thread, n in enumerate(counts):
        if n < 0:
            continue
        total = 0
        for i in range(n):
            if i % 2:
                total ^= i
                if total > 500:
                    break
            else:
                total += sum(i + j for j in range(i))
        expected[thread] = total
    return Case("divergence", _file("divergence"), {"results": _words(64), "counts": counts}, ("results", "counts"),
                {"results": expected}, block=64)


def _memory() -> Case:
    values = np.random.default_rng(3).integers(0, 2**32, (32, 4), dtype=np.uint32)
    raw, halves = values.view(np.uint8), values.view(np.uint16)
    shorts, signed_bytes = values.view(np.int16), values.view(np.int8)
    out = _words(7, 32, 4)
    out[0] = values[:, ::-1]
    out[1] = values[:, [2, 3, 0, 1]]
    out[2].view(np.uint16)[:, :6] = halves[:, [3, 2, 1, 0, 5, 4]]
    out[3] = np.stack([signed_bytes[:, 3].astype(np.int32), raw[:, 4].astype(np.int32), shorts[:, 3].astype(np.int32),
                       halves[:, 5].astype(np.int32)], 1).view(np.uint32)
    out[4].view(np.uint8)[:, 0] = raw[:, 0]
    out[4].view(np.uint16)[:, 1] = halves[:, 0]
    extra = np.array([0x01020304, 0x11121314, 0x21222324], np.uint32)
    out[4][:, 1:] = extra[[1, 0, 1]]
    other = np.arange(32) ^ 1
    out[5] = np.stack([values[other, 2], values[other, 3], raw[other, 1].astype(np.uint32),
                       shorts[other, 1].astype(np.int32).view(np.uint32)], 1)
    out[6] = values[:, [0, 1, 0, 1]]
    return Case("memory", _file("memory"), {"results": _words(7, 32, 4), "values": values},
                ("results", "values", extra.view(np.uint8)), {"results": out}, shared=512)


def _barrier() -> Case:
    tid = np.arange(128)
    values = np.where(tid < 64, 3 * tid + 1000, 3 * (tid - 64))
    return Case("barrier", _file("barrier"), {"results": _words(128)}, ("results",),
                {"results": values.astype(np.uint32)}, block=128)


def _mbarrier() -> Case:
    expected = np.zeros(64, np.uint32)
    for i in range(8):
        expected[:32] = expected[:32] * 3 + i * 100 + np.arange(32, dtype=np.uint32)
    return Case("mbarrier", _file("mbarrier"), {"results": _words(64)}, ("results",), {"results": expected}, block=64)


def _cluster() -> Case:
    blocks, tid = 4, np.arange(32)
    out = np.zeros((4, blocks, 32), np.int64)
    for block in range(blocks):
        rank = block % 2
        out[0, block], out[1, block] = (1 - rank) * 1000 + tid, rank * 1000 + tid
        out[2, block], out[3, block] = rank * 1000, 20 + rank
    return Case("cluster", _file("cluster"), {"results": _words(4, blocks, 32)}, ("results",),
                {"results": out.astype(np.uint32)}, grid=blocks, cluster=2)


def _atomics() -> Case:
    out = np.zeros(32, np.uint32)
    tid = np.arange(64)
    out[:6] = tid.sum(), 192, 63, 0, 0xFFFFFFFF, 0
    out[6] = np.array([tid.sum()], np.float32).view(np.uint32)[0]
    out[7], out[8], out[10], out[11], out[12] = 64 % 41, tid.sum(), 77, 5, 64
    out[14], out[15] = tid.sum(), 63
    return Case("atomics", _file("atomics"), {"results": np.zeros(32, np.uint32)}, ("results",), {"results": out},
                block=64)


def _matrix() -> Case:
    values = np.random.default_rng(4).integers(0, 2**16, (4, 8, 8), dtype=np.uint16)  # four matrices

    def fragments(matrices):  # thread t holds row t / 4, columns 2 * (t % 4) and the next
        return np.ascontiguousarray(matrices).reshape(len(matrices), 32, 2).view(np.uint32)[..., 0].T  # [32, n]

    plain, transposed = fragments(values), fragments(values.transpose(0, 2, 1))
    out = np.zeros((5, 32, 4), np.uint32)
    out[0], out[2] = plain, transposed
    second = np.ascontiguousarray(values.transpose(0, 2, 1))
    out[1] = second.reshape(32, 8).view(np.uint32)
    out[3] = np.stack([transposed[:, 0], transposed[:, 1], plain[:, 0], plain[:, 1]], 1)
    second = second.copy()
    second[0], second[1] = values[0], values[1].T
    second[2] = values[0]  # stored transposed from the transposed fragment
    out[4] = second.reshape(32, 8).view(np.uint32)
    return Case("matrix", _file("matrix"), {"results": _words(5, 32, 4), "values": values}, ("results", "values"),
                {"results": out})


def _in_place() -> Case:
    sums = np.random.default_rng(6).integers(-9, 9, (32, 2)).astype(np.float32)
    row = np.arange(32, dtype=np.uint32) // 4  # its thread filled it with its number; a matrix has 8
    out = np.concatenate([row[:, None] + np.arange(0, 32, 8, np.uint32), sums.view(np.uint32)], 1)
    return Case("in_place", _file("in_place"), {"results": _words(32, 6), "sums": sums}, ("results", "sums"),
                {"results": out, "sums": sums + np.array([4, 2], np.float32)})


# ---- asynchronous copies ---------------------------------------------------------------------------------------------

def _bulk() -> Case:
    rng = np.random.default_rng(5)
    raw = np.zeros(1024, np.uint8)
    raw[:256] = rng.standard_normal(64).astype(np.float32).view(np.uint8)
    raw[256:512] = rng.standard_normal(128).astype(np.float16).view(np.uint8)
    raw[512:] = rng.integers(0, 256, 512)
    sums = np.zeros_like(raw)
    sums[:256] = rng.standard_normal(64).astype(np.float32).view(np.uint8)
    sums[256:512] = rng.standard_normal(128).astype(np.float16).view(np.uint8)
    sums[512:] = rng.integers(0, 256, 512)
    after = sums.copy()
    after[:256] = (sums[:256].view(np.float32) + raw[:256].view(np.float32)).view(np.uint8)
    after[256:512] = (sums[256:512].view(np.float16) + raw[256:512].view(np.float16)).view(np.uint8)
    after[512:768] = np.minimum(sums[512:768].view(np.int32), raw[512:768].view(np.int32)).view(np.uint8)
    after[768:] = (sums[768:].view(np.uint64) + raw[768:].view(np.uint64)).view(np.uint8)
    second = np.full((32, 16), 0x5A, np.uint8)
    lines = raw[:512].reshape(32, 16)
    for thread in range(32):
        second[thread, :8] = 0
        second[thread, :thread & 7] = lines[thread, :thread & 7]
        second[thread, 8:12] = lines[thread, :4]
    results = np.concatenate([raw[512:], raw, raw[:512], second.reshape(-1)])
    return Case("bulk", _file("bulk"), {"results": np.zeros(2560, np.uint8), "values": raw, "sums": sums},
                ("results", "values", "sums"), {"results": results, "sums": after})


def _swizzled(offset: np.ndarray, swizzle: str) -> np.ndarray:
    return offset ^ (offset >> 7 & {"none": 0, "32B": 1, "64B": 3, "128B": 7}[swizzle]) << 4


TILES = [  # dtype, tensor shape (C order), box (innermost first), swizzle, coordinate (innermost first), fill with NaN
    ("f16", (40, 64), (64, 8), "128B", (0, 8), False), ("bf16", (40, 128), (64, 32), "128B", (96, 24), False),
    ("f16", (40, 96), (32, 16), "64B", (80, -3), True), ("f32", (9, 24), (8, 8), "32B", (-4, 3), False),
    ("f32", (9, 24), (8, 8), "32B", (-4, 3), True), ("bf16", (16, 64), (16, 16), "128B", (48, 4), True),
    ("u8", (5, 6, 32), (16, 3, 2), "none", (-16, 5, 4), False), ("u32", (300,), (64,), "none", (252,), False),
    ("f32", (3, 4, 5, 16), (8, 2, 3, 2), "32B", (12, -1, 3, 2), False), ("f64", (6, 16), (8, 4), "64B", (4, 4), True),
    ("u16", (2, 3, 4, 5, 24), (16, 2, 2, 2, 2), "32B", (16, 4, -1, 2, 1), False),
    ("s32", (8, 8), (4, 8), "none", (4, 5), False), ("u64", (8, 8), (4, 4), "32B", (6, -2), False),
]
NAN = {"f16": 0x7FF7, "bf16": 0x7FF7, "f32": 0x7FF77FF7, "f64": 0x7FF77FF77FF77FF7}


def _cluster_launch() -> Case:
    """Each of 400 work items is done once, by its own CTA or by one that took it over; 148 CTAs are resident."""
    items = 400
    return Case("cluster_launch", _file("cluster_launch"), {"results": np.zeros((items, 32), np.uint32)}, ("results",),
                {"results": np.broadcast_to(np.arange(32, dtype=np.uint32) + 1, (items, 32))}, grid=items,
                shared=120_000, target="sm_100a")


def _tile(dtype, shape, box, swizzle, coordinate, fill_nan, entry="main") -> Case:
    rng = np.random.default_rng(6)
    size = tensor_maps.BYTES[dtype]
    unsigned = np.dtype(f"u{size}")
    tensor = rng.integers(0, 2**min(8 * size, 63), shape).astype(unsigned)
    target = rng.integers(0, 2**min(8 * size, 63), shape).astype(unsigned)
    if entry == "reduce":
        tensor, target = (rng.standard_normal(shape).astype(np.float32).view(unsigned) for _ in range(2))
    outside = NAN.get(dtype, 0) if fill_nan else 0
    # A store may not begin at a negative coordinate (an H200 faults), nor any copy off a multiple of 16 bytes.
    to = [max(0, c) for c in coordinate]
    to[0] -= to[0] % (16 // size)
    tile, after = np.full(box[::-1], outside, unsigned), target.copy()
    for index in np.ndindex(*box[::-1]):
        at = tuple(c + i for c, i in zip(coordinate[::-1], index, strict=True))
        if all(0 <= a < n for a, n in zip(at, shape, strict=True)):
            tile[index] = tensor[at]
    for index in np.ndindex(*box[::-1]):
        at = tuple(c + i for c, i in zip(to[::-1], index, strict=True))
        if all(0 <= a < n for a, n in zip(at, shape, strict=True)):
            if entry == "reduce":
                after[at] = (tile[index].view(np.float32) + target[at].view(np.float32)).view(unsigned)
            else:
                after[at] = tile[index]
    row_bytes = box[0] * size  # a swizzled row takes a whole line of the swizzle
    pitch = {"none": row_bytes, "32B": 32, "64B": 64, "128B": 128}[swizzle]
    where = np.arange(tile.nbytes) // row_bytes * pitch + np.arange(tile.nbytes) % row_bytes
    extent = tile.nbytes // row_bytes * pitch
    results = np.full(extent, 0xA5, np.uint8)
    results[_swizzled(where, swizzle)] = tile.reshape(-1).view(np.uint8)
    sizes, strides = shape[::-1], tensor.strides[-2::-1]
    maps = [Map(name, dtype, sizes, strides, box, swizzle, fill_nan) for name in ("tensor", "target")]
    name = f"tma_{entry}_{dtype}_{len(shape)}d_{swizzle}{'_nan' if fill_nan else ''}_{'_'.join(map(str, coordinate))}"
    coordinates = np.array([*coordinate, 0, 0, 0, 0][:5] + [*to, 0, 0, 0, 0][:5], np.int32).view(np.uint8)
    return Case(name, _file("tma"), {"tensor": tensor, "target": target, "results": np.zeros_like(results)},
                (*maps, "results", np.uint32(tile.nbytes), np.uint32(extent), coordinates),
                {"results": results, "target": after},
                kernel=f"{entry}{len(shape)}", block=64)


@functools.cache
def cases() -> tuple[Case, ...]:
    made = [_elementwise(name) for name in elementwise.FAMILIES]
    made += [_shuffle(), _divergence(), _memory(), _barrier(), _mbarrier(), _cluster(), _atomics(), _matrix(), _bulk()]
    made += [_in_place(), _cluster_launch()]
    made += [_tile(*tile) for tile in TILES]
    made += [_tile("f32", (12, 40), (16, 8), "64B", (32, 7), False, "reduce")]
    made += [wgmma(n, "bf16", "f32", "128B", False, False, 64) for n in (8, 64, 128, 256)]
    made += [wgmma(64, "f16", "f32", swizzle, major, major) for swizzle in op.SPAN for major in (False, True)]
    made += [wgmma(128, "bf16", "f32", swizzle, False, True) for swizzle in ("32B", "64B", "128B")]
    made += [wgmma(64, "f16", "f16", "128B", False, False), wgmma(192, "bf16", "f32", "128B", False, True, 16, True),
             wgmma(80, "f16", "f32", "64B", False, False, 16, True, -1),
             wgmma(64, "bf16", "f32", "128B", False, False, 16, True),
             wgmma(32, "bf16", "f32", "128B", True, True, no_leading=True)]
    made += [wgmma(128, "bf16", "f32", "128B", False, False, depth, values=op.gaussian) for depth in (16, 64)]
    made += [tcgen05(128, 128, 1), tcgen05(128, 64, 1, "64B", True, True), tcgen05(128, 128, 1, "128B", True, True),
             tcgen05(64, 64, 1), tcgen05(64, 64, 1, in_tensor_memory=True), tcgen05(128, 64, 1, in_tensor_memory=True),
             tcgen05(256, 128, 2), tcgen05(256, 128, 2, in_tensor_memory=True), tcgen05(128, 128, 2),
             tcgen05(128, 128, 2, in_tensor_memory=True)]
    # Forms that our backward kernels use and no known-right one does: B with lines of its own width, and more of K in
    # shared memory than a product takes.
    for dtype in ("bf16", "f16"):
        made += [tcgen05(128, 64, 2, major_a=True, major_b=True, swizzle_b="64B", dtype=dtype),
                 tcgen05(256, 64, 2, major_b=True, in_tensor_memory=True, swizzle_b="64B", dtype=dtype)]
    made += [tcgen05(256, 128, 2, dtype="f16"),
             tcgen05(128, 32, 1, major_b=True, in_tensor_memory=True, swizzle_b="64B"),
             tcgen05(128, 256, 2, major_b=True, lines=128), tcgen05(128, 256, 2, major_a=True, major_b=True, lines=128),
             tcgen05(128, 192, 1, major_b=True, in_tensor_memory=True, lines=128),
             tcgen05(128, 192, 1, major_a=True, major_b=True, lines=128),
             tcgen05(128, 256, 1, major_b=True, in_tensor_memory=True),
             tcgen05(128, 256, 1, major_b=True, in_tensor_memory=True, lines=128),
             tcgen05(128, 128, 1, dtype="f16"), tcgen05(128, 64, 1, major_b=True, in_tensor_memory=True, dtype="f16"),
             tcgen05(128, 128, 2, swizzle_b="64B", lines=32), tcgen05(128, 128, 2, major_b=True),
             tcgen05(128, 192, 2, major_b=True, swizzle_b="64B"),
             tcgen05(128, 192, 2, major_a=True, major_b=True, swizzle_b="64B", lines=128),
             tcgen05(128, 256, 2, major_b=True, lines=32)]
    return tuple(made)
