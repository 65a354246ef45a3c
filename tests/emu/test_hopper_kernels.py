"""Our own sm_90a kernels gave the same on a real H200 as on the software GPU, to rounding (hopper/kernels.py), and the
software GPU with today's kernels still agrees with what that H200 gave."""

import json

import numpy as np
import pytest
from emu import emulated, forms
from emu.hopper import kernels

SUMMARY = kernels.HERE / "kernels.json"
FAST = ("forward_causal-heavy", "backward_causal")  # kernels that other fast tests compile too
# Two correct results differ by last bits: here and there a rounding to 16 bits goes the other way.
BOUND, BOUND_LSE = 3e-4, 1e-6
# Of a sample's 512 elements, in whose norm one such element may count for much: how many are equal, and the last bit of
# a bfloat16. Kernels may change in their order of summation.
SAMPLE_EQUAL, LAST_BIT = 0.97, 2**-7


@pytest.fixture(scope="module")
def samples():
    with np.load(SUMMARY.with_suffix(".npz")) as arrays:
        return {name: arrays[name] for name in arrays.files}


@pytest.mark.parametrize("name", kernels.CASES)
def test_recorded_agreement(name):
    summary = json.loads(SUMMARY.read_text())
    assert "H200" in summary["device"] and not summary["moves"] and not summary["failed"]
    outputs = summary["cases"][name]
    assert set(outputs) == {b.name for b in kernels.CASES[name].kernel_call.outputs}
    for output, recorded in outputs.items():
        assert recorded["relative"] < (BOUND_LSE if output == "lse" else BOUND)
        assert output == "lse" or recorded["equal"] > 0.99


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in kernels.CASES])
def test_as_the_recorded_sample(name, samples):
    emulated.require_library()
    call = kernels.CASES[name]
    outputs, report = call.emulate(call.compiled(), call.inputs(), seed=3)
    assert not report.complaints
    for output, x in outputs.items():
        got = x.reshape(-1)[kernels.picked(name, output, x.size)].astype(np.float32)
        want = samples[f"{name}/{output}"]
        difference = kernels.difference(got, want)
        if output == "lse":
            assert difference.relative < BOUND_LSE
        else:
            typical = np.sqrt(np.mean(np.square(want)))
            assert difference.equal > SAMPLE_EQUAL, (output, difference)
            assert (np.abs(got - want) <= LAST_BIT * np.maximum(np.abs(want), typical)).all(), (output, difference)


def test_forms_of_the_recorded_kernels_count_as_known():
    recorded = set((kernels.HERE / "kernels_forms.txt").read_text().splitlines())
    assert any(form.startswith("wgmma shape") for form in recorded)
    assert recorded <= forms.known()
