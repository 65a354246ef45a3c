"""Damaged PTX gives a result or an error: a fixed batch of the fuzzer, in a process of its own."""

import os
import pathlib
import subprocess
import sys

from emu import emulated

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_damaged_text_never_crashes():
    emulated.require_library()
    paths = os.pathsep.join([str(ROOT / "tests"), *sys.path])  # the jax_fa4 that has the library
    done = subprocess.run([sys.executable, str(ROOT / "tests/emu/fuzz.py"), "0", "150"], capture_output=True, text=True,
                          timeout=300, env={**os.environ, "PYTHONPATH": paths})
    assert done.returncode == 0, done.stdout[-300:] + done.stderr[-3000:]
    assert "refused" in done.stdout
