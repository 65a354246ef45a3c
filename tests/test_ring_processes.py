"""The ring over two processes of four CPU devices each."""

import os
import socket
import subprocess
import sys
from pathlib import Path


def test_two_processes():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    root = Path(__file__).parents[1]
    path = os.pathsep.join(filter(None, sys.path))  # this process' jax_fa4
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"PYTHONPATH": path}
    script = str(root / "tests" / "ring_process.py")
    processes = [
        subprocess.Popen(
            [sys.executable, script, address, "2", str(index)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for index in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-3000:]
        differences = [float(line.split()[1]) for line in output.splitlines() if line.startswith("difference")]
        assert len(differences) == 4 and max(differences) < 1e-5, output
