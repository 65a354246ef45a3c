"""The kernels as a backend: forward and backward of a spec as one primitive, on CUDA devices and on the software GPU.

The primitive carries what JAX has to know: types with shardings and varying axes, batching, lowering per platform. How
it splits over devices is `partition`, what a device runs is `launch`. It has no derivatives: those are attention's own.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import batching, mlir
from jax.sharding import PartitionSpec

from jax_fa4 import compile as compiler
from jax_fa4 import indexing, plan, registry, targets
from jax_fa4.blockwise import Gradients
from jax_fa4.errors import Unsupported
from jax_fa4.launch import KernelCall, launch
from jax_fa4.operands import Operands
from jax_fa4.partition import partitioned
from jax_fa4.spec import AttentionSpec

EXPORT_CHECKS = (jax.export.DisabledSafetyCheck.custom_call(registry.TARGET),)
"""For `jax.export.export(..., disabled_checks=)`: JAX refuses to export custom calls that it does not know."""

_EMULATE = "emulate:"


def forward(backend: str, spec: AttentionSpec, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """(o [B, S, H, E], lse float32 [B, H, S]) by the kernel of "cuda" or "emulate:<arch>"."""
    o, lse = _run(backend, spec, "forward", _named(operands))
    return o, lse


def backward(
    backend: str, spec: AttentionSpec, operands: Operands, lse: jax.Array, delta: jax.Array, do: jax.Array
) -> Gradients:
    """dQ, dK, dV by the kernel of "cuda" or "emulate:<arch>"; see `blockwise.backward`."""
    named = _named(operands) | {"lse": lse, "delta": delta, "do": do.astype(spec.dtype)}
    dq, dk, dv = _run(backend, spec, "backward", named)
    return Gradients(dq, dk, dv, None, (None,) * len(operands.score_operands))


def unsupported(backend: str, spec: AttentionSpec, operands: Operands, pass_: plan.Pass = "forward") -> str | None:
    """Why the kernels cannot do one pass of a call, as a clause; None if they can.

    Depends on the spec and on what is installed, not on the arrays or on a GPU being present.
    """
    try:
        archs = _archs(backend, spec, pass_)
        registry.library_path()
    except Unsupported as error:
        return error.reason
    except FileNotFoundError as error:
        return str(error)
    missing = [arch for arch in archs if not compiler.available(spec, arch, pass_)]
    if missing:
        reason = f"its {pass_} kernel for {', '.join(missing)} is in no cache and no compiler is installed"
        if targets.has_gpu():  # `auto` goes on with XLA, many times slower: that should not happen unseen
            warnings.warn(f"jax_fa4 cannot use its kernels on this GPU: {reason}. Install nvidia-cutlass-dsl, or set "
                          "JAX_FA4_CACHE_DIR to a cache filled from this version's sources", stacklevel=2)
        return reason
    return None


def why_not(backend: str, spec: AttentionSpec, operands: Operands) -> str | None:
    """`unsupported`, or why this machine cannot run the kernels."""
    reason = unsupported(backend, spec, operands)
    if reason is not None:
        return reason
    if not backend.startswith(_EMULATE) and not targets.has_gpu():
        return "this process has no NVIDIA GPU"
    return None


def _archs(backend: str, spec: AttentionSpec, pass_: plan.Pass) -> tuple[str, ...]:
    """The architectures that a call carries: those wanted, without those of the default that have no plan."""
    emulated = backend.startswith(_EMULATE)
    wanted = (backend.removeprefix(_EMULATE),) if emulated else targets.architectures()
    refusals = {arch: plan.refusal(spec, arch, (pass_,)) for arch in wanted}
    able = tuple(arch for arch, reason in refusals.items() if reason is None)
    if able == wanted or (able and wanted == plan.DEFAULT_TARGETS):
        return able
    raise Unsupported("; ".join(f"{arch}: {reason}" for arch, reason in refusals.items() if reason))


def _named(operands: Operands) -> dict[str, Any]:
    """The operands by the names that buffers have."""
    named = {field.name: getattr(operands, field.name) for field in dataclasses.fields(operands)}
    for name in ("mask_operands", "score_operands"):
        named |= {f"{name}_{i}": x for i, x in enumerate(named.pop(name))}
    return named


def _run(backend: str, spec: AttentionSpec, pass_: plan.Pass, named: dict[str, Any]) -> list[jax.Array]:
    try:
        archs = _archs(backend, spec, pass_)
    except Unsupported as error:  # the backward pass: forward was asked before (`unsupported`)
        raise Unsupported(f"backend {backend!r} cannot run the {pass_} of this call: {error.reason}. Asked for {spec}. "
                          "Use backend='auto' or 'xla'") from None
    call = KernelCall(spec, pass_, archs, backend.startswith(_EMULATE))
    return attention_p.bind(*(named[buffer.name] for buffer in call.inputs), call=call)


attention_p = Primitive("fa4_kernel")
attention_p.multiple_results = True


@functools.lru_cache(maxsize=512)
def _eager(call: KernelCall):
    return jax.jit(functools.partial(attention_p.bind, call=call))


@attention_p.def_impl
def _impl(*arrays, call: KernelCall):
    with jax.disable_jit(False):  # to run one primitive is to compile it, as JAX does for its own
        return _eager(call)(*arrays)


@attention_p.def_abstract_eval
def _abstract_eval(*avals, call: KernelCall):
    by_name = {b.name: a for b, a in zip(call.inputs, avals, strict=True)}
    q, k = by_name["q"], by_name["k"]
    lead = q.shape[:-3]
    sizes = {"S": q.shape[-3], "H": q.shape[-2], "T": k.shape[-3], "K": k.shape[-2]}
    q_spec, k_spec = (_full_spec(aval) for aval in (q, k))
    splits = {"S": q_spec[-3], "H": q_spec[-2], "T": k_spec[-3], "K": k_spec[-2]}
    varying = frozenset().union(*(aval.manual_axis_type.varying for aval in avals))

    def result(buffer):
        shape = (*lead, *(sizes.get(size, size) for size in buffer.shape[1:]))
        like = k if "K" in buffer.shape else q
        batch = (k_spec if "K" in buffer.shape else q_spec)[:-3]
        spec = PartitionSpec(*batch, *(splits.get(size) for size in buffer.shape[1:]))
        return jax.core.ShapedArray(
            shape,
            jnp.dtype(buffer.dtype),
            sharding=like.sharding.update(spec=spec),
            manual_axis_type=jax.sharding.ManualAxisType(varying=varying),
        )

    return [result(buffer) for buffer in call.outputs]


def _full_spec(aval: Any) -> list[Any]:
    return [*aval.sharding.spec, *[None] * (len(aval.shape) - len(aval.sharding.spec))]


def _batch(axis_data, arrays: Sequence[jax.Array], dims: Sequence[int | None], *, call: KernelCall):
    """A mapped axis becomes a further batch dim. Where an operand without batch is mapped, the calls run in turn."""
    by_batch = [b.shape[:1] == ("B",) for b in call.inputs]
    if any(d is not None and not batched for d, batched in zip(dims, by_batch, strict=True)):
        mapped = [x for x, d in zip(arrays, dims, strict=True) if d is not None]
        front = [jnp.moveaxis(x, d, 0) for x, d in zip(mapped, (d for d in dims if d is not None), strict=True)]

        def one(values):
            rest = iter(values)
            return attention_p.bind(
                *(x if d is None else next(rest) for x, d in zip(arrays, dims, strict=True)), call=call
            )

        out = jax.lax.map(one, front)
        return out, [0] * len(out)
    moved = []
    for x, d, batched in zip(arrays, dims, by_batch, strict=True):
        if batched and d is None:
            x = batching.broadcast(x, axis_data.size, 0, axis_data.explicit_mesh_axis)
        moved.append(x if not batched or d is None else jnp.moveaxis(x, d, 0))
    out = attention_p.bind(*moved, call=call)
    return out, [0] * len(out)


batching.fancy_primitive_batchers[attention_p] = _batch


def _lower(ctx: Any, *values, call: KernelCall):
    ins, outs = ([jax.core.ShapedArray(a.shape, a.dtype) for a in avals] for avals in (ctx.avals_in, ctx.avals_out))
    inner = ctx.replace(avals_in=ins, avals_out=outs)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        if not _is_partitioned(ctx.module_context.axis_context):
            return mlir.lower_fun(functools.partial(_local, call), multiple_results=True)(inner, *values)
        results = mlir.lower_fun(partitioned(call), multiple_results=True)(inner, *values)
    # The partitioner's callback sees the kernels, the program's text does not: this names them, for caches keyed by it.
    name = ir.StringAttr.get(hashlib.sha256(repr(call).encode()).hexdigest())
    results[0].owner.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get({"jax_fa4": name})
    return results


def _local(call: KernelCall, *arrays):
    if arrays[0].ndim > 4 and indexing.has_functions(call):
        here, values = indexing.shifted(call, arrays, 0, 0)
        return launch(here, *values)
    return launch(call, *arrays)


def _is_partitioned(context: Any) -> bool:
    """Whether the program is split over devices by the partitioner, on a mesh that is known.

    Inside `jax.shard_map` every device has its own arrays. Where only some of the mesh's axes are manual the
    partitioner's callback would get layouts without a mesh: there the call is left whole, and arrays are gathered.
    """
    mesh = getattr(context, "abstract_mesh", None)
    return mesh is not None and not mesh.empty and getattr(context, "num_devices", 1) > 1


def _lower_cuda(ctx, *values, call: KernelCall):
    if call.emulated and _is_only_platform(ctx):
        raise Unsupported("backend 'emulate:...' runs on the cpu platform, and this program is lowered for CUDA: put "
                          "its arrays on jax.devices('cpu'), or use backend='cuda'")
    return _lower(ctx, *values, call=call)


def _lower_cpu(ctx, *values, call: KernelCall):
    if not call.emulated and _is_only_platform(ctx):
        raise Unsupported("backend 'cuda' needs an NVIDIA GPU, and this program is lowered for the CPU: use "
                          "backend='auto' or 'xla', or 'emulate:<arch>' to run the kernel on the software GPU")
    return _lower(ctx, *values, call=call)


def _is_only_platform(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether a program for one platform is made. In one for several, JAX lowers each branch of `platform_dependent`
    for all of them, and the custom call itself refuses the wrong platform when a program that runs it is compiled."""
    return len(ctx.module_context.platforms) == 1


mlir.register_lowering(attention_p, _lower_cuda, platform="cuda")
mlir.register_lowering(attention_p, _lower_cpu, platform="cpu")
# The partitioner's callback is made when the program is lowered, and needs its devices by then.
from jax._src import dispatch  # noqa: E402

dispatch.prim_requires_devices_during_lowering.add(attention_p)
