"""Every small kernel gives what its numpy description says, under several interleavings, and (where recorded) what a
real H200 gave, bit for bit; approximate functions within the manual's error."""

import json
import pathlib

import numpy as np
import pytest
from emu import elementwise, emulated, ptx_cases

RECORDED = pathlib.Path(__file__).with_name("hopper") / "recorded.npz"
CASES = {case.name: case for case in ptx_cases.cases()}


@pytest.fixture(scope="module", autouse=True)
def _library():
    emulated.require_library()


@pytest.fixture(scope="module")
def recorded():
    if not RECORDED.exists():
        pytest.skip("no recording from a Hopper GPU")
    with np.load(RECORDED) as arrays:
        return {name: arrays[name] for name in arrays.files}


@pytest.mark.parametrize("name", CASES)
def test_expected(name):
    for seed in range(3):
        CASES[name].check(emulated.run(CASES[name], seed))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.target == "sm_90a"])
def test_as_on_hopper(name, recorded):
    summary = json.loads(RECORDED.with_suffix(".json").read_text())
    if name not in summary["ran"]:
        pytest.skip("not in the recording")
    outputs = emulated.run(CASES[name])
    for buffer in CASES[name].expected:
        real = recorded[f"{name}/{buffer}"]
        if name in elementwise.FAMILIES:
            _compare_forms(elementwise.FAMILIES[name], outputs[buffer], real)
        elif CASES[name].tolerance is not None:
            difference = np.abs(outputs[buffer].view(np.float32) - real.view(np.float32))
            assert (difference <= CASES[name].tolerance).all()
        else:
            np.testing.assert_array_equal(outputs[buffer], real)


def _compare_forms(family, ours, real):
    wrong = []
    for form, got, true in zip(family.forms, ours, real, strict=True):
        approximate = form.compare.startswith("approx")
        same = elementwise.agree(form, got, true) if approximate else got == true
        if not same.all():
            i = np.flatnonzero(~same)[0]
            wrong.append(f"{form.text}: {(~same).sum()} threads, first {i}: {int(got[i]):#x}, H200 {int(true[i]):#x}")
    assert not wrong, "\n".join(wrong)
