"""The software GPU's functional units alone, built from their sources for the tests, and called with numpy arrays."""

import ctypes as c
import functools
import hashlib
import pathlib
import shutil
import subprocess
import tempfile

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
EMU = ROOT / "ffi" / "emu"


class UnitError(RuntimeError):
    """The message of emu::Error."""


@functools.cache
def library() -> c.CDLL:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++20 compiler")
    shim = pathlib.Path(__file__).with_name("units_shim.cc")
    sources = [shim, EMU / "core/memory.cc", *sorted(EMU.glob("tensor/*.cc")), *sorted(EMU.glob("mem/*.cc"))]
    headers = [*EMU.glob("core/*.h"), *EMU.glob("tensor/*.h"), *EMU.glob("mem/*.h")]
    digest = hashlib.sha256(b"".join(p.read_bytes() for p in [*sources, *sorted(headers)])).hexdigest()[:16]
    target = pathlib.Path(tempfile.gettempdir()) / f"jax_fa4_emu_units_{digest}.so"
    if not target.exists():
        command = [compiler, "-std=c++20", "-O2", "-fPIC", "-shared", "-Wno-psabi", f"-I{EMU}", *map(str, sources)]
        subprocess.run([*command, "-o", str(target) + ".part"], check=True)
        pathlib.Path(str(target) + ".part").rename(target)
    loaded = c.CDLL(str(target))
    for name in ("allocate", "release", "access"):
        getattr(loaded, f"unit_tmem_{name}").restype = c.c_char_p
    for name in ("mma", "cp", "wgmma", "tile", "bulk_reduce", "tensor_map"):
        getattr(loaded, f"unit_{name}").restype = c.c_char_p
    loaded.unit_tmem_new.restype = c.c_void_p
    return loaded


def call(name: str, *arguments) -> None:
    message = getattr(library(), f"unit_{name}")(*arguments)
    if message:
        raise UnitError(message.decode())


def pointer(array: np.ndarray) -> c.c_void_p:
    assert array.flags.c_contiguous
    return c.c_void_p(array.ctypes.data)


SHAPES = {"32x32b": 0, "16x64b": 1, "16x128b": 2, "16x256b": 3, "16x32bx2": 4}
REGISTERS = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}


class TensorMemory:
    """128 x 512 cells of 32 bits."""

    def __init__(self, allocate: int = 0):
        self.handle = c.c_void_p(library().unit_tmem_new())
        if allocate:
            self.allocate(allocate)

    def __del__(self):
        library().unit_tmem_delete(self.handle)

    def allocate(self, columns: int) -> int | None:
        address, done = c.c_uint32(), c.c_int()
        call("tmem_allocate", self.handle, c.c_uint32(columns), c.byref(address), c.byref(done))
        return address.value if done.value else None

    def release(self, address: int, columns: int) -> None:
        call("tmem_release", self.handle, c.c_uint32(address), c.c_uint32(columns))

    def relinquish(self) -> None:
        library().unit_tmem_relinquish(self.handle)

    def allocated(self) -> int:
        return library().unit_tmem_allocated(self.handle)

    def cells(self) -> np.ndarray:
        out = np.empty((128, 512), np.uint32)
        library().unit_tmem_read(self.handle, pointer(out))
        return out

    def set_cells(self, cells: np.ndarray, mark: bool = True) -> None:
        library().unit_tmem_write(self.handle, pointer(np.ascontiguousarray(cells, np.uint32)), int(mark))

    def written(self, lane: int, column: int, columns: int) -> bool:
        return bool(library().unit_tmem_written(self.handle, lane, column, columns))

    def _access(self, store, shape, repeat, warp, address, registers, pack, split):
        call("tmem_access", self.handle, int(store), SHAPES[shape], repeat, int(pack), split, warp,
             c.c_uint32(address), pointer(registers))

    def load(self, shape: str, repeat: int, warp: int, address: int, pack=False, split=0) -> np.ndarray:
        """Registers [register, thread]."""
        registers = np.zeros((REGISTERS[shape] * repeat, 32), np.uint32)
        self._access(False, shape, repeat, warp, address, registers, pack, split)
        return registers

    def store(self, shape: str, repeat: int, warp: int, address: int, registers, pack=False, split=0) -> None:
        self._access(True, shape, repeat, warp, address, np.ascontiguousarray(registers, np.uint32), pack, split)


