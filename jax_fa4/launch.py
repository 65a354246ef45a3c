"""One device's custom call: from a pass of attention on local arrays to an FFI call that carries its kernels."""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from jax_fa4 import compile as compiler
from jax_fa4 import registry
from jax_fa4.artifact import Artifact
from jax_fa4.kernels.common import abi
from jax_fa4.plan import Pass, choose_plan, size_class
from jax_fa4.spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """What a kernel call is, apart from its arrays; the parameter of the primitive.

    Attributes:
      spec: what is computed.
      pass_: "forward" or "backward".
      archs: the architectures to carry modules for.
      emulated: run the one module on the software GPU (cpu platform) instead of on a CUDA device.
    """

    spec: AttentionSpec
    pass_: Pass
    archs: tuple[str, ...]
    emulated: bool = False

    @property
    def name(self) -> str:
        return f"attention {self.pass_}"

    @functools.cached_property
    def buffers(self) -> tuple[abi.Buffer, ...]:
        """Inputs, then outputs, without scratch."""
        make = abi.forward_buffers if self.pass_ == "forward" else abi.backward_buffers
        return make(self.spec)

    @property
    def inputs(self) -> tuple[abi.Buffer, ...]:
        return tuple(b for b in self.buffers if b.kind == "in")

    @property
    def outputs(self) -> tuple[abi.Buffer, ...]:
        return tuple(b for b in self.buffers if b.kind == "out")


def launch(call: KernelCall, *arrays: jax.Array) -> list[jax.Array]:
    """Runs the call on one device's arrays, in the order of `call.inputs`; results in the order of `call.outputs`.

    Arrays whose buffer begins with B may have any number of leading dims in its place, the same number in all of them.
    """
    lead = arrays[0].shape[:-3]
    flat = [
        x.reshape(math.prod(lead), *x.shape[len(lead) :]) if b.shape[:1] == ("B",) else x
        for b, x in zip(call.inputs, arrays, strict=True)
    ] if len(lead) != 1 else list(arrays)
    given = {b.name: x for b, x in zip(call.inputs, flat, strict=True)}
    (batch, rows, heads, _), (_, columns, kv_heads, _) = given["q"].shape, given["k"].shape
    dims = abi.Dims(batch, rows, columns, heads, kv_heads, 0)
    if any(isinstance(n, int) and n == 0 for n in (batch, rows, columns, heads)):
        results = _without_scores(call, dims, given)
    else:
        results = _call(call, dims, flat)
    if len(lead) == 1:
        return results
    return [
        x.reshape(*lead, *x.shape[1:]) if b.shape[:1] == ("B",) else x
        for b, x in zip(call.outputs, results, strict=True)
    ]


def _without_scores(call: KernelCall, dims: abi.Dims, given: dict[str, jax.Array]) -> list[jax.Array]:
    """The results of a call that has no scores: zeros, and for LSE -inf or the sink."""
    results = []
    for buffer in call.outputs:
        x = jnp.zeros(buffer.dims(dims), buffer.dtype)
        if buffer.name == "lse":
            x = x + given["sinks"][None, :, None] if call.spec.sink else x - jnp.inf
        results.append(x)
    return results


def _call(call: KernelCall, dims: abi.Dims, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    registry.register()
    size = size_class(dims.B, dims.S, dims.T, dims.H)
    artifacts = [compiler.artifact(call.spec, arch, size, call.pass_) for arch in call.archs]
    shared = [getattr(choose_plan(call.spec, arch, size, call.pass_), "shared_bytes", 0) for arch in call.archs]
    outputs = [jax.ShapeDtypeStruct(b.dims(dims), b.dtype) for b in call.outputs]
    attributes = _attributes(call, tuple(artifacts), tuple(shared))
    results = jax.ffi.ffi_call(registry.TARGET, [*outputs, *_scratch(artifacts, dims)])(*arrays, **attributes)
    return list(results)[: len(outputs)]


def _scratch(artifacts: Sequence[Artifact], dims: abi.Dims) -> list[jax.ShapeDtypeStruct]:
    """Scratch as further results: XLA plans its memory. The i-th is as large as the largest of all architectures."""
    per_arch = [[b.size_bytes(dims) for b in a.buffers if b.kind == "scratch"] for a in artifacts]
    slots = [
        functools.reduce(core.max_dim, (sizes[i] for sizes in per_arch if i < len(sizes)))
        for i in range(max(map(len, per_arch)))
    ]
    return [jax.ShapeDtypeStruct((bytes_,), jnp.uint8) for bytes_ in slots]


@functools.lru_cache(maxsize=256)
def _attributes(call: KernelCall, artifacts: tuple[Artifact, ...], shared: tuple[int, ...]) -> dict[str, Any]:
    """The custom call's attributes; ffi/call_site.h says what they are."""
    names = [b.name for b in call.inputs]
    sources = {"B": ("q", 0), "S": ("q", 1), "T": ("k", 1), "H": ("q", 2), "K": ("k", 2)}
    attributes: dict[str, Any] = {
        "kernel": call.name,
        "archs": " ".join(a.arch for a in artifacts),
        "symbols": " ".join(a.symbol for a in artifacts),
        "buffer_counts": np.array([len(a.buffers) for a in artifacts]),
        "shared_bytes": np.array(shared),
        "dims": np.array([(names.index(name), axis) for name, axis in sources.values()]).reshape(-1),
    }
    for artifact in artifacts:
        attributes[artifact.arch] = base64.b64encode(artifact.object).decode()
    if call.emulated:
        attributes["ptx"] = artifacts[0].ptx
    text = "\n".join(f"{name}={value.tolist() if isinstance(value, np.ndarray) else value}"
                     for name, value in sorted(attributes.items()))
    return attributes | {"key": hashlib.sha256(text.encode()).hexdigest()}
