"""Run the cases of ptx_cases.py on a real Hopper GPU through the CUDA driver, and record what comes out.

    python tests/emu/hopper/record.py OUTPUT_DIRECTORY

Needs numpy and libcuda.so.1, no toolkit. Writes recorded.npz (each case's outputs, and the tensor maps as the driver's
own encoder makes them) and recorded.json (device, driver, what ran, what disagreed with the expected result).
"""

import ctypes as c
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
import traceback

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
from emu import ptx_case, ptx_cases, tensor_maps

CUDA = c.CDLL("libcuda.so.1")


class DriverError(RuntimeError):
    pass


def driver(name: str, *arguments) -> None:
    status = getattr(CUDA, name)(*arguments)
    if status:
        text = c.c_char_p()
        CUDA.cuGetErrorString(status, c.byref(text))
        raise DriverError(f"{name}: {status} {text.value.decode() if text.value else ''}")


class Device:
    def __init__(self):
        driver("cuInit", 0)
        self.device = c.c_int()
        driver("cuDeviceGet", c.byref(self.device), 0)
        self.enter()

    def enter(self) -> None:
        context = c.c_void_p()
        driver("cuDevicePrimaryCtxRetain", c.byref(context), self.device)
        driver("cuCtxSetCurrent", context)

    def description(self) -> dict:
        name = c.create_string_buffer(100)
        driver("cuDeviceGetName", name, 100, self.device)
        version = c.c_int()
        driver("cuDriverGetVersion", c.byref(version))
        return {"device": name.value.decode(), "driver": version.value}


def load(text: str) -> c.c_void_p:
    module, log = c.c_void_p(), c.create_string_buffer(4096)
    # CU_JIT_ERROR_LOG_BUFFER and its size
    options, values = (c.c_int * 2)(5, 6), (c.c_void_p * 2)(c.addressof(log), 4096)
    status = CUDA.cuModuleLoadDataEx(c.byref(module), text.encode() + b"\0", 2, options, values)
    if status:
        raise DriverError(f"cuModuleLoadDataEx: {status}: {log.value.decode()[:500]}")
    return module


def run(case: ptx_case.Case) -> dict[str, np.ndarray]:
    module, function = load(case.text), c.c_void_p()
    driver("cuModuleGetFunction", c.byref(function), module, case.kernel.encode())
    if case.shared > 48 * 1024:
        driver("cuFuncSetAttribute", function, 8, case.shared)
    memory = {}
    for name, contents in case.buffers.items():
        memory[name] = c.c_uint64()
        driver("cuMemAlloc_v2", c.byref(memory[name]), c.c_size_t(contents.nbytes))
        driver("cuMemcpyHtoD_v2", memory[name], c.c_void_p(contents.ctypes.data), c.c_size_t(contents.nbytes))
    values = []
    for parameter in case.parameters:
        if isinstance(parameter, str):
            values.append(np.array([memory[parameter].value], np.uint64))
        elif isinstance(parameter, ptx_case.Map):
            values.append(parameter.encode(memory[parameter.buffer].value))
        else:
            values.append(np.atleast_1d(parameter).copy())
    pointers = (c.c_void_p * len(values))(*[v.ctypes.data for v in values])
    driver("cuLaunchKernel", function, case.grid, 1, 1, case.block, 1, 1, case.shared, None, pointers, None)
    deadline = time.time() + 3
    while CUDA.cuStreamQuery(None) == 600:  # CUDA_ERROR_NOT_READY
        if time.time() > deadline:
            raise TimeoutError(case.name)
        time.sleep(0.0005)
    driver("cuCtxSynchronize")
    outputs = {}
    for name, contents in case.buffers.items():
        outputs[name] = np.empty_like(contents)
        driver("cuMemcpyDtoH_v2", c.c_void_p(outputs[name].ctypes.data), memory[name], c.c_size_t(contents.nbytes))
        driver("cuMemFree_v2", memory[name])
    driver("cuModuleUnload", module)
    return outputs


