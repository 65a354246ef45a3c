"""flash-attn-4's kernels as host objects and PTX: compiled by its own code, kept on disk, called with NumPy arrays.

It needs torch and other packages that nothing else here needs; an interpreter that has them may be another one.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import pathlib
import struct
import subprocess
import sys

import numpy as np

from jax_fa4 import emulator
from jax_fa4.peers import flash_attn_4

VERSION = "4.0.0b36"


class MissingPeer(RuntimeError):
    """flash-attn-4 is not installed; the message says what to install."""


def aligned(shape: tuple[int, ...], dtype: np.typing.DTypeLike, fill: np.ndarray | float | None = None) -> np.ndarray:
    """An array that begins where device memory may: at a multiple of 256 bytes. Without `fill` it holds NaNs."""
    dtype = np.dtype(dtype)
    raw = np.full(int(np.prod(shape)) * dtype.itemsize + 256, 0xFF, np.uint8)
    start = -raw.ctypes.data % 256
    out = raw[start : start + raw.size - 256].view(dtype).reshape(shape)
    if fill is not None:
        out[...] = fill
    return out


@functools.cache
def folder(arch: str, case: str) -> pathlib.Path:
    """Folder of the compiled kernels of one of `flash_attn_4.CASES`: from the cache, or compiled now.

    The cache is JAX_FA4_KNOWN_RIGHT or ~/.cache/jax_fa4/known_right; the interpreter that has flash-attn-4 is
    JAX_FA4_KNOWN_RIGHT_PYTHON or this one.

    Raises:
      MissingPeer: not in the cache, and the interpreter does not have it.
    """
    cache = pathlib.Path(os.environ.get("JAX_FA4_KNOWN_RIGHT") or pathlib.Path.home() / ".cache/jax_fa4/known_right")
    out = cache / f"{VERSION}-{arch}"
    if not list(out.glob(f"{case}_Flash*/call.json")):
        python = os.environ.get("JAX_FA4_KNOWN_RIGHT_PYTHON") or sys.executable
        probe = f"import torch, importlib.metadata as m; assert m.version('flash-attn-4') == '{VERSION}'"
        if subprocess.run([python, "-c", probe], capture_output=True).returncode:
            raise MissingPeer(
                f"flash-attn-4: {python} has no flash-attn-4 {VERSION} with torch. Install them (pip install "
                f"'jax_fa4[peers]'), or set JAX_FA4_KNOWN_RIGHT_PYTHON to an interpreter that has them"
            )
        command = [python, flash_attn_4.__file__, arch, str(out), case]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"flash-attn-4 {VERSION} did not compile {case} for {arch}:\n{done.stderr[-3000:]}")
    return out


class Kernel:
    """One compiled host function. Args: its folder; `text`: another PTX to run in place of its own."""

    def __init__(self, where: pathlib.Path, text: str | None = None):
        object_bytes = (where / "host.o").read_bytes()
        self.ptx = text or (where / "kernel.ptx").read_text()
        self.module = emulator.load(object_bytes, self.ptx, _symbol(object_bytes))
        self.arguments = json.loads((where / "call.json").read_text())

    def __call__(self, tensors: list[np.ndarray], scale: float, **settings) -> emulator.Report:
        """Runs it; tensors in order, each becomes {pointer, int32 sizes, int64 strides but the last (1)} in memory."""
        rest, values = iter(tensors), []
        for argument in self.arguments:
            if argument is None:
                continue
            if argument[0] == "tensor":
                values.append(_tensor(next(rest)))
            elif argument[0] == "float":
                values.append(ctypes.c_float(scale))
            else:
                values.append(ctypes.c_int32(tensors[0].shape[1]) if argument[0] == "int" else ctypes.c_void_p(0))
        result = ctypes.c_int32(0)
        values.append(result)
        vector = (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
        report = self.module.run_vector(vector, tensors, emulator.Settings(), **settings)
        if result.value:
            raise emulator.EmulationError(f"the host part returned CUDA error {result.value}")
        return report


def _symbol(object_bytes: bytes) -> str:
    start = object_bytes.index(b"_mlir_known_cutlass")
    return object_bytes[start : object_bytes.index(b"\0", start)].decode()


def _tensor(array: np.ndarray):
    data = struct.pack("<Q", array.ctypes.data) + b"".join(struct.pack("<i", n) for n in array.shape)
    data += b"\0" * (-len(data) % 8)
    data += b"".join(struct.pack("<q", s // array.itemsize) for s in array.strides[:-1])
    return ctypes.create_string_buffer(data, len(data))
