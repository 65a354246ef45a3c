"""The accuracy rule: against the float64 oracle, at most twice the error of the same-precision reference, plus 1e-5.

That error is one sample of how roundings fall. For results of many values it hardly varies; for one that is a sum over
few (the gradient of a sink, of an ALiBi slope) or that one value dominates, roundings may cancel by luck in the
reference and not in the kernel, or the other way round. So the reference's error is taken over several draws of its
roundings: their mean plus two standard deviations.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import backends, reference
from .operands import Operands
from .spec import Arguments, AttentionSpec, make_spec

SLACK = 1e-5

DRAWS = 8
"""How often the reference is computed, each time with its roundings elsewhere (`reference.same_precision`)."""


@dataclass(frozen=True)
class Row:
    """One result's errors and what the rule allows.

    Attributes:
      name: of the result (`reference.Results`).
      relative, largest: Frobenius norm of the error over that of the oracle, and the largest absolute error; inf
        where infinities or NaNs differ.
      allowed_relative, allowed_largest: their bounds.
    """

    name: str
    relative: float
    largest: float
    allowed_relative: float
    allowed_largest: float

    @property
    def ok(self) -> bool:
        return self.relative <= self.allowed_relative and self.largest <= self.allowed_largest

    def __str__(self) -> str:
        verdict = "" if self.ok else "  <-- too large"
        return (f"{self.name}: relative {self.relative:.1e} (allowed {self.allowed_relative:.1e}), "
                f"largest {self.largest:.1e} (allowed {self.allowed_largest:.1e}){verdict}")


def errors(got: Any, want: np.ndarray) -> tuple[float, float]:
    """(relative, largest) error of one result; (inf, inf) unless it is non-finite exactly where the oracle is."""
    got = np.asarray(got).astype(np.float64)
    if got.shape != want.shape:
        raise ValueError(f"shape {got.shape}, the oracle's is {want.shape}")
    finite = np.isfinite(want)
    if not np.array_equal(got[~finite], want[~finite]) or not np.isfinite(got[finite]).all():
        return float("inf"), float("inf")
    difference, norm = got[finite] - want[finite], np.linalg.norm(want[finite])
    return float(np.linalg.norm(difference) / (norm or 1.0)), float(np.abs(difference).max(initial=0.0))


def judge(
    got: Mapping[str, Any], spec: AttentionSpec, operands: Operands, cotangents: tuple[Any, Any] | None = None
) -> list[Row]:
    """Judges a backend's results.

    Args:
      got: results by the names of `reference.Results`; those that are missing are not judged.
      spec, operands: the call, with concrete arrays.
      cotangents: (do, dlse) behind the gradients in `got`.
    """
    exact = reference.oracle(spec, operands, cotangents)
    same = [reference.same_precision(spec, operands, cotangents, draw) for draw in range(DRAWS)]
    if unknown := set(got) - set(exact):
        raise ValueError(f"results {sorted(unknown)}; known are {sorted(exact)}")
    rows = []
    for name, want in exact.items():
        if name in got:
            drawn = np.array([errors(results[name], want) for results in same])
            allowed = 2 * (drawn.mean(axis=0) + 2 * drawn.std(axis=0)) + SLACK
            rows.append(Row(name, *errors(got[name], want), *map(float, allowed)))
    return rows


def check(arguments: Mapping[str, Any], backend: str, seed: int = 0) -> list[Row]:
    """Runs `attention(**arguments)` and its gradients on a backend and judges all results.

    Args:
      arguments: of `attention`, concrete (`cases.Case.make`).
      backend: as `attention` takes it.
      seed: for the cotangents of o and LSE.
    """
    spec, operands = make_spec(Arguments(**arguments))
    chosen = backends.resolve(backend, spec, operands)
    cotangents = reference.cotangents(operands, seed)
    got = reference.results(*reference.differentiate(chosen.attend, spec, operands, cotangents))
    return judge(got, spec, operands, cotangents)
