"""NVIDIA's compute-sanitizer on small calls of every Hopper kernel: no hazard in shared memory, no bad access.

    python -m pytest -m gpu tests/kernels/test_sm90_sanitizer.py

Needs its version 2026.4 (`pip install nvidia-cuda-sanitizer-api~=13.5`): by its release notes, the year before mended
several reports of hazards that are none, with mbarriers, warpgroups, and copies that an mbarrier is told of.
"""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from kernels.sanitized import GROUPS

TESTED = (2026, 4)
OURS = "kernel_cutlass"  # what the names of all our kernels have, small ones too, and none of XLA's
VERDICTS = {
    "memcheck": "ERROR SUMMARY: 0 errors",
    "racecheck": "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
}


def sanitizer() -> str:
    """The tool of the wheel, else of the path; skips where there is none, or an old one."""
    spec = importlib.util.find_spec("nvidia")
    wheels = [pathlib.Path(p) for p in (spec.submodule_search_locations if spec else None) or ()]
    found = [str(p) for w in wheels for p in w.glob("cu*/compute-sanitizer/compute-sanitizer") if os.access(p, os.X_OK)]
    path = next(iter(found), None) or shutil.which("compute-sanitizer")
    if path is None:
        pytest.skip("compute-sanitizer is not installed: pip install nvidia-cuda-sanitizer-api")
    text = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"Version (\d+)\.(\d+)", text)
    if version is None or tuple(map(int, version.groups())) < TESTED:
        pytest.skip(f"compute-sanitizer {version and version[0]} is too old: pip install nvidia-cuda-sanitizer-api")
    return path


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("tool", VERDICTS)
@pytest.mark.parametrize("group", GROUPS)
def test_kernels_are_clean(tool, group):
    options = ["--tool", tool, "--kernel-name", f"kernel_substring={OURS}", "--show-backtrace", "no"]
    driver = pathlib.Path(__file__).with_name("sanitized.py")
    environment = os.environ | {"XLA_FLAGS": "--xla_gpu_autotune_level=0", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run([sanitizer(), *options, sys.executable, str(driver), group], env=environment, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    assert done.returncode == 0 and VERDICTS[tool] in done.stdout, done.stdout[-6000:]
