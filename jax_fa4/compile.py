"""From a spec to an `Artifact`: plan, then compiled without a GPU, kept in memory and on disk.

An artifact's key is a digest of the spec, the plan, the kernels' sources and the processor the host part is for; the
compiler's version is a second part of its file's name, so that a cache can be used where no compiler is installed.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import os
import pathlib
import tempfile
import threading
import time

import jax_fa4
from jax_fa4 import elf
from jax_fa4.artifact import PREFIX, Artifact
from jax_fa4.cache import DiskCache
from jax_fa4.plan import Pass, SizeClass, choose_plan, make_kernel
from jax_fa4.spec import AttentionSpec

HOST_TARGET = "llvm -mtriple=x86_64-unknown-linux-gnu -mcpu=x86-64-v2"
"""What the host part of an artifact runs on: an artifact may be carried to a machine with an older processor."""

COMPILER_PACKAGES = ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-core")

_COMPILER = threading.Lock()  # the DSL keeps global state while it traces


@functools.cache
def _preload_runtime() -> None:
    """Makes the CUDA entry points known to the compiler's linker, which it asks for also when it only writes an object.

    The compiler loads them by itself only where the machine's own GPU could run the result.
    """
    from jax_fa4 import runtime

    ctypes.CDLL(runtime.library_path(), mode=ctypes.RTLD_GLOBAL)


def compile_kernel(kernel, arch: str, *, options: str = "", dump_dir: str | os.PathLike | None = None) -> Artifact:
    """Compiles a kernel object for `arch` ("sm_90a", "sm_100a", ...).

    `kernel` has ``buffers`` and ``__call__(self, g, dims, stream)``, see `jax_fa4.kernels.common.entry`. `options` are
    added to the compiler's own (``"--generate-line-info"``, say). With `dump_dir` the PTX and the cubin stay there.
    """
    kinds = [buffer.kind for buffer in kernel.buffers]
    if kinds != sorted(kinds):  # "in", "out", "scratch": also the order of a custom call's operands and results
        raise ValueError(f"{type(kernel).__qualname__}.buffers: inputs, then outputs, then scratch; got {kinds}")
    import cutlass.cute as cute

    from jax_fa4.kernels.common.entry import entry, fake_args

    _preload_runtime()
    with tempfile.TemporaryDirectory() as scratch, _COMPILER:
        folder = pathlib.Path(dump_dir or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        flags = f"--gpu-arch {arch} --keep-ptx --keep-cubin --dump-dir={folder} --host-target '{HOST_TARGET}' {options}"
        began = time.perf_counter()
        compiled = cute.compile(entry, *fake_args(kernel), options=flags)
        seconds = time.perf_counter() - began
        host_object = compiled.dump_to_object(PREFIX)
        ptx, cubin = compiled.__ptx__, compiled.__cubin__
    start = f"_mlir_{PREFIX}_"
    others = ("_mlir_ciface", "cuda_")
    symbols = [s for s in elf.functions(host_object) if s.startswith(start) and not s[len(start) :].startswith(others)]
    if len(symbols) != 1:
        raise RuntimeError(f"expected one host function in the compiled object, found {symbols}")
    return Artifact(
        arch=arch,
        name=f"{type(kernel).__module__}.{type(kernel).__qualname__}",
        buffers=tuple(kernel.buffers),
        symbol=symbols[0],
        object=host_object,
        ptx=ptx,
        kernels=elf.kernels(cubin),
        plan=repr(getattr(kernel, "plan", "")),
        compile_seconds=round(seconds, 2),
    )


_memory: dict[tuple, Artifact] = {}
_compiling: dict[tuple, threading.Lock] = {}
_guard = threading.Lock()


def artifact(spec: AttentionSpec, arch: str, size: SizeClass, pass_: Pass) -> Artifact:
    """The compiled kernel of one pass, from memory, disk, or the compiler. Threads that want the same one wait.

    Raises:
      Unsupported: no kernel does the spec (`plan.choose_plan`).
      ModuleNotFoundError: it is in no cache and there is no compiler.
    """
    plan = choose_plan(spec, arch, size, pass_)
    wanted = (spec, plan, arch, pass_)
    found = _memory.get(wanted)
    if found is not None:
        return found
    with _guard:
        lock = _compiling.setdefault(wanted, threading.Lock())
    with lock:
        found = _memory.get(wanted)
        if found is None:
            found = _from_disk_or_compiler(spec, arch, size, pass_)
            _memory[wanted] = found
    return found


def _from_disk_or_compiler(spec: AttentionSpec, arch: str, size: SizeClass, pass_: Pass) -> Artifact:
    disk, key, version = DiskCache(), artifact_key(spec, arch, size, pass_), toolchain()
    found = disk.get(key, version)
    if found is not None:
        return found
    if version is None:
        raise ModuleNotFoundError(
            f"the {pass_} kernel for {arch} is not in the cache {disk.folder}, and no compiler is installed: "
            "pip install nvidia-cutlass-dsl, or fill a cache elsewhere with `python -m jax_fa4 compile` and set "
            f"JAX_FA4_CACHE_DIR to it. It was asked for {spec}"
        )
    compiled = compile_kernel(make_kernel(spec, arch, size, pass_), arch)
    disk.put(key, version, compiled)
    return compiled


def available(spec: AttentionSpec, arch: str, pass_: Pass) -> bool:
    """Whether `artifact` would succeed: a compiler is installed, or the kernel is in the cache."""
    size = SizeClass.MANY_TILES
    return (
        toolchain() is not None
        or (spec, choose_plan(spec, arch, size, pass_), arch, pass_) in _memory
        or DiskCache().contains(artifact_key(spec, arch, size, pass_))
    )


def artifact_key(spec: AttentionSpec, arch: str, size: SizeClass, pass_: Pass) -> str:
    """Digest of all that an artifact depends on, but the compiler's version."""
    parts = (repr(spec), repr(choose_plan(spec, arch, size, pass_)), arch, pass_, HOST_TARGET, _sources())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:40]


@functools.cache
def toolchain() -> str | None:
    """Digest of the installed compiler's version; None if there is none."""
    try:
        versions = [importlib.metadata.version(name) for name in COMPILER_PACKAGES]
    except importlib.metadata.PackageNotFoundError:
        return None
    return hashlib.sha256(" ".join(versions).encode()).hexdigest()[:12]


@functools.cache
def _sources() -> str:
    """Digest of the Python text that kernels are made from (of all of them: architectures share roles)."""
    package = pathlib.Path(jax_fa4.__file__).parent
    files = sorted((package / "kernels").rglob("*.py"))
    digest = hashlib.sha256()
    for path in [*files, *(package / name for name in ("compile.py", "masks.py", "scores.py", "scalar.py"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def clear_memory() -> None:
    """Forgets the artifacts kept in memory; those on disk stay."""
    _memory.clear()
