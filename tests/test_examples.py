"""The examples, as a person runs them but smaller."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

pytest.importorskip("flax")
pytest.importorskip("optax")

SMALL = ["--layers", "1", "--width", "32", "--seq-len", "32", "--batch", "4", "--sample-bytes", "4"]


def test_training_lowers_the_held_out_loss_and_writes_its_files(tmp_path, capsys):
    import train_lm

    metrics = train_lm.main([*SMALL, "--steps", "30", "--out", str(tmp_path)])
    assert metrics["after"] < metrics["before"] - 1.0
    assert json.loads((tmp_path / "metrics.json").read_text()) == metrics
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert f"held-out loss after:  {metrics['after']:.3f}" in printed and "def __init__" in printed


@pytest.mark.parametrize("remat", [pytest.param("full", marks=pytest.mark.slow), "attention"])
def test_rematerialisation_does_not_change_training(remat, tmp_path):
    import train_lm

    options = [*SMALL, "--steps", "3", "--sample-bytes", "0", "--out", str(tmp_path)]
    plain, recomputed = train_lm.main(options), train_lm.main([*options, "--remat", remat])
    assert recomputed["after"] == pytest.approx(plain["after"], abs=1e-5)


def test_training_refuses_sizes_that_do_not_divide(capsys):
    import train_lm

    with pytest.raises(SystemExit):
        train_lm.main(["--width", "100", "--heads", "3"])
    assert "--heads 3 must divide --width 100" in capsys.readouterr().err


def test_training_and_held_out_text_are_apart():
    import train_lm

    corpus = train_lm.read_corpus()
    assert len(corpus.train) > 10 * len(corpus.held_out) > 1_000_000
    piece = corpus.held_out[5_000:5_400].tobytes()
    assert piece not in corpus.train.tobytes()


@pytest.mark.slow
def test_flax_model_agrees_with_flax():
    import flax_model

    assert flax_model.main() < 2e-5
