"""Finds the CuTe DSL's runtime library, and runs an artifact on raw device pointers without JAX or the compiler."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import pathlib
from collections.abc import Mapping

from jax_fa4.artifact import PREFIX, Artifact
from jax_fa4.kernels.common.abi import DIM_NAMES, Dims

_LIBRARY = "libcute_dsl_runtime.so"


def library_path() -> str:
    """Path of the runtime library: JAX_FA4_RUNTIME if set, else that of the installed nvidia-cutlass-dsl.

    Raises FileNotFoundError with the remedy.
    """
    named = os.environ.get("JAX_FA4_RUNTIME")
    if named:
        if not os.path.isfile(named):
            raise FileNotFoundError(f"JAX_FA4_RUNTIME={named!r} is no file; set it to the path of {_LIBRARY}")
        return named
    package = importlib.util.find_spec("nvidia_cutlass_dsl")
    for folder in package.submodule_search_locations or () if package else ():
        for major in ("cu13", "cu12"):
            path = pathlib.Path(folder) / major / "lib" / _LIBRARY
            if path.is_file():
                return str(path)
    raise FileNotFoundError(
        f"{_LIBRARY} not found: install it with `pip install 'nvidia-cutlass-dsl[cu13]'`, "
        "or set JAX_FA4_RUNTIME to its path"
    )


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(library_path())
    library.CuteDSLRT_GetErrorString.restype = ctypes.c_char_p
    return library


def _check(status: int, what: str) -> None:
    if status:
        reason = _library().CuteDSLRT_GetErrorString(status).decode()
        raise RuntimeError(f"{what} failed: {reason} (runtime library's code {status})")


class Arguments:
    """The argument vector of an artifact's host function, kept alive with the values it points to.

    Order: the six Int32 of `Dims`, the stream, one pointer per buffer, and last the function's int32 result.
    """

    def __init__(self, artifact: Artifact, pointers: Mapping[str, int], dims: Dims, stream: int = 0):
        missing = [b.name for b in artifact.buffers if b.name not in pointers]
        if missing:
            names = [b.name for b in artifact.buffers]
            raise ValueError(f"no pointer for buffers {missing}; {artifact.name} takes {names}")
        self.result = ctypes.c_int32(0)
        self._values = [
            *(ctypes.c_int32(getattr(dims, name)) for name in DIM_NAMES),
            ctypes.c_void_p(stream),
            *(ctypes.c_void_p(pointers[b.name]) for b in artifact.buffers),
            self.result,
        ]
        self.vector = (ctypes.c_void_p * len(self._values))(*map(ctypes.addressof, self._values))

    def __len__(self) -> int:
        return len(self._values)


class Runner:
    """A loaded artifact: call it with device pointers.

        run = Runner(Artifact.from_bytes(open("fwd.artifact", "rb").read()))
        run({"q": q.data_ptr(), ..., "partial": s.data_ptr()}, Dims(B, S, T, H, K, sm_count), stream=s.cuda_stream)

    A CUDA context must be current (torch or JAX made one). Every buffer of `artifact.buffers` needs a pointer, scratch
    too; `Buffer.dims` gives its shape.
    """

    def __init__(self, artifact: Artifact):
        self.artifact = artifact
        self._module = ctypes.c_void_p()
        self._function = ctypes.c_void_p()
        library = _library()
        bytes_ = artifact.object
        _check(
            library.CuteDSLRT_Module_Create_From_Bytes(
                ctypes.byref(self._module), bytes_, ctypes.c_size_t(len(bytes_)), None, ctypes.c_size_t(0)
            ),
            "loading the module",
        )
        _check(
            library.CuteDSLRT_Module_Get_Function(ctypes.byref(self._function), self._module, PREFIX.encode()),
            f"loading the kernels for {artifact.arch} on this device",
        )

    def prepare(self, pointers: Mapping[str, int], dims: Dims, stream: int = 0) -> Arguments:
        """Packs the arguments once, for calls that are repeated with the same memory (see `launch`)."""
        return Arguments(self.artifact, pointers, dims, stream)

    def launch(self, arguments: Arguments) -> None:
        """Launches on the stream named in `arguments`; does not wait."""
        status = _library().CuteDSLRT_Function_Run(self._function, arguments.vector, ctypes.c_size_t(len(arguments)))
        _check(status, "launching")
        if arguments.result.value:
            raise RuntimeError(f"launching {self.artifact.name} failed with CUDA error {arguments.result.value}")

    def __call__(self, pointers: Mapping[str, int], dims: Dims, stream: int = 0) -> None:
        self.launch(self.prepare(pointers, dims, stream))
