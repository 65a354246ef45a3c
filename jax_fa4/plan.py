"""Which kernel serves a spec on an architecture, and how: the one place where kernels refuse a spec."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jax_fa4 import masks
from jax_fa4.errors import Unsupported
from jax_fa4.kernels.common import abi, scalar_check
from jax_fa4.scalar import ScalarFunction
from jax_fa4.scores import ScoreMap, SoftCap
from jax_fa4.spec import AttentionSpec

Pass = Literal["forward", "backward"]
PASSES: tuple[Pass, ...] = ("forward", "backward")

LARGEST_SOFT_CAP = 1e4
"""Scores are then off by a hundredth at the most, as far as bfloat16 rounds P (`kernels.common.mask.soft_cap`)."""


class SizeClass(enum.Enum):
    """What a plan may know of run-time sizes; part of an artifact's key, so few on purpose."""

    MANY_TILES = "many tiles"
    """Query tiles fill the device; also every call whose sizes are not known when it is traced."""
    FEW_TILES = "few tiles"
    """Less than half the multiprocessors have a query tile, and the keys are long enough to be split among them."""


def size_class(batch: Any, rows: Any, columns: Any, heads: Any) -> SizeClass:
    """The size class of a call with B, S, T and H of these values (ints; symbolic sizes count as many tiles)."""
    if not all(isinstance(size, int) for size in (batch, rows, columns, heads)):
        return SizeClass.MANY_TILES
    tiles = batch * heads * -(-rows // 256)
    few = tiles <= 64 and columns >= 1024
    return SizeClass.FEW_TILES if few else SizeClass.MANY_TILES


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Where one kernel is: "module:function" of its plan (imports no compiler), "module:class" of the kernel itself.

    `by_size`: whether its plan function takes the size class after the spec and the architecture.
    """

    plan: str
    kernel: str
    by_size: bool = False

    def make_plan(self, spec: AttentionSpec, arch: str, size: SizeClass) -> Any:
        function = _load(self.plan)
        return function(spec, arch, size) if self.by_size else function(spec)


_HOPPER = {
    "forward": Kernel("jax_fa4.kernels.sm90.plans:forward_plan", "jax_fa4.kernels.sm90.fwd:Forward"),
    "backward": Kernel("jax_fa4.kernels.sm90.bwd.plan:backward_plan", "jax_fa4.kernels.sm90.bwd.kernel:Backward"),
}
_BLACKWELL = {
    "forward": Kernel("jax_fa4.kernels.sm100.plans:forward_plan", "jax_fa4.kernels.sm100.fwd:Forward", by_size=True),
    "backward": Kernel("jax_fa4.kernels.sm100.bwd.plan:backward_plan", "jax_fa4.kernels.sm100.bwd.kernel:Backward"),
}
KERNELS: dict[str, dict[str, Kernel]] = {"sm_90a": _HOPPER, "sm_100a": _BLACKWELL, "sm_103a": _BLACKWELL}
"""For each architecture, the kernel of each pass."""

ARCHITECTURES = tuple(KERNELS)
DEFAULT_TARGETS = ("sm_90a", "sm_100a")
"""What a program lowered for CUDA carries on a machine without a GPU, unless `target` says otherwise."""


def check_architecture(arch: str) -> str:
    """`arch`, or Unsupported if there are no kernels for it."""
    if arch not in KERNELS:
        raise Unsupported(f"there are no kernels for {arch}, only for {', '.join(ARCHITECTURES)}")
    return arch


@functools.lru_cache(maxsize=4096)
def choose_plan(spec: AttentionSpec, arch: str, size: SizeClass, pass_: Pass) -> Any:
    """The plan (a frozen dataclass of that kernel) for a spec on an architecture.

    Raises:
      Unsupported: no kernel does it; the reason says what stands in the way.
    """
    if pass_ not in KERNELS[check_architecture(arch)]:
        raise Unsupported(f"there is no {pass_} kernel for {arch}")
    _check(spec, pass_)
    try:
        # Slopes of score functions are traced here; in a caller's mesh they would hold what places scalars in it.
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return KERNELS[arch][pass_].make_plan(spec, arch, size)
    except ValueError as error:  # a plan that does not fit its budgets says both numbers
        raise Unsupported(f"no {pass_} plan fits {arch}: {error}") from error


def _check(spec: AttentionSpec, pass_: Pass) -> None:
    """Raises Unsupported for what no kernel of any architecture does."""
    if spec.dtype not in ("bfloat16", "float16"):
        raise Unsupported(f"kernels take bfloat16 and float16, not {spec.dtype}")
    for name, dim in (("head dim", spec.head_dim), ("value head dim", spec.value_head_dim)):
        if dim % 8 or dim > 256:
            raise Unsupported(f"kernels take a {name} that is a multiple of 8 up to 256, not {dim}")
    if spec.has_bias:
        raise Unsupported("kernels have no bias array")
    if any(isinstance(part, masks.MaskArray) for part in spec.mask.parts):
        raise Unsupported("kernels have no mask array; write the mask as a function")
    for mod in spec.score_mods:
        if isinstance(mod, SoftCap) and mod.cap > LARGEST_SOFT_CAP:
            raise Unsupported(f"kernels' soft caps are exact to about a millionth of the cap, and take one up to "
                              f"{LARGEST_SOFT_CAP:g}, not {mod.cap:g}")
    score_functions = [mod.function for mod in spec.score_mods if isinstance(mod, ScoreMap)]
    functions = [p.function for p in spec.mask.parts if isinstance(p, masks.Predicate)] + score_functions
    for function in functions:
        scalar_check.check(function)
        for dtype in _operand_dtypes(function):
            try:
                abi.itemsize(str(dtype))
            except ValueError as error:
                raise Unsupported(f"kernels cannot read an array of a user function: {error}") from error
    read = [dtype for function in score_functions for dtype in _operand_dtypes(function)]
    if pass_ == "backward" and any(jnp.issubdtype(dtype, jnp.inexact) for dtype in read):
        raise Unsupported("kernels give no gradients of floating arrays that score functions read")


def _operand_dtypes(function: ScalarFunction) -> list[Any]:
    avals = function.jaxpr.in_avals
    return [aval.dtype for aval in avals[len(avals) - function.operand_count :]]


def make_kernel(spec: AttentionSpec, arch: str, size: SizeClass, pass_: Pass) -> Any:
    """The kernel object, ready to compile. Imports the compiler."""
    plan = choose_plan(spec, arch, size, pass_)
    return _load(KERNELS[arch][pass_].kernel)(spec, plan)


def refusal(spec: AttentionSpec, arch: str, passes: tuple[Pass, ...] = PASSES) -> str | None:
    """Why kernels for `arch` do not do a spec, as a clause; None if they do."""
    try:
        for pass_ in passes:
            choose_plan(spec, arch, SizeClass.MANY_TILES, pass_)
    except Unsupported as error:
        return error.reason
    return None


def _load(where: str) -> Any:
    module, name = where.split(":")
    return getattr(importlib.import_module(module), name)
