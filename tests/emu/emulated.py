"""Runs the small kernels of ptx_cases.py on the software GPU."""

import ctypes

import numpy as np
import pytest
from emu.ptx_case import Case, Map

from jax_fa4 import emulator, registry


def require_library() -> None:
    try:
        registry.library_path()
    except Exception as error:
        pytest.skip(f"the shared library is not built: {error}")


def run(case: Case, seed: int = 0, text: str | None = None, **settings) -> dict[str, np.ndarray]:
    """The buffers after the run."""
    return launch(case, seed, text, **settings)[0]


def launch(
    case: Case, seed: int = 0, text: str | None = None, **settings
) -> tuple[dict[str, np.ndarray], emulator.Report]:
    """The buffers after the run, and its report."""
    module = emulator.load(b"", text or case.text, "")
    memory = {name: contents.copy() for name, contents in case.buffers.items()}
    parameters = []
    for parameter in case.parameters:
        if isinstance(parameter, str):
            parameters.append(ctypes.c_uint64(memory[parameter].ctypes.data))
            continue
        encoded = parameter.encode(memory[parameter.buffer].ctypes.data) if isinstance(parameter, Map) else parameter
        data = np.atleast_1d(encoded).tobytes()
        parameters.append(ctypes.create_string_buffer(data, len(data)))
    report = module.launch_kernel(case.kernel, (case.grid, 1, 1), (case.block, 1, 1), parameters,
                                  list(memory.values()), cluster=(case.cluster, 1, 1), shared_bytes=case.shared,
                                  settings=emulator.Settings(seed=seed, **settings))  # fmt: skip
    return memory, report