# CUtensorMapDataType by our names; BFLOAT16 is 9 in the API and 10 in the hardware's format.
API_TYPES = {"u8": 0, "u16": 1, "u32": 2, "s32": 3, "u64": 4, "s64": 5, "f16": 6, "f32": 7, "f64": 8, "bf16": 9}


def encode_by_driver(dtype, sizes, strides, box, swizzle, fill_nan, **rare) -> np.ndarray:
    """rare: interleave, element_strides, api_type, promotion."""
    interleave, promotion = rare.get("interleave", 0), rare.get("promotion", 2)
    element_strides, api_type = rare.get("element_strides"), rare.get("api_type")
    address = 0x7F0012345000
    rank = len(sizes)
    words = np.zeros(64, np.uint32)
    at = (-words.ctypes.data % 64) // 4
    status = CUDA.cuTensorMapEncodeTiled(
        c.c_void_p(words[at:].ctypes.data), API_TYPES[dtype] if api_type is None else api_type, c.c_uint32(rank),
        c.c_void_p(address), (c.c_uint64 * rank)(*sizes), (c.c_uint64 * max(rank - 1, 1))(*strides),
        (c.c_uint32 * rank)(*box), (c.c_uint32 * rank)(*(element_strides or [1] * rank)), interleave,
        tensor_maps.SWIZZLES[swizzle], promotion, int(fill_nan))
    if status:
        raise DriverError(f"cuTensorMapEncodeTiled: {status}")
    return words[at:at + 32].copy()


def tensor_map_variants() -> dict[str, np.ndarray]:
    """One argument of the encoder varied at a time."""
    base = dict(dtype="f16", sizes=(192, 4096), strides=(384,), box=(64, 128), swizzle="128B", fill_nan=False)
    variants = {"base": {}, "fill_nan": dict(fill_nan=True), "interleave_16": dict(
        interleave=1, sizes=(192, 40, 50), strides=(384, 15360), box=(16, 8, 8), swizzle="none"), "interleave_32": dict(
        interleave=2, sizes=(192, 40, 50), strides=(384, 15360), box=(16, 8, 8), swizzle="32B"),
        "element_strides": dict(element_strides=[1, 2]), "element_stride_8": dict(element_strides=[1, 8]),
        "no_promotion": dict(promotion=0), "promotion_256": dict(promotion=3), "promotion_64": dict(promotion=1)}
    for dtype in API_TYPES:
        width = 128 // tensor_maps.BYTES[dtype]
        variants[f"type_{dtype}"] = dict(dtype=dtype, strides=(192 * tensor_maps.BYTES[dtype],), box=(width, 8))
    for api_type, name in ((10, "f32_ftz"), (11, "tf32"), (12, "tf32_ftz")):
        variants[f"type_{name}"] = dict(dtype="f32", api_type=api_type, strides=(768,), box=(32, 8))
    for rank in range(1, 6):
        sizes = (192, 40, 7, 5, 3)[:rank]
        strides = tuple(384 * int(np.prod(sizes[1:d])) for d in range(1, rank))
        variants[f"rank_{rank}"] = dict(sizes=sizes, strides=strides, box=(64, 8, 2, 2, 1)[:rank])
    variants["stride_high"] = dict(sizes=(192, 4, 3), strides=(2**38, 2**39), box=(64, 4, 1))
    variants["box_256"] = dict(box=(64, 256))
    for swizzle in tensor_maps.SWIZZLES:
        variants[f"swizzle_{swizzle}"] = dict(swizzle=swizzle, box=(8, 16))
    out = {}
    for name, change in variants.items():
        try:
            out[name] = encode_by_driver(**{**base, **change})
        except DriverError as error:
            print("tensor map", name, error)
    return out


