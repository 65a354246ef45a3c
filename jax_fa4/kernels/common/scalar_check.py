"""Which user functions kernels can compute. Without the compiler, so that a plan can be chosen where there is none."""

from __future__ import annotations

from typing import Any

from jax_fa4.errors import Unsupported

PRIMITIVES = frozenset(
    "abs add add_any and broadcast_in_dim ceil clamp concatenate convert_element_type copy cos div dynamic_slice eq "
    "erf exp exp2 floor gather ge gt integer_pow le log log1p log2 logistic lt max min mul ne neg not "
    "one_minus_square or pow rem reshape rsqrt select_n shift_left shift_right_arithmetic sign sin slice sqrt "
    "square squeeze stop_gradient sub tanh xor".split()
)
"""JAX primitives that `scalar_jaxpr` has a rule for."""

_CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call")


def check(function: Any) -> None:
    """Raises `Unsupported` if kernels cannot compute `function` (a `ScalarFunction`), naming the primitive."""
    _check(function.jaxpr.jaxpr)


def _check(jaxpr: Any) -> None:
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        inner = inner_jaxpr(equation)
        if inner is not None:
            _check(inner.jaxpr)
        elif name not in PRIMITIVES:
            raise Unsupported(f"kernels cannot compute the primitive {name!r} of a user function: {equation}")
        slices = name == "slice" and equation.outvars[0].aval.size != 1
        if slices or (name == "gather" and not _is_element_read(equation)):
            raise Unsupported(f"kernels read single elements of arrays, not {equation}")


def inner_jaxpr(equation: Any) -> Any:
    """The closed jaxpr that an equation calls, or None."""
    if equation.primitive.name in _CALLS:
        return equation.params.get("jaxpr") or equation.params.get("call_jaxpr")
    return None


def _is_element_read(equation: Any) -> bool:
    sizes = equation.params["slice_sizes"]
    dims = equation.params["dimension_numbers"]
    return all(size == 1 for size in sizes) and len(dims.collapsed_slice_dims) == len(sizes)
