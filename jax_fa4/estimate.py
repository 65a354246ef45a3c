"""How long a kernel may take on the real part, from a timed run of the software GPU.

A timed run gives the cycles of each cluster alone (`Settings(timing=True)`). Here clusters are laid onto the part's
multiprocessors in launch order, as hardware does, each starting when one ends.

It is for comparing designs and for finding what they wait for. Checked on FlashAttention's published kernels (D=128,
one bfloat16 head): sm_100a, 4096 rows, full 1679 TFLOP/s (published 1535 to 1613), causal 1499 (1418); sm_90a, 2048
rows, full 805 at boost clock, or 596 at the clock that an H200's power limit leaves a large GEMM (measured at 4096
rows: 579 to 637).
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence
from typing import Any

from jax_fa4 import counting

CLOCK_HZ = {90: 1.755e9, 100: 1.85e9, 103: 1.92e9}
"""Boost clock of an H200, a B200 and a B300; a card that throttles on power runs slower."""

LAUNCH_CYCLES = 1500
"""From one cluster's end to the next one's first instruction, and a kernel's start."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """`cycles` of the whole launch, `seconds` and `tflops` (of the tensor cores' work, counted) at the boost clock."""

    kernel: str
    cycles: int
    seconds: float
    tflops: float
    utilization: dict[str, float]
    stalls: list[tuple[int, int, str, int]]

    def __str__(self) -> str:
        units = "  ".join(f"{unit} {100 * part:.0f} %" for unit, part in self.utilization.items())
        rows = [f"  CTA {cta} warp {warp:2}: {cycles:8,} cycles, {why}" for cta, warp, why, cycles in self.stalls]
        head = f"{self.kernel}: {self.cycles:,} cycles, {1e6 * self.seconds:.1f} us, {self.tflops:.0f} TFLOP/s"
        return "\n".join([head, f"  busy in the first cluster: {units}", *rows])


def launch_cycles(cluster_cycles: Sequence[int], slots: int) -> int:
    """Cycles until the last of the clusters ends, `slots` of them at a time, in order. Those of no cycles never began:
    others took over their work (cluster launch control)."""
    cluster_cycles = [cycles for cycles in cluster_cycles if cycles]
    ends = [0] * max(1, min(slots, len(cluster_cycles)))
    for cycles in cluster_cycles:
        heapq.heapreplace(ends, ends[0] + LAUNCH_CYCLES + cycles)
    return max(ends)


def estimate(kernel: dict[str, Any], architecture: int, sm_count: int, most: int = 12) -> Estimate:
    """From an entry of `Report.kernels` of a timed run. `stalls` are the `most` longest waits: (CTA, warp, "PTX line n:
    what", cycles)."""
    timing = kernel["timing"]
    cycles = launch_cycles(kernel["cluster_cycles"], sm_count // timing["multiprocessors"])
    seconds = cycles / CLOCK_HZ[architecture]
    span = max(1, timing["cycles"]) * timing["multiprocessors"]
    quarters = ("issue", "alu", "fma", "mufu", "convert", "tensor_memory")
    busy = {unit: n / span / (4 if unit in quarters else 1) for unit, n in timing["busy"].items()}
    waits = [
        (warp["cta"], warp["warp"], f"PTX line {line}: {what}", n)
        for warp in timing["warps"]
        for line, what, n, _ in warp["stalls"]
    ]
    return Estimate(
        counting.short_name(kernel["kernel"]), cycles, seconds, kernel["tensor_flops"] / seconds / 1e12,
        dict(sorted(busy.items(), key=lambda item: -item[1])), sorted(waits, key=lambda wait: -wait[-1])[:most],
    )
