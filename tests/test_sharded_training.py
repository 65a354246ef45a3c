"""The sharded training script: meshes agree, and a killed run resumes with the same losses."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flax", reason="needs the extra 'examples'")
pytest.importorskip("orbax.checkpoint", reason="needs the extra 'examples'")

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = ["--layers", "1", "--width", "32", "--seq-len", "64", "--backend", "xla", "--save-every", "2"]


def run(arguments, out, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import sharded_training

    return sharded_training.main([*SMALL, *arguments, "--out", str(out)])


def test_goes_on_with_the_same_losses(tmp_path, monkeypatch):
    whole = run(["--steps", "4"], tmp_path / "whole", monkeypatch)
    first = run(["--steps", "2"], tmp_path / "parts", monkeypatch)
    second = run(["--steps", "4"], tmp_path / "parts", monkeypatch)
    assert len(first) == len(second) == 2
    np.testing.assert_array_equal(first + second, whole)
    assert run(["--steps", "4"], tmp_path / "parts", monkeypatch) == []


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(8, 1, 1), (1, 1, 8), (2, 2, 2), (1, 2, 1)])
def test_meshes_agree(mesh, tmp_path, monkeypatch):
    sizes = [x for pair in zip(("--data", "--tensor", "--sequence"), map(str, mesh), strict=True) for x in pair]
    alone = run(["--steps", "3", "--batch", "8", "--data", "1", "--tensor", "1", "--sequence", "1"], tmp_path / "a",
                monkeypatch)
    spread = run(["--steps", "3", "--batch", "8", *sizes], tmp_path / "b", monkeypatch)
    np.testing.assert_allclose(spread, alone, rtol=1e-4)


@pytest.mark.slow
def test_killed_run_resumes(tmp_path, monkeypatch):
    whole = run(["--steps", "8"], tmp_path / "whole", monkeypatch)
    out = tmp_path / "killed"
    command = [sys.executable, str(EXAMPLES / "sharded_training.py"), *SMALL, "--steps", "100000", "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = out / "losses.jsonl"
    deadline = time.monotonic() + 240
    while not (log.exists() and log.read_text().count("\n") >= 5):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    made = max(int(p.name) for p in (out / "checkpoints").iterdir() if p.name.isdigit())
    resumed = run(["--steps", str(max(made + 2, 8))], out, monkeypatch)
    losses = {row["step"]: row["loss"] for row in map(json.loads, log.read_text().splitlines())}
    assert made >= 2 and len(resumed) >= 1
    np.testing.assert_array_equal([losses[step] for step in range(1, 9)], whole)
