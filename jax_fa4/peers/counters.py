"""Our Blackwell forward kernel beside flash-attn-4's published one, unit by unit, on the software GPU."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_fa4 import compile, counting, emulator, masks, plan, reference
from jax_fa4.kernels.common.abi import Dims
from jax_fa4.operands import Operands
from jax_fa4.peers import compiled
from jax_fa4.spec import AttentionSpec

ARCH, SM_COUNT = "sm_100a", 148


@dataclasses.dataclass(frozen=True)
class Case:
    """Attention of one head on itself: batch 1, S = T = `length`, D = E = `head_dim` (64 or 128), bfloat16."""

    head_dim: int
    causal: bool
    length: int

    def __str__(self) -> str:
        length = f"{self.length // 1024}k" if self.length % 1024 == 0 else str(self.length)
        return f"D{self.head_dim} {'causal' if self.causal else 'full'} {length}"


CASES = tuple(Case(*case) for case in itertools.product((64, 128), (False, True), (1024, 4096)))


def count(case: Case, **settings) -> dict[str, dict[str, Any]]:
    """{"ours", "theirs"}: a kernel's counters with its bound cycles (`counting.summarize`), on the same inputs.

    Both results are compared with the float64 oracle. `settings` are of `emulator.Settings`.

    Raises:
      compiled.MissingPeer: flash-attn-4 is not installed.
    """
    mask = masks.Causal() if case.causal else masks.Full()
    spec = AttentionSpec("bfloat16", case.head_dim, case.head_dim, scale=case.head_dim**-0.5, mask=mask)
    rng = np.random.default_rng(0)
    shape = (1, case.length, 1, case.head_dim)
    q, k, v = (compiled.aligned(shape, jnp.bfloat16, rng.standard_normal(shape)) for _ in range(3))
    exact = reference.oracle(spec, Operands(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)))
    reports = {}
    for who, run in (("ours", _ours), ("theirs", _theirs)):
        o, lse = compiled.aligned(shape, jnp.bfloat16), compiled.aligned((1, 1, case.length), np.float32)
        reports[who] = run(case, spec, (q, k, v, o, lse), {"threads": 1, "sm_count": SM_COUNT} | settings)
        error = np.linalg.norm(o.astype(np.float64) - exact["o"]) / np.linalg.norm(exact["o"])
        if not error < 3e-3 or not np.abs(lse - exact["lse"]).max() < 1e-4:
            raise RuntimeError(f"{case}: {who} differs from the oracle: O by {error:.1e} in relative norm")
    summaries = {who: counting.summarize([report]) for who, report in reports.items()}
    return {who: summary["kernels"][summary["kernel_names"][0]] for who, summary in summaries.items()}


def _ours(case: Case, spec: AttentionSpec, arrays: tuple, settings: dict) -> emulator.Report:
    artifact = compile.artifact(spec, ARCH, plan.SizeClass.MANY_TILES, "forward")
    named = dict(zip(("q", "k", "v", "o", "lse"), arrays, strict=True))
    return emulator.launch(artifact, named, Dims(1, case.length, case.length, 1, 1, SM_COUNT), **settings)


def _theirs(case: Case, spec: AttentionSpec, arrays: tuple, settings: dict) -> emulator.Report:
    name = f"d{case.head_dim}_{'causal' if case.causal else 'full'}"
    (where,) = compiled.folder(ARCH, name).glob(f"{name}_FlashAttentionForward*")
    return compiled.Kernel(where)(list(arrays), spec.scale, **settings)


ROWS = {
    "tensor core": lambda k: k["bound_cycles"]["tensor"],
    "special functions": lambda k: k["bound_cycles"]["mufu"],
    "FMA pipe": lambda k: k["bound_cycles"]["fma"],
    "ALU": lambda k: k["bound_cycles"]["alu"],
    "conversions": lambda k: k["bound_cycles"]["convert"],
    "shared memory, by threads": lambda k: k["bound_cycles"]["shared_memory"],
    "tensor memory, MB": lambda k: (k["bytes"]["tensor_memory_read"] + k["bytes"]["tensor_memory_written"]) / 1e6,
    "TMA, MB": lambda k: (k["bytes"]["bulk_read"] + k["bytes"]["bulk_written"]) / 1e6,
    "barrier instructions": lambda k: k["units"]["barrier"],
}
"""What the table shows: cycles at the least for units with a rate, else amounts."""


def table(counted: Mapping[Case, dict[str, dict[str, Any]]]) -> str:
    """Markdown; cells are ours / theirs = ratio."""
    lines = ["| | " + " | ".join(map(str, counted)) + " |", "|" + "---|" * (1 + len(counted))]
    for name, value in ROWS.items():
        pairs = [(value(kernels["ours"]), value(kernels["theirs"])) for kernels in counted.values()]
        cells = [f"{ours:,.0f} / {theirs:,.0f} = {ours / theirs:.2f}" for ours, theirs in pairs]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
