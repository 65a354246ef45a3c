"""The Blackwell forward kernel, compiled: registers, local memory and barriers, read off the machine code and PTX."""

import re

import pytest

from jax_fa4 import cases, compile, errors, plan
from jax_fa4.spec import Arguments, make_spec

ARCH = "sm_100a"
FAST = ("d128",)


def call(name: str):
    """(spec, size class) of a case."""
    case = next(case for case in cases.CASES if case.name == name)
    shape = case.shape
    spec, _ = make_spec(Arguments(**case.make()))
    return spec, plan.size_class(shape.B, shape.S, shape.T, shape.H)


def plans() -> list:
    """One case for each distinct plan and set of features among the cases that the kernel does."""
    found = {}
    for case in cases.select(without=("empty",)):
        spec, size = call(case.name)
        try:
            chosen = plan.choose_plan(spec, ARCH, size, "forward")
        except errors.Unsupported:
            continue
        found.setdefault((spec, chosen), case.name)
    return [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in sorted(found.values())]


@pytest.mark.parametrize("name", plans())
def test_machine_code_keeps_to_the_plan(name):
    spec, size = call(name)
    chosen = plan.choose_plan(spec, ARCH, size, "forward")
    artifact = compile.artifact(spec, ARCH, size, "forward")
    assert artifact.spilled == (), "local memory: spilled registers, or an array that did not fit in them"
    main = max(artifact.kernels, key=lambda kernel: kernel.code_bytes)
    assert main.registers == 65536 // chosen.warps.threads, "what the block starts with, before setmaxnreg"
    budgets = re.findall(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32\s+(\d+)", artifact.ptx)
    registers = chosen.registers
    assert set(budgets) == {
        ("inc", str(registers.softmax)), ("dec", str(registers.correction)), ("dec", str(registers.other))
    }  # fmt: skip
