"""How the tests of the Blackwell forward kernel launch it on the software GPU."""

import jax.numpy as jnp
import numpy as np

from jax_fa4 import emulator
from jax_fa4.cases import Shape
from jax_fa4.kernels.common.abi import Dims
from jax_fa4.spec import Arguments, make_spec

ARCH = "sm_100a"


def launch(arguments: dict, s: Shape, seed: int, artifact, **settings):
    """(results, spec, operands, report) of a call of `attention`; outputs are poisoned with NaN bytes."""
    spec, operands = make_spec(Arguments(**arguments))
    sm_count = settings.setdefault("sm_count", 3)
    dims = Dims(s.B, s.S, s.T, s.H, s.K, sm_count)
    arrays = {b.name: array(b, operands, dims) for b in artifact.buffers if b.kind != "scratch"}
    report = emulator.launch(artifact, arrays, dims, seed=seed, threads=1, **settings)
    return {name: arrays[name] for name in ("o", "lse")}, spec, operands, report


def array(buffer, operands, dims) -> np.ndarray:
    if buffer.kind == "out":
        poison = np.full(buffer.size_bytes(dims), 0xFF, np.uint8)
        return poison.view(jnp.dtype(buffer.dtype)).reshape(buffer.dims(dims))
    name, _, index = buffer.name.rpartition("_")
    value = getattr(operands, name)[int(index)] if index.isdigit() else getattr(operands, buffer.name)
    return np.ascontiguousarray(value)


def assert_same_bits(results, expected, where: str) -> None:
    for name, value in expected.items():
        assert value.tobytes() == results[name].tobytes(), f"{name} differs {where}"
