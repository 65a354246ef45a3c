"""What the judge says of bulk copies that overwrite what threads read or wrote (ffi/emu/judge/proxy_order.h), whatever
the order of execution was; on a GPU, what compute-sanitizer's racecheck says of the same kernels."""

import pathlib
import re
import subprocess
import sys

import pytest
from emu import emulated, rereading

from jax_fa4 import emulator

MISSING = "strict: missing fence.proxy.async: a bulk copy overwrites shared memory at 0x400, which warp 0"
CLEAN = {"fenced", "fenced before the last", "fenced by one lane"}
BOTH = [(form, way) for form in rereading.FORMS for way in rereading.WAYS]


@pytest.fixture(scope="module", autouse=True)
def _library():
    emulated.require_library()


@pytest.mark.parametrize(("form", "way"), BOTH)
@pytest.mark.parametrize("strict", [True, emulator.Strict.OVERWRITES])
def test_overwriting_without_a_fence_is_reported_under_every_seed(form, way, strict):
    kernel = rereading.case(form, way)
    for seed in range(8):
        if form in CLEAN:
            kernel.check(emulated.run(kernel, seed, strict=strict))
            continue
        with pytest.raises(emulator.EmulationError, match=MISSING):
            emulated.run(kernel, seed, strict=strict)


@pytest.mark.parametrize(("form", "way"), BOTH)
def test_other_runs_say_nothing_of_it(form, way):
    kernel = rereading.case(form, way)
    for strict in (False, emulator.Strict.LOADS | emulator.Strict.END | emulator.Strict.FENCES):
        kernel.check(emulated.run(kernel, 1, strict=strict))


@pytest.mark.gpu
@pytest.mark.slow
def test_racecheck_reports_the_same():
    """But for two: it looks at each thread, the judge at warps; and a fence behind the barrier is enough for it if it
    happens before the copy. (At an mbarrier one lane arrives for its warp; it does not see what orders the others.)"""
    from kernels.test_sm90_sanitizer import sanitizer

    script = pathlib.Path(rereading.__file__)
    command = [sanitizer(), "--tool", "racecheck", "--racecheck-report", "analysis", sys.executable, str(script)]
    done = subprocess.run([*command, "named barrier"], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    reported = set(re.findall(r"Race reported between \w+ access at (\w+)\+", done.stdout))
    wrong = {form for form in rereading.FORMS if form not in CLEAN} - {"fenced late"} | {"fenced by one lane"}
    assert done.returncode == 0 and reported == {form.replace(" ", "_") for form in wrong}, done.stdout[-6000:]
