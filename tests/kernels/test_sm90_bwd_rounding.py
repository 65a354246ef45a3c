"""dQ of sections that are done is rounded by a spare warp of the Hopper backward's main kernel."""

import dataclasses

import numpy as np
import pytest
from kernels.sm90_cases import ARCH, CASES, backward_inputs, reported

from jax_fa4 import accuracy, compile, emulator
from jax_fa4.kernels.sm90.bwd.plan import backward_plan
from jax_fa4.spec import Arguments, make_spec

cutlass = pytest.importorskip("cutlass", reason="needs the compiler: pip install nvidia-cutlass-dsl")

from jax_fa4.kernels.sm90.bwd import rounding  # noqa: E402
from jax_fa4.kernels.sm90.bwd.kernel import Backward  # noqa: E402


class Problem:
    """A case, its kernel with a head in each section, and arrays to run it on."""

    def __init__(self, name: str, sizes: dict, rounded_rows: int | None = 8192, **changes):
        self.case = CASES[name].resized(**({"B": 2} | sizes))
        spec, self.operands = make_spec(Arguments(**self.case.make(7)))
        self.spec = dataclasses.replace(spec, **changes)
        plan = dataclasses.replace(backward_plan(self.spec), l2_bytes=1, rounded_rows=rounded_rows)
        self.artifact = compile.compile_kernel(Backward(self.spec, plan), ARCH)
        self.cotangents, self.given = backward_inputs(self.spec, self.operands, 7)

    def run(self, seed: int, sm_count: int) -> tuple[list[str], int]:
        """(gradients that are wrong, how many shares were drawn)."""
        shape = self.case.shape
        drawn = np.full((shape.B, shape.H), -1, np.int32)
        given = self.given | {"dq_drawn": drawn}
        gradients, _ = reported(self.artifact, shape, self.operands, given, seed, sm_count, strict=True)
        rows = accuracy.judge(gradients, self.spec, self.operands, self.cotangents)
        return [str(row) for row in rows if not row.ok], int(drawn.sum())


FORMS = [
    ("causal", {"S": 150, "T": 300}, {}),
    ("causal", {"S": 150, "T": 300, "D": 128, "E": 128}, {"deterministic": True}),
    ("full", {"S": 150, "T": 300, "D": 40, "E": 40}, {"float32_out": True}),
    ("full", {"S": 150, "T": 300, "D": 128, "E": 128}, {}),
    ("full", {"S": 150, "T": 300, "D": 120, "E": 128}, {"float32_out": True}),
    ("mqa", {"S": 150, "T": 300}, {}),
    ("segments", {"S": 150, "T": 300}, {}),
    ("window", {"S": 300, "T": 300}, {}),
    ("lengths-window-sinks", {"S": 300, "T": 300}, {}),
    ("cross-causal", {"S": 700, "T": 130}, {}),  # tiles without steps
]
"""(case, sizes, changes of the spec)"""


@pytest.mark.parametrize(
    "name, sizes, changes", FORMS[:1] + [pytest.param(*form, marks=pytest.mark.slow) for form in FORMS[1:]]
)
def test_dq_is_rounded_while_later_heads_are_worked_on(name, sizes, changes, software_gpu):
    problem, drawn = Problem(name, sizes, **changes), 0
    for seed, sm_count in ((0, 1), (1, 3), (2, 2)):
        wrong, shares = problem.run(seed, sm_count)
        assert wrong == []
        drawn = max(drawn, shares)
    assert drawn > problem.case.shape.B


def test_long_tiles_are_left_to_the_kernel_afterwards(software_gpu):
    problem = Problem("causal", {"S": 150, "T": 300}, rounded_rows=149)
    assert problem.run(0, 2) == ([], 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["_is_done", "count"])
def test_rounding_too_early_is_noticed(name, monkeypatch, software_gpu):
    """Without the wait for a section's tiles, or if they count before their additions are complete."""
    if name == "_is_done":
        monkeypatch.setattr(rounding, name, lambda work, section: cutlass.Boolean(True))
    else:
        wait = cutlass.cute.arch.cp_async_bulk_wait_group
        monkeypatch.setattr(rounding.cute.arch, "cp_async_bulk_wait_group", lambda group, **_: wait(group, read=True))
    problem = Problem("causal", {"S": 150, "T": 300})
    with pytest.raises((emulator.EmulationError, AssertionError)):
        for seed in range(6):
            assert problem.run(seed, 3)[0] == []
