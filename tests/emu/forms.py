"""Which forms (opcode with modifiers; descriptors of tensor instructions and tensor maps) have been shown to be right.

`known_forms.txt` holds those that kernels known to be right on real hardware executed: FlashAttention's published
sm_90a and sm_100a kernels and NVIDIA's GEMM tutorials. `python tests/emu/forms.py CORPUS` writes it anew; CORPUS has a
folder for each kernel with host.o, kernel.ptx and call.json. `hopper/kernels_forms.txt` holds those of our own sm_90a
kernels whose results a real H200 gave too (hopper/kernels.py).
"""

import contextlib
import ctypes
import json
import pathlib
import struct
import sys

import numpy as np

from jax_fa4 import emulator

KNOWN = pathlib.Path(__file__).with_name("known_forms.txt")
COMPARED = pathlib.Path(__file__).parent / "hopper" / "kernels_forms.txt"


def known() -> set[str]:
    return {form for file in (KNOWN, COMPARED) for form in file.read_text().splitlines()}


def of_reports(reports) -> set[str]:
    return {form for report in reports for kernel in report.kernels for form in kernel["forms"]}


@contextlib.contextmanager
def collected():
    """The reports of all modules run inside the block."""
    reports = []
    finish = emulator.Module._finish

    def keep(self, *arguments):
        report = finish(self, *arguments)
        reports.append(report)
        return report

    emulator.Module._finish = keep
    try:
        yield reports
    finally:
        emulator.Module._finish = finish


_DTYPES = {"BFloat16": 2, "Float16": 2, "Float32": 4, "float16": 2, "float32": 4, "Int32": 4}
_DYNAMIC = (1, 256, 4, 128)
_SLACK = 1 << 20  # some kernels write whole tiles, beyond the last row


def _aligned(count: int) -> np.ndarray:
    raw = np.zeros(count + _SLACK, np.uint8)
    start = -raw.ctypes.data % 256
    return raw[start : start + count]


def _tensor(shape, itemsize, memory):
    """CuTe DSL's C layout of a tensor: pointer, int32 sizes, int64 strides but the innermost."""
    array = _aligned(int(np.prod(shape)) * itemsize)
    memory.append(array)
    strides = [int(np.prod(shape[i + 1 :])) for i in range(len(shape) - 1)]
    sizes = struct.pack("<Q", array.ctypes.data) + struct.pack(f"<{len(shape)}i", *shape)
    return sizes + b"\0" * (-len(sizes) % 8) + struct.pack(f"<{len(strides)}q", *strides)


def _run_corpus_kernel(folder: pathlib.Path) -> emulator.Report:
    """Runs a kernel on zeros: its control flow does not depend on values, nor do its forms."""
    call = json.loads((folder / "call.json").read_text())
    symbol = next(s for s in call["symbols"] if s.startswith("_mlir_corpus_cutlass"))
    module = emulator.load((folder / "host.o").read_bytes(), (folder / "kernel.ptx").read_text(), symbol)
    memory, kept = [], []
    sizes = {"M": 512, "N": 512, "K": 256, "L": 1, "B": 1, "S": 256, "T": 256, "H": 2}
    if any(a and a[0] == "i32" and a[1] == "H" for a in call["args"]):
        sizes["K"] = 2  # attention: KV heads
    for argument in call["args"]:
        if argument is None or argument[0] is None:
            continue
        kind = argument[0]
        if kind == "tensor":
            shape = [int(s) if s.isdigit() else d for s, d in zip(argument[2], _DYNAMIC, strict=False)]
            if len(shape) == 3 and not argument[2][-1].isdigit():
                shape = [1, 4, 256 * 128]
            data = _tensor(shape, _DTYPES[argument[1]], memory)
        elif kind == "ptr":
            array = _aligned(int(np.prod([sizes.get(s, s) for s in argument[3]])) * 4)
            memory.append(array)
            data = struct.pack("<Q", array.ctypes.data)
        elif kind in ("float", "Float32"):
            data = struct.pack("<f", 0.1)
        elif kind in ("int", "i32"):
            data = struct.pack("<i", sizes.get(argument[1]) or int(argument[1]))
        else:
            data = bytes(8)  # a stream
        kept.append(ctypes.create_string_buffer(data, max(8, len(data))))
    kept.append(ctypes.c_int32(0))
    vector = (ctypes.c_void_p * len(kept))(*[ctypes.addressof(k) for k in kept])
    return module.run_vector(vector, memory, emulator.Settings(check_bounds=False))


if __name__ == "__main__":
    found: set[str] = set()
    for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
        if not (path / "call.json").exists():
            continue
        try:
            found |= of_reports([_run_corpus_kernel(path)])
            print(path.name, len(found))
        except Exception as error:
            print(path.name, "left out:", str(error)[:200])
    KNOWN.write_text("\n".join(sorted(found)) + "\n")