def record(out: pathlib.Path, first: int) -> None:
    """Cases from number `first` on, until one faults (a fault spoils the process's context)."""
    device = Device()
    cases = [case for case in ptx_cases.cases() if case.target == "sm_90a"]
    summary = {**device.description(), "ran": [], "disagreed": {}, "failed": {}, "next": len(cases)}
    arrays = {} if first else {f"map/{name}": words for name, words in tensor_map_variants().items()}
    for index, case in enumerate(cases[first:], first):
        try:
            outputs = run(case)
        except (DriverError, TimeoutError) as error:
            summary["failed"][case.name] = f"{type(error).__name__}: {error}"
            summary["next"] = index + 1
            break
        summary["ran"].append(case.name)
        for name in case.expected:
            arrays[f"{case.name}/{name}"] = outputs[name]
        try:
            case.check(outputs)
        except AssertionError as error:
            summary["disagreed"][case.name] = str(error)[:3000]
        except Exception:
            summary["disagreed"][case.name] = traceback.format_exc()[-2000:]
    np.savez_compressed(out / f"part{first}.npz", **arrays)
    (out / f"part{first}.json").write_text(json.dumps(summary))
    sys.stdout.flush()
    os._exit(0 if summary["next"] == len(cases) else 3)


def experiment(name: str, bits: int, coordinates: list[int]) -> None:
    """One tile case with bits of the tensor map's word 2 that the driver's encoder leaves clear, or with coordinates of
    its store (where a fault is the finding)."""
    Device()
    case = next(case for case in ptx_cases.cases() if case.name == name)
    parameters = [dataclasses.replace(p, extra_bits=bits) if isinstance(p, ptx_case.Map) else p
                  for p in case.parameters]
    if coordinates:
        parameters[-1] = np.concatenate([parameters[-1][:20], np.array(coordinates, np.int32).view(np.uint8)])
    try:
        outputs = run(dataclasses.replace(case, parameters=tuple(parameters)))
        print("ran", end="")
        if not coordinates:
            case.check(outputs)
            print(", right", end="")
    except Exception as error:
        print(type(error).__name__, str(error).split(chr(10))[0][:80], end="")
    sys.stdout.flush()
    os._exit(0)


TILE = "tma_main_f16_2d_128B_0_8"
EXPERIMENTS = {
    "bit 1": (TILE, 2), "bit 21": (TILE, 1 << 21), "negative load, bit 1": ("tma_main_f32_2d_32B_-4_3", 2),
    "negative load, bit 21": ("tma_main_f32_2d_32B_-4_3", 1 << 21),
    "store at row -1": (TILE, 0, 0, -1, 0, 0, 0), "store at column -8": (TILE, 0, -8, 0, 0, 0, 0),
    "store at column 2": (TILE, 0, 2, 0, 0, 0, 0), "store at column 4": (TILE, 0, 4, 0, 0, 0, 0),
    "store beyond the rows": (TILE, 0, 0, 1000, 0, 0, 0),
}


def main() -> int:
    out = pathlib.Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    if len(sys.argv) > 3:
        experiment(sys.argv[2], int(sys.argv[3]), [int(x) for x in sys.argv[4:]])
    if len(sys.argv) > 2:
        record(out, int(sys.argv[2]))
    arrays, total, first, status = {}, None, 0, 3
    while status == 3:
        status = subprocess.run([sys.executable, __file__, str(out), str(first)]).returncode
        part = json.loads((out / f"part{first}.json").read_text())
        with np.load(out / f"part{first}.npz") as loaded:
            arrays.update({name: loaded[name] for name in loaded.files})
        for suffix in ("json", "npz"):
            (out / f"part{first}.{suffix}").unlink()
        first = part.pop("next")
        if total is None:
            total = part
        else:
            total["ran"] += part["ran"]
            total["disagreed"].update(part["disagreed"])
            total["failed"].update(part["failed"])
    total["experiments"] = {title: subprocess.run([sys.executable, __file__, str(out), *map(str, what)],
                                                  capture_output=True, text=True).stdout
                            for title, what in EXPERIMENTS.items()}
    np.savez_compressed(out / "recorded.npz", **arrays)
    (out / "recorded.json").write_text(json.dumps(total, indent=1) + "\n")
    print(json.dumps({**total, "ran": len(total["ran"])}, indent=1))
    return status


if __name__ == "__main__":
    sys.exit(main())
