"""What the tests of the Hopper kernels share: their cases, artifacts, and runs on the software GPU."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa4 import cases, compile, emulator, errors, plan, reference, vjp
from jax_fa4.kernels.common.abi import Dims
from jax_fa4.spec import Arguments, make_spec

ARCH = "sm_90a"
CASES = {case.name: case for case in cases.select(without=("empty",))}
FAST = ("causal", "lengths-window-sinks")
"""Cases of the fast tier: between them masks in all forms, shared heads, two head dims, a run past the end."""


def kernel_of(case: cases.Case, pass_: str, seed: int = 0, **changes):
    """(spec, operands, artifact) of a case, the spec with `changes`; skips what kernels refuse."""
    spec, operands = make_spec(Arguments(**case.make(seed)))
    spec, shape = dataclasses.replace(spec, **changes), case.shape
    try:
        return spec, operands, compile.artifact(spec, ARCH, plan.size_class(shape.B, shape.S, shape.T, shape.H), pass_)
    except errors.Unsupported as error:
        pytest.skip(str(error))


def slow_unless(names) -> list:
    """The cases' names as parameters, all but `names` slow."""
    return [pytest.param(n, marks=() if n in names else pytest.mark.slow) for n in CASES]


def backward_inputs(spec, operands, seed: int) -> tuple[tuple, dict]:
    """Random cotangents (dO, dLSE), and what a backward kernel is given beside the operands."""
    do, dlse = reference.cotangents(operands, seed)
    o, lse = reference.forward(spec, operands)
    delta = vjp.delta(o.astype(spec.dtype), do, dlse)
    return (do, dlse), {"lse": lse.astype(jnp.float32), "delta": delta, "do": do}


def run(artifact, shape, operands, given: dict, seed: int, sm_count: int, strict=False) -> dict[str, np.ndarray]:
    """The kernel's outputs, poisoned before, by name; `given` are inputs that are no operands, `seed` the order's.

    Arrays of scratch memory in `given` are used, to be looked at afterwards. `strict` runs report what hardware
    forgives.
    """
    return reported(artifact, shape, operands, given, seed, sm_count, strict)[0]


def reported(artifact, shape, operands, given: dict, seed: int, sm_count: int, strict=False) -> tuple[dict, Any]:
    """`run`'s outputs, and the emulator's report."""
    dims = Dims(shape.B, shape.S, shape.T, shape.H, shape.K, sm_count)
    arrays = {b.name: _array(b, operands, given, dims) for b in artifact.buffers
              if b.kind != "scratch" or b.name in given}  # fmt: skip
    report = emulator.launch(artifact, arrays, dims, seed=seed, sm_count=sm_count, strict=strict)
    assert report.complaints == []
    return {b.name: arrays[b.name] for b in artifact.buffers if b.kind == "out"}, report


def _array(buffer, operands, given: dict, dims: Dims) -> np.ndarray:
    if buffer.kind == "out":
        poison = np.full(buffer.size_bytes(dims), 0xFF, np.uint8)
        return poison.view(jnp.dtype(buffer.dtype)).reshape(buffer.dims(dims))
    field, _, index = buffer.name.rpartition("_")
    if buffer.name in given:
        value = given[buffer.name]
    elif field in ("mask_operands", "score_operands"):
        value = getattr(operands, field)[int(index)]
    else:
        value = getattr(operands, buffer.name)
    return np.ascontiguousarray(np.asarray(value))
