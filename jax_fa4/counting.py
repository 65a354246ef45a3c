"""What kernels cost, from the software GPU's counts: work by unit, and how many cycles each unit needs at the least."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax_fa4 import emulator


@dataclasses.dataclass(frozen=True)
class UnitRates:
    """What one streaming multiprocessor does in a clock cycle.

    `lanes` gives lanes of instructions by unit: a warp's instruction is 32. They are NVIDIA's published throughputs of
    the arithmetic instructions; a packed f32x2 instruction is two operations of the FMA pipe.
    """

    name: str
    tensor_flops: int
    shared_bytes: int
    lanes: dict[str, int]


_LANES = {"mufu": 16, "fma": 128, "fma_packed": 64, "alu": 64, "convert": 64, "shuffle": 32, "predicate": 64}

RATES = {
    90: UnitRates("H200", 4096, 128, _LANES),
    100: UnitRates("B200", 8192, 128, _LANES),
    103: UnitRates("B300", 8192, 128, {**_LANES, "mufu": 32}),
}
"""By compute capability times ten."""


def bounds(kernel: dict[str, Any], architecture: int, sm_count: int) -> dict[str, float]:
    """Cycles that each unit needs for one launch of `kernel` (an entry of `Report.kernels`), at the least.

    The work is spread evenly over the multiprocessors that have any. The largest is a lower bound of the launch's time.
    Moves, which the assembler removes, and the operands that tensor cores read from shared memory are not counted.
    """
    rates = RATES[architecture]
    share = max(1, min(kernel["ctas"] // kernel["launches"], sm_count)) * kernel["launches"]
    cycles = {"tensor": kernel["tensor_flops"] / rates.tensor_flops}
    for unit, lanes in rates.lanes.items():
        cycles[unit] = 32 * kernel["units"][unit] / lanes
    # The FMA pipe takes single and packed instructions.
    cycles["fma"] += cycles.pop("fma_packed")
    cycles["shared_memory"] = (kernel["bytes"]["shared_read"] + kernel["bytes"]["shared_written"]) / rates.shared_bytes
    return {unit: value / share for unit, value in cycles.items()}


def roles_of(mask: int, roles: Mapping[str, range]) -> str:
    """Names of the roles of the warps whose bits are set in `mask`."""
    role_of = {warp: role for role, warps in roles.items() for warp in warps}
    names = dict.fromkeys(role_of.get(warp, "other warps") for warp in range(32) if mask >> warp & 1)
    return ", ".join(names) if len(names) < 4 else "all roles"


def by_role(kernel: Mapping[str, Any], roles: Mapping[str, range]) -> dict[str, dict[str, int]]:
    """Instructions by unit that the warps of each role executed. `kernel` is an entry of `Report.kernels`, `roles` are
    those of its plan."""
    sums: dict[str, dict[str, int]] = {}
    for warp, counted in enumerate(kernel["warps"]):
        units = sums.setdefault(roles_of(1 << warp, roles), {})
        for unit, count in counted["units"].items():
            units[unit] = units.get(unit, 0) + count
    order = [*roles, "other warps"]
    return dict(sorted(sums.items(), key=lambda item: order.index(item[0])))


def votes(kernel: Mapping[str, Any], roles: Mapping[str, range]) -> dict[str, list[tuple[int, int, int]]]:
    """Warp votes by the roles that take them: (PTX line, votes, how many came out true).

    A kernel that decides per warp whether to rescale does it by a vote: true is "rescale" for the correction role of
    the sm_100a forward kernel, and "no need to" for the consumers of the sm_90a one.
    """
    warps = {line: mask for (line, _), mask in zip(kernel["lines"], kernel["line_warps"], strict=True)}
    found: dict[str, list[tuple[int, int, int]]] = {}
    for line, times, true in kernel["votes"]:
        found.setdefault(roles_of(warps[line], roles), []).append((line, times, true))
    return found


def role_table(kernel: Mapping[str, Any], roles: Mapping[str, range]) -> str:
    """`by_role` and `votes` as text."""
    columns = by_role(kernel, roles)
    units = [unit for unit in kernel["units"] if kernel["units"][unit]]
    lines = [f"{short_name(kernel['kernel'])}, by role:", " " * 22 + "".join(f"  {role:>11}" for role in columns)]
    for unit in sorted(units, key=lambda unit: -kernel["units"][unit]):
        lines.append(f"  {unit:20}" + "".join(f"  {columns[role][unit]:{max(11, len(role))},}" for role in columns))
    for role, outcomes in votes(kernel, roles).items():
        lines += [f"  {role}: {true:,} of {n:,} votes came out true (PTX line {line})" for line, n, true in outcomes]
    return "\n".join(lines)


def _sum(into: dict[str, Any], kernel: dict[str, Any]) -> None:
    for key, value in kernel.items():
        if isinstance(value, dict):
            _sum(into.setdefault(key, {}), value)
        elif isinstance(value, int):
            into[key] = into.get(key, 0) + value


def summarize(reports: Sequence[emulator.Report]) -> dict[str, Any]:
    """One dict of several runs: "kernel_names", "tensor_flops", "units" and the other sums, and "kernels" by name with
    the same sums for each and "bound_cycles" by unit."""
    total: dict[str, Any] = {"kernel_names": [], "kernels": {}, "tensor_flops": 0, "complaints": []}
    for report in reports:
        total["complaints"] += report.complaints
        for kernel in report.kernels:
            name = kernel["kernel"]
            if name not in total["kernels"]:
                total["kernel_names"].append(name)
            sums = total["kernels"].setdefault(name, {})
            _sum(sums, kernel)
            _sum(total, kernel)
            sums["bound_cycles"] = bounds(sums, report.architecture, report.sm_count)
    return total


def counters() -> dict[str, Any]:
    """What the kernels executed since the last call, inside `jax_fa4.emulate`: see `summarize`. Exact, and the same
    whenever the same program runs under the same seed."""
    return summarize(emulator.take_reports())


def short_name(kernel: str) -> str:
    """A kernel's name without the types that the compiler appends to it."""
    name = kernel.removeprefix("kernel_cutlass_")
    return name.split("_tensor")[0].split("_object_at")[0][:60]


def table(summary: dict[str, Any]) -> str:
    """The counters of each kernel as text."""
    lines = []
    for name in summary["kernel_names"]:
        k = summary["kernels"][name]
        lines.append(
            f"{short_name(name)}: {k['launches']} launches, {k['ctas']} CTAs, {k['instructions']:,} warp instructions"
        )
        lines.append(
            f"  tensor {k['tensor_flops']:,} FLOP  " + "  ".join(f"{s} x{n:,}" for s, n in k.get("mma", {}).items())
        )
        units = {u: n for u, n in k["units"].items() if n}
        width = max(map(len, units))
        for unit, count in sorted(units.items(), key=lambda item: -item[1]):
            lines.append(f"  {unit:{width}} {count:12,}  {100 * count / k['instructions']:5.1f} %")
        lines.append("  bytes  " + "  ".join(f"{s} {n:,}" for s, n in k["bytes"].items() if n))
        most = sorted(k["bound_cycles"].items(), key=lambda item: -item[1])
        lines.append(
            "  cycles at the least, by unit:  " + "  ".join(f"{unit} {value:,.0f}" for unit, value in most if value)
        )
    return "\n".join(lines)
