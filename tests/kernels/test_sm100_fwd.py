"""The Blackwell forward kernel: registers and local memory of its machine code, and its results on the software GPU."""

import collections
import dataclasses
import functools
import re

import numpy as np
import pytest
from emu import emulated
from kernels.sm100_cases import ARCH, assert_same_bits, launch

from jax_fa4 import accuracy, attention, cases, compile, emulator, errors, plan
from jax_fa4.cases import Case, Shape
from jax_fa4.spec import Arguments, make_spec

# Several CTAs' worth of tiles, key blocks on both sides of every edge, and what the common cases are too short for.
LONGER = (
    Case("long-full", (), Shape(B=1, S=300, T=700, H=2, K=1, D=128, E=128)),
    Case("long-causal", ("causal",), Shape(B=1, S=700, T=700, H=2, K=2, D=128, E=128)),
    Case("long-window", ("window",), Shape(B=1, S=700, T=700, H=2, K=1)),
    Case("long-d256", ("causal",), Shape(B=1, S=500, T=650, H=2, K=1, D=256, E=256)),
    Case("long-d192-e128", ("causal",), Shape(B=1, S=400, T=520, H=2, K=1, D=192, E=128)),
    Case("split", ("causal",), Shape(B=1, S=40, T=1500, H=4, K=1, D=128, E=128)),
    Case("split-sinks", ("sinks",), Shape(B=2, S=3, T=1300, H=8, K=2)),
    Case("padded-lengths", ("causal", "q_lengths", "kv_lengths"), Shape(B=3, S=300, T=400, H=2, K=1, D=96, E=96)),
    Case("long-mask-function", ("mask_function",), Shape(B=1, S=300, T=700, H=2, K=1, D=128, E=128)),
    Case("padded", ("causal",), Shape(B=1, S=300, T=300, H=2, K=1, D=72, E=40)),
)
FAST = ("full", "causal", "d128", "d192-e128", "d256", "odd-group", "window-left", "segments", "lengths-causal",
        "mask-function", "kitchen-sink", "split-sinks")  # fmt: skip
REPRESENTATIVE = ("long-full", "long-causal", "long-window", "long-d256", "long-d192-e128", "split")


def supported() -> list[Case]:
    """The cases that the kernel does."""

    def done(case: Case) -> bool:
        try:
            plan.choose_plan(*key(case))
        except errors.Unsupported:
            return False
        return True

    return [case for case in (*cases.select(without=("empty",)), *LONGER) if done(case)]


def key(case: Case) -> tuple:
    """(spec, architecture, size class, pass) of a case."""
    spec, _ = make_spec(Arguments(**case.make()))
    s = case.shape
    return spec, ARCH, plan.size_class(s.B, s.S, s.T, s.H), "forward"


def parameters(chosen: list[Case]) -> list:
    return [pytest.param(c, id=c.name, marks=() if c.name in FAST else pytest.mark.slow) for c in chosen]


@functools.cache
def all_cases() -> tuple[Case, ...]:
    return tuple(supported())


def distinct() -> list[Case]:
    """One case for each distinct pair of spec and plan."""
    found = {}
    for case in all_cases():
        found.setdefault((key(case)[0], plan.choose_plan(*key(case))), case)
    return list(found.values())


@pytest.mark.parametrize("case", parameters(distinct()))
def test_machine_code_keeps_to_the_plan(case):
    chosen = plan.choose_plan(*key(case))
    artifact = compile.artifact(*key(case))
    assert artifact.spilled == (), "local memory: spilled registers, or an array that did not fit in them"
    main = max(artifact.kernels, key=lambda kernel: kernel.code_bytes)
    assert main.registers == 65536 // chosen.warps.threads, "what the block starts with, before setmaxnreg"
    budgets = re.findall(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32\s+(\d+)", artifact.ptx)
    registers = chosen.registers
    assert set(budgets) == {
        ("inc", str(registers.softmax)), ("dec", str(registers.correction)), ("dec", str(registers.other))
    }  # fmt: skip


def run(case: Case, seed: int = 0, draw: int = 0, artifact=None, **settings):
    """(results, spec, operands, report) of a case on the software GPU; outputs are poisoned with NaN bytes."""
    return launch(case.make(draw), case.shape, seed, artifact or compile.artifact(*key(case)), **settings)


@pytest.mark.parametrize("case", parameters(all_cases()))
def test_results_keep_to_the_accuracy_rule(case):
    emulated.require_library()
    results, spec, operands, report = run(case, strict=True)
    rows = accuracy.judge(results, spec, operands)
    assert [row.name for row in rows] == ["o", "lse"] and all(row.ok for row in rows), "\n".join(map(str, rows))
    assert report.complaints == []


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in LONGER if case.name in REPRESENTATIVE], ids=lambda case: case.name)
def test_every_interleaving_gives_the_same_bits(case):
    emulated.require_library()
    first, *_ = run(case)
    for seed in range(1, 20):
        again, _, _, report = run(case, seed)
        assert report.complaints == []
        assert_same_bits(again, first, f"under seed {seed}")


@pytest.mark.slow
@pytest.mark.parametrize("cta_group", [1, 2])
@pytest.mark.parametrize("name", ["long-causal", "long-window", "long-d256"])
def test_who_hands_out_work_does_not_change_a_bit(name, cta_group):
    """Static and by cluster launch control; under the latter, running CTAs take the work of those not begun."""
    from jax_fa4.kernels.sm100 import fwd  # imports the compiler

    emulated.require_library()
    case = next(case for case in LONGER if case.name == name)
    spec, arch, size, _ = key(case)
    chosen = plan.choose_plan(spec, arch, size, "forward")
    chunks = 2 if name == "long-d256" and cta_group == 1 else 1
    chosen = dataclasses.replace(chosen, cta_group=cta_group, kv_chunks=chunks, kv_stages=2 + chunks)
    results, ctas = {}, collections.defaultdict(list)
    for scheduler in ("static", "clc"):
        artifact = compile.compile_kernel(fwd.Forward(spec, dataclasses.replace(chosen, scheduler=scheduler)), arch)
        for seed in range(4):
            results[scheduler, seed], _, operands, report = run(case, seed, artifact=artifact, sm_count=3, strict=True)
            assert report.complaints == []
            ctas[scheduler].append(report.kernels[0]["ctas"])
    blocks = -(-case.shape.S // (chosen.q_tiles * chosen.q_rows))
    launched = case.shape.B * case.shape.H * blocks * cta_group
    assert max(ctas["static"]) <= 3 and min(ctas["clc"]) < launched, "CTAs took the work of others"
    assert all(row.ok for row in accuracy.judge(results["clc", 0], spec, operands))
    for which, result in results.items():
        assert_same_bits(result, results["static", 0], f"for {which}")


def test_split_kv_has_its_scratch_in_a_program():
    """XLA plans the memory of partial results when it does not know the device's multiprocessors."""
    emulated.require_library()
    case = next(case for case in LONGER if case.name == "split-sinks")
    o, lse = attention(**case.make(), backend=f"emulate:{ARCH}", return_lse=True)
    direct, *_ = run(case, sm_count=emulator.SM_COUNT[ARCH])
    assert_same_bits({"o": np.asarray(o), "lse": np.asarray(lse)}, direct, "from a direct launch")


def test_results_do_not_depend_on_the_number_of_multiprocessors():
    emulated.require_library()
    case = next(case for case in all_cases() if case.name == "d128")
    few, *_ = run(case, sm_count=1)
    many, *_ = run(case, sm_count=16)
    assert few["o"].tobytes() == many["o"].tobytes() and few["lse"].tobytes() == many["lse"].tobytes()
