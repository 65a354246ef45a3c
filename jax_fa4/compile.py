"""From a kernel class to an `Artifact`, without a GPU."""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
import tempfile
import threading

from jax_fa4 import elf
from jax_fa4.artifact import PREFIX, Artifact

HOST_TARGET = "llvm -mtriple=x86_64-unknown-linux-gnu -mcpu=x86-64-v2"
"""What the host part of an artifact runs on: an artifact may be carried to a machine with an older processor."""

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
    import cutlass.cute as cute

    from jax_fa4.kernels.common.entry import entry, fake_args

    _preload_runtime()
    with tempfile.TemporaryDirectory() as scratch, _COMPILER:
        folder = pathlib.Path(dump_dir or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        flags = f"--gpu-arch {arch} --keep-ptx --keep-cubin --dump-dir={folder} --host-target '{HOST_TARGET}' {options}"
        compiled = cute.compile(entry, *fake_args(kernel), options=flags)
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
    )
