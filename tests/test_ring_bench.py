"""The ring's benchmark, at a small size on virtual devices: it measures what it says."""

import argparse
import json

import pytest

from jax_fa4.bench import ring
from jax_fa4.commands import ring as command


def test_flops_count_what_the_mask_keeps():
    full, causal, window = (ring.RingWorkload(8192, 2, 1, kind, "forward").flops for kind in command.KINDS)
    assert full == 4 * 2 * 128 * 8192**2
    assert causal == full / 2
    assert window == 4 * 2 * 128 * (8192 * 4096 - 4096**2 / 2)
    assert ring.RingWorkload(8192, 2, 1, "full", "both").flops == 3.5 * full


@pytest.mark.slow
def test_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "HEADS", ((2, 1, command.KINDS),))
    path = tmp_path / "ring.json"
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    sizes = ["--tokens", "128", "--inner", "128", "--compare", "128", "--repeats", "2", "--rounds", "1"]
    arguments = parser.parse_args([*sizes, "--backend", "xla", "--json", str(path)])
    assert command.main(arguments) == 0
    report = json.loads(path.read_text())
    assert "link GB/s, one way" in report["header"]
    compared = [row for row in report["rows"] if "compared" in row]
    assert [row["bitwise_equal"] for row in compared] == ["2 of 2"] * 3
    timed = [row for row in report["rows"] if "workload" in row]
    assert len(timed) == 6
    for row in timed:
        assert row["devices"] == len(row["alone_s"]) == 8
        assert row["speed_up"] == pytest.approx(sum(row["alone_s"]) / 8 / row["ring_s"])
