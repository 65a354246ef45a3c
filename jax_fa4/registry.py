"""Loads the shared library and registers its custom call with JAX, once a process."""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib

import jax

TARGET = "jax_fa4"
"""Name of the custom call in HLO and StableHLO, on every platform."""

_FILE = "libjax_fa4_ffi.so"


def library_path() -> pathlib.Path:
    """Where the shared library is: JAX_FA4_LIBRARY if set, else beside this file, where the build installs it."""
    path = pathlib.Path(os.environ.get("JAX_FA4_LIBRARY") or pathlib.Path(__file__).with_name(_FILE))
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist: install jax_fa4 (pip install .), or build it in place with "
            "`cmake -B build . && cmake --build build && cmake --install build --prefix .`, "
            "or set JAX_FA4_LIBRARY to its path"
        )
    return path


@functools.cache
def library() -> ctypes.CDLL:
    """The shared library."""
    return ctypes.CDLL(str(library_path()))


@functools.cache
def register() -> None:
    """Makes the custom call known to JAX on the CUDA and cpu platforms. Needs no GPU; calling it again costs nothing.

    A program that holds the call, an exported one for example, can be run after this.
    """
    stages = {
        "CUDA": {
            "instantiate": "jax_fa4_instantiate",
            "initialize": "jax_fa4_cuda_initialize",
            "execute": "jax_fa4_cuda_execute",
        },
        "cpu": {"instantiate": "jax_fa4_emulate_instantiate", "execute": "jax_fa4_emulate_execute"},
    }
    for platform, names in stages.items():
        handlers = {stage: jax.ffi.pycapsule(getattr(library(), name)) for stage, name in names.items()}
        jax.ffi.register_ffi_target(TARGET, handlers, platform=platform)
