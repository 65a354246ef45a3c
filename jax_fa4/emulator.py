"""The software GPU from Python: a compiled artifact runs on the CPU, bit for bit as its PTX says.

    module = emulator.load(object_bytes, ptx, symbol)
    report = module.run([a, b, out, 128], seed=3)      # arrays are passed as device pointers
    report.kernels[0]["tensor_flops"]

`launch` runs an `Artifact` on arrays by name. The C API is ffi/emu/api.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import enum
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_fa4 import registry
from jax_fa4.artifact import Artifact

SM_COUNT = {"sm_90a": 132, "sm_100a": 148, "sm_103a": 148}
"""Streaming multiprocessors of an H200, a B200 and a B300."""


class Strict(enum.IntFlag):
    """What hardware forgives and a strict run reports."""

    ALL = 1
    LOADS = 2  # registers of a tcgen05.ld used before its tcgen05.wait::ld
    END = 4  # a CTA that ends while bulk stores or other CTAs still use its shared memory
    FENCES = 8  # accesses of different warps to tensor memory without tcgen05.fence around the barrier between them
    OVERWRITES = 16  # shared memory that a bulk copy overwrites, without fence.proxy.async by who read or wrote it


class EmulationError(RuntimeError):
    """The software GPU refused an artifact or stopped a kernel; the message has the PTX line."""


class _Region(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("bytes", ctypes.c_uint64), ("writable", ctypes.c_uint32)]


class _Options(ctypes.Structure):
    _fields_ = [
        ("struct_bytes", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("threads", ctypes.c_uint32),
        ("strict", ctypes.c_uint32),
        ("timing", ctypes.c_uint32),
        ("sm_count", ctypes.c_uint32),
        ("regions", ctypes.POINTER(_Region)),
        ("region_count", ctypes.c_uint64),
        ("trace", ctypes.c_uint32),
        ("limit", ctypes.c_uint64),
    ]


class _LaunchConfig(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32 * 3),
        ("dynamic_shared_bytes", ctypes.c_uint32),
        ("params", ctypes.POINTER(ctypes.c_void_p)),
    ]


@functools.cache
def library() -> ctypes.CDLL:
    """The shared library of this package, which holds the software GPU."""
    lib = ctypes.CDLL(str(registry.library_path()))
    pointer = ctypes.POINTER
    handle = ctypes.c_void_p
    lib.emu_load.restype = handle
    lib.emu_load.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_uint64, ctypes.c_char_p,
                             pointer(handle)]
    lib.emu_unload.argtypes = [handle]
    if hasattr(lib, "jax_fa4_emulation_configure"):  # absent where the software GPU was built alone
        lib.jax_fa4_emulation_configure.argtypes = [pointer(_Options), ctypes.c_uint64]
        lib.jax_fa4_emulation_report.argtypes = [ctypes.c_char_p, ctypes.c_uint64]
        lib.jax_fa4_emulation_report.restype = ctypes.c_uint64
    lib.emu_run.argtypes = [handle, pointer(handle), pointer(_Options), pointer(handle), pointer(handle)]
    lib.emu_launch.argtypes = [handle, ctypes.c_char_p, pointer(_LaunchConfig), pointer(_Options), pointer(handle),
                               pointer(handle)]
    for name in ("emu_error_message", "emu_report_json"):
        getattr(lib, name).restype = ctypes.c_char_p
        getattr(lib, name).argtypes = [handle]
    for name in ("emu_error_free", "emu_report_free"):
        getattr(lib, name).argtypes = [handle]
    return lib


class Event(NamedTuple):
    """Something that happened in a traced run. Times are cycles of the clock model in a timed run, else the number of
    instructions that the cluster had executed.

    `kind` is one of

    - "run": a warp executed `amount` instructions, from PTX line `line` on, without waiting between: [begin, end);
    - "wait": a warp waited for `what` from `begin` to `end`; `address` and `amount` are the barrier's address (a named
      barrier's number) and its phase;
    - "arrive": a warp arrived at the barrier `address` (`what`: "mbarrier" or "named barrier");
    - an asynchronous operation: "load", "store", "reduce" (bulk copies, `amount` bytes; of a load `address` is the
      mbarrier that it reports to), "mma" (`what`: its shape, `amount`: its floating-point operations, `address`: of D
      in tensor memory), "commit" (`address`: the mbarrier), "tensor_load" and "tensor_store" (tensor memory),
      "tensor_copy", "other". The warp issued it at `begin`; its unit took it up at `started`; by `moved` its first step
      was made (a store has read its source), by `end` it was complete.

    `address` of a barrier in shared memory has the CTA's rank in bits 24 and up.
    """

    kind: str
    what: str
    cluster: int
    cta: int
    warp: int
    line: int
    begin: int
    started: int
    moved: int
    end: int
    address: int
    amount: int
    sm: int


@dataclasses.dataclass(frozen=True)
class Report:
    """What a run did.

    `kernels` has an entry per kernel in order of its first launch: "kernel", "launches", "clusters", "ctas",
    "instructions" (executed by warps), "active_lanes", "tensor_flops", "poll_retries", "units" (instructions by unit),
    "bytes" (by memory space and direction), "mma" (tensor operations by shape), "warps" (the same by warp of the CTA)
    "lines" (pairs of PTX line and number of executions), "line_warps" (of each of them, bit i: by warp i of a CTA),
    "votes" (PTX line, votes of warps, how many came out true) and "forms" (opcodes with their modifiers, and
    descriptors of tensor instructions and tensor maps without their addresses, as executed); in traced runs "trace", a
    list of `Event` of the kernel's first launch, cluster by cluster.
    """

    seed: int
    architecture: int
    sm_count: int
    kernels: list[dict[str, Any]]
    complaints: list[str]

    @classmethod
    def from_json(cls, text: str | bytes) -> Report:
        """From what emu_report_json gives."""
        fields = {f.name for f in dataclasses.fields(cls)}
        report = cls(**{k: v for k, v in json.loads(text).items() if k in fields})
        for kernel in report.kernels:
            if "trace" in kernel:
                kernel["trace"] = [Event._make([*row, row[2] % report.sm_count]) for row in kernel["trace"]]
        return report


def _take_error(lib: ctypes.CDLL, error: ctypes.c_void_p) -> str:
    if not error:
        return "no reason given"
    text = lib.emu_error_message(error).decode(errors="replace")
    lib.emu_error_free(error)
    return text


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to run: `seed` fixes the interleaving and with it results and counts; `threads` (0: all processors) has no
    influence on them. `strict` (False, True or kinds of `Strict`) reports what hardware forgives. `sm_count` 0 takes
    that of the architecture's part. `check_bounds` stops a kernel that leaves the arrays it was given. With `timing`
    the warps follow a model of the hardware's clock instead of the seed, and the report estimates cycles
    ("cluster_cycles", "timing"). So many of each kernel's clusters as `trace` says, the first ones, report what
    happened when ("trace"). A cluster whose warps have executed more than `limit` instructions is stopped with an error
    that says where they are (0: no limit): a loop without end that looks like work ends only so."""

    seed: int = 0
    strict: bool | Strict = False
    threads: int = 0
    sm_count: int = 0
    check_bounds: bool = True
    timing: bool = False
    trace: int = 0
    limit: int = 0

    def _options(self, arrays: Sequence[np.ndarray]) -> _Options:
        arrays = [a for a in arrays if a.nbytes] if self.check_bounds else []
        regions = (_Region * max(1, len(arrays)))(
            *[_Region(a.ctypes.data, a.nbytes, a.flags.writeable) for a in arrays]
        )
        return _Options(ctypes.sizeof(_Options), self.seed, self.threads, self.strict, self.timing, self.sm_count,
                        regions, len(arrays), self.trace, self.limit)