class _Mma(c.Structure):
    _fields_ = [("cta_group", c.c_uint32), ("a_in_tensor_memory", c.c_uint32), ("accumulate", c.c_uint32),
                ("instruction_descriptor", c.c_uint32), ("a", c.c_uint64), ("b", c.c_uint64), ("d", c.c_uint32),
                ("disable_output_lane", c.c_uint32 * 8), ("shared_bytes", c.c_uint32), ("shared", c.c_void_p * 2),
                ("tensor", c.c_void_p * 2)]


def mma(shared: list[np.ndarray], tensor: list[TensorMemory], *, instruction: int, a: int, b: int, d: int,
        a_in_tensor_memory: bool = False, accumulate: bool = False, disable: tuple = ()) -> None:
    unit = _Mma(len(tensor), a_in_tensor_memory, accumulate, instruction, a, b, d, (c.c_uint32 * 8)(*disable),
                shared[0].nbytes, (c.c_void_p * 2)(*[s.ctypes.data for s in shared]),
                (c.c_void_p * 2)(*[t.handle.value for t in tensor]))
    call("mma", c.byref(unit), 0)


class _Wgmma(c.Structure):
    _fields_ = [(n, c.c_uint32) for n in ("n", "d_type", "type", "transpose_a", "transpose_b", "a_in_registers",
                                          "accumulate")]
    _fields_ += [("scale_a", c.c_int32), ("scale_b", c.c_int32), ("a_descriptor", c.c_uint64),
                 ("b_descriptor", c.c_uint64), ("d", c.c_void_p), ("a", c.c_void_p), ("shared", c.c_void_p),
                 ("shared_bytes", c.c_uint32)]


ELEMENT = {"f16": 0, "bf16": 1, "f32": 7}


def wgmma(shared: np.ndarray, d: np.ndarray, *, n: int, d_type="f32", dtype="bf16", a: int | np.ndarray, b: int,
          transpose_a=False, transpose_b=False, scale_a=1, scale_b=1, accumulate=False) -> None:
    """d [4 warps, registers, 32 lanes] uint32 is updated; `a` is a descriptor or registers [4, 4, 32]."""
    in_registers = isinstance(a, np.ndarray)
    registers = a if in_registers else np.zeros((4, 4, 32), np.uint32)
    unit = _Wgmma(n, ELEMENT[d_type], ELEMENT[dtype], transpose_a, transpose_b, in_registers, accumulate, scale_a,
                  scale_b, 0 if in_registers else a, b, pointer(d), pointer(registers), pointer(shared), shared.nbytes)
    call("wgmma", c.byref(unit))


def copy_to_tensor_memory(tensor, shape: int, multicast: int, address: int, descriptor: int, shared) -> None:
    call("cp", tensor.handle, shape, multicast, c.c_uint32(address), c.c_uint64(descriptor), pointer(shared),
         c.c_uint32(shared.nbytes))


REDUCTIONS = {"none": 0, "add": 1, "min": 2, "max": 3, "inc": 4, "dec": 5, "and": 6, "or": 7, "xor": 8}
BULK_TYPES = ["f16", "bf16", "b32", "u32", "s32", "b64", "u64", "s64", "f32", "f64"]


def tile(map_words: np.ndarray, coordinate, shared_address: int, shared: np.ndarray, store=False,
         reduction="none") -> int:
    """One TMA tile copy; gives the bytes it counts."""
    count = c.c_uint32()
    at = (c.c_int32 * 5)(*coordinate)
    call("tile", pointer(map_words), len(coordinate), at, c.c_uint32(shared_address), int(store),
         REDUCTIONS[reduction], pointer(shared), c.c_uint32(shared.nbytes), c.byref(count))
    return count.value


def bulk_reduce(destination: np.ndarray, source: np.ndarray, reduction: str, bulk_type: str) -> None:
    call("bulk_reduce", pointer(destination), pointer(source), c.c_uint32(source.nbytes), REDUCTIONS[reduction],
         BULK_TYPES.index(bulk_type))


def tensor_map_fields(map_words: np.ndarray) -> dict:
    out = np.zeros(21, np.uint64)
    call("tensor_map", pointer(map_words), pointer(out))
    v = [int(x) for x in out]
    return dict(address=v[0], rank=v[1], type=v[2], element_bytes=v[3], swizzle=v[4], fill_nan=v[5], size=v[6:11],
                stride=v[11:16], box=v[16:21])
