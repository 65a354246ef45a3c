"""Calls of our own kernels, below JAX's custom call: a case of `jax_fa4.cases`, an architecture and a pass."""

import dataclasses
import functools
import zlib
from typing import Literal

import jax.numpy as jnp
import numpy as np

from jax_fa4 import cases, compile, emulator, launch, plan, reference, vjp
from jax_fa4.artifact import Artifact
from jax_fa4.kernels.common.abi import Buffer, Dims
from jax_fa4.operands import Operands
from jax_fa4.spec import Arguments, AttentionSpec, make_spec


@dataclasses.dataclass(frozen=True)
class Call:
    """`sizes` change the case's shape. Its arrays are always the same."""

    case: str
    pass_: Literal["forward", "backward"]
    arch: str
    sizes: tuple[tuple[str, int], ...] = ()

    @property
    def name(self) -> str:
        return "_".join([self.pass_, self.case, *(f"{name}{size}" for name, size in self.sizes)])

    @property
    def resized(self) -> cases.Case:
        case = next(case for case in cases.CASES if case.name == self.case)
        return case.resized(**dict(self.sizes)) if self.sizes else case

    @property
    def dims(self) -> Dims:
        shape = self.resized.shape
        return Dims(shape.B, shape.S, shape.T, shape.H, shape.K, emulator.SM_COUNT[self.arch])

    @property
    def seed(self) -> int:
        return zlib.crc32(self.name.encode())

    @functools.cached_property
    def drawn(self) -> tuple[AttentionSpec, Operands]:
        return make_spec(Arguments(**self.resized.make(self.seed)))

    @property
    def spec(self) -> AttentionSpec:
        return self.drawn[0]

    @property
    def kernel_call(self) -> launch.KernelCall:
        return launch.KernelCall(self.spec, self.pass_, (self.arch,))

    def inputs(self) -> dict[str, np.ndarray]:
        """Arrays by their buffers' names."""
        spec, operands = self.drawn
        given = {}
        if self.pass_ == "backward":
            do, dlse = reference.cotangents(operands, self.seed)
            o, lse = reference.forward(spec, operands)
            given = {"lse": lse.astype(jnp.float32), "delta": vjp.delta(o.astype(spec.dtype), do, dlse), "do": do}
        arrays = {}
        for buffer in self.kernel_call.inputs:
            field, _, index = buffer.name.rpartition("_")
            several = field in ("mask_operands", "score_operands")
            value = getattr(operands, field)[int(index)] if several else given.get(buffer.name)
            value = getattr(operands, buffer.name) if value is None else value
            arrays[buffer.name] = np.ascontiguousarray(np.asarray(value))
        return arrays

    def compiled(self) -> Artifact:
        """Raises jax_fa4.errors.Unsupported for what no kernel does."""
        dims = self.dims
        return compile.artifact(self.spec, self.arch, plan.size_class(dims.B, dims.S, dims.T, dims.H), self.pass_)

    def emulate(self, artifact: Artifact, arrays: dict[str, np.ndarray],
                **settings) -> tuple[dict[str, np.ndarray], emulator.Report]:
        """The outputs by name, from memory poisoned before, and the report."""
        arrays = {name: array.copy() for name, array in arrays.items()}
        outputs = {b.name: poisoned(b, self.dims) for b in artifact.buffers if b.kind == "out"}
        report = emulator.launch(artifact, arrays | outputs, self.dims, **settings)
        return outputs, report


def poisoned(buffer: Buffer, dims: Dims) -> np.ndarray:
    return np.full(buffer.size_bytes(dims), 0xFF, np.uint8).view(jnp.dtype(buffer.dtype)).reshape(buffer.dims(dims))