class Module:
    """A loaded artifact: its host part linked, its kernels decoded."""

    def __init__(self, object_bytes: bytes, ptx: str, symbol: str):
        self._library = library()
        text = ptx.encode()
        error = ctypes.c_void_p()
        self._handle = self._library.emu_load(object_bytes, len(object_bytes), text, len(text), symbol.encode(),
                                              ctypes.byref(error))
        if not self._handle:
            raise EmulationError(_take_error(self._library, error))

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.emu_unload(self._handle)

    def run(self, arguments: Sequence[Any], settings: Settings | None = None, **changes: Any) -> Report:
        """Calls the host function; every kernel that it launches runs to its end.

        Each argument is an array (passed as a device pointer), an int (int32), a float (float32), a NumPy scalar, None
        (a null pointer, say the stream) or a ctypes object passed by its address. `changes` are fields of `Settings`.
        """
        kept: list[Any] = []
        arrays: list[np.ndarray] = []
        for a in arguments:
            if isinstance(a, np.ndarray):
                arrays.append(a)
                kept.append(ctypes.c_void_p(a.ctypes.data))
            elif isinstance(a, ctypes._SimpleCData | ctypes.Array | ctypes.Structure):
                kept.append(a)
            elif a is None:
                kept.append(ctypes.c_void_p(0))
            elif isinstance(a, np.generic):
                kept.append(ctypes.create_string_buffer(a.tobytes(), a.nbytes))
            else:
                kept.append(ctypes.c_float(a) if isinstance(a, float) else ctypes.c_int32(a))
        result = ctypes.c_int32(0)
        kept.append(result)
        vector = (ctypes.c_void_p * len(kept))(*[ctypes.addressof(k) for k in kept])
        report = self.run_vector(vector, arrays, settings or Settings(), **changes)
        if result.value:
            raise EmulationError(f"the host part returned CUDA error {result.value}")
        return report

    def run_vector(self, vector: Any, arrays: Sequence[np.ndarray], settings: Settings, **changes: Any) -> Report:
        """As `run`, with the vector of argument pointers ready made; `arrays` are the memory that kernels may touch."""
        options = dataclasses.replace(settings, **changes)._options(arrays)
        report, error = ctypes.c_void_p(), ctypes.c_void_p()
        failed = self._library.emu_run(self._handle, vector, ctypes.byref(options), ctypes.byref(report),
                                       ctypes.byref(error))
        return self._finish(failed, report, error)

    def launch_kernel(self, kernel: str, grid: Sequence[int], block: Sequence[int], parameters: Sequence[Any],
                      arrays: Sequence[np.ndarray] = (), *, cluster: Sequence[int] = (1, 1, 1), shared_bytes: int = 0,
                      settings: Settings | None = None) -> Report:
        """Launches one kernel without a host part (a module loaded with an empty object). `parameters` are ctypes
        objects, one a parameter."""
        vector = (ctypes.c_void_p * max(1, len(parameters)))(*[ctypes.addressof(p) for p in parameters])
        triple = ctypes.c_uint32 * 3
        config = _LaunchConfig(triple(*grid), triple(*block), triple(*cluster), shared_bytes, vector)
        options = (settings or Settings())._options(arrays)
        report, error = ctypes.c_void_p(), ctypes.c_void_p()
        failed = self._library.emu_launch(self._handle, kernel.encode(), ctypes.byref(config), ctypes.byref(options),
                                          ctypes.byref(report), ctypes.byref(error))
        return self._finish(failed, report, error)

    def _finish(self, failed: int, report: ctypes.c_void_p, error: ctypes.c_void_p) -> Report:
        try:
            if failed:
                raise EmulationError(_take_error(self._library, error))
            return Report.from_json(self._library.emu_report_json(report))
        finally:
            if report:
                self._library.emu_report_free(report)


def load(object_bytes: bytes, ptx: str, symbol: str) -> Module:
    """Links, parses and decodes an artifact; raises EmulationError for what the software GPU does not know."""
    return Module(object_bytes, ptx, symbol)


@functools.lru_cache(maxsize=32)
def _module_of(artifact: Artifact) -> Module:
    return load(artifact.object, artifact.ptx, artifact.symbol)


def launch(artifact: Artifact, arrays: Mapping[str, np.ndarray], dims: Any, settings: Settings | None = None,
           **changes: Any) -> Report:
    """Runs `artifact` on `arrays`, one for each of its buffers that is not scratch (scratch is made here, filled with
    NaN bytes). `dims` is a `jax_fa4.launch.Dims`."""
    from jax_fa4.runtime import Arguments

    memory = dict(arrays)
    for buffer in artifact.buffers:
        if buffer.name not in memory:
            if buffer.kind != "scratch":
                raise ValueError(
                    f"no array for {buffer.name!r}; {artifact.name} takes {[b.name for b in artifact.buffers]}"
                )
            memory[buffer.name] = np.full(buffer.size_bytes(dims), 0xFF, np.uint8)
    vector = Arguments(artifact, {name: a.ctypes.data for name, a in memory.items()}, dims)
    report = _module_of(artifact).run_vector(vector.vector, list(memory.values()), settings or Settings(), **changes)
    return report


_REPORTS_KEPT = 256


@contextlib.contextmanager
def emulate(seed: int = 0, **settings: Any) -> Iterator[Settings]:
    """How attention with ``backend="emulate:<arch>"`` runs inside the ``with`` block, and that it is counted.

        with jax_fa4.emulate(seed=7):
            out = jax.block_until_ready(jax_fa4.attention(q, k, v, backend="emulate:sm_100a"))
        jax_fa4.counters()["tensor_flops"]

    The arguments are those of `Settings`. The settings hold for the whole process, and for runs, not for traces: a
    program compiled once may run under many seeds. On leaving, the defaults come back; wait for results before.
    """
    lib = library()
    chosen = Settings(seed=seed, **settings)
    lib.jax_fa4_emulation_configure(ctypes.byref(chosen._options(())), _REPORTS_KEPT)
    try:
        yield chosen
    finally:
        lib.jax_fa4_emulation_configure(ctypes.byref(Settings()._options(())), _REPORTS_KEPT)


def take_reports() -> list[Report]:
    """The reports of the runs inside `emulate` since the last call, oldest first; each is handed out once."""
    lib = library()
    reports = []
    while size := lib.jax_fa4_emulation_report(None, 0):
        text = ctypes.create_string_buffer(size)
        size = lib.jax_fa4_emulation_report(text, size)
        reports.append(Report.from_json(text.raw[:size]))
    return reports
