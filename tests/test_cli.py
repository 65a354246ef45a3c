"""``python -m jax_fa4``: what each subcommand prints and returns."""

import json
import os
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa4 import Unsupported, attention, emulator, reference
from jax_fa4.__main__ import main
from jax_fa4.bench import report
from jax_fa4.bench.kernels import kernel_rows, kernel_table
from jax_fa4.bench.timing import Runnable, seconds_per_call, time_interleaved
from jax_fa4.bench.workload import Workload, constant_tokens
from jax_fa4.commands import COMMANDS
from jax_fa4.draw import FULL, PARTIAL, SKIPPED, mask_picture
from jax_fa4.explanation import explain
from jax_fa4.spec import Arguments, make_spec


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert COMMANDS[command].split(",")[0] in " ".join(capsys.readouterr().out.split())


def test_info_names_versions_and_refusals(capsys):
    assert main(["info", "--q", "2,64,8,32", "--kv", "2,128,2,32", "--causal", "--bias"]) == 0
    printed = capsys.readouterr().out
    assert f"jax {jax.__version__}" in printed
    assert "group=4" in printed and "auto takes: xla" in printed
    assert "emulate:sm_100a" in printed and "kernels have no bias" in printed
    assert "on a GPU of sm_100a auto takes: xla (kernels have no bias" in printed
    assert main(["info", "--q", "2,64,8,128", "--causal"]) == 0
    printed = capsys.readouterr().out
    assert "on a GPU of sm_90a auto takes: cuda" in printed and "on a GPU of sm_100a auto takes: cuda" in printed


def test_explain_takes_shapes_and_agrees_with_what_runs():
    q = jax.ShapeDtypeStruct((1, 16, 2, 8), jnp.bfloat16)
    found = explain(q, q, q, window=(3, None), bias=jax.ShapeDtypeStruct((1, 1, 16, 16), jnp.float32))
    assert found.spec.has_bias and found.spec.head_dim == 8
    assert found.chosen == "xla" and found.refusals["xla"] is None
    x = jnp.ones((1, 16, 2, 8), jnp.bfloat16)
    for backend in ("cuda", "emulate:sm_90a", "emulate:sm_100a"):
        assert found.refusals[backend]
        with pytest.raises(Unsupported, match="kernels have no bias"):
            attention(x, x, x, window=(3, None), bias=jnp.ones((1, 1, 16, 16)), backend=backend)
    with pytest.raises(ValueError, match="window"):
        explain(q, q, q, window=(-1, 0))
    assert explain(q, q, q, scale=np.float32(0.5), causal=np.bool_(True)).spec.scale == 0.5


@pytest.mark.parametrize("command, message", [
    (["mask", "--window", "3"], "'3': expected LEFT,RIGHT, each an integer of at least 0 or none"),
    (["info", "--window=-1,0"], "'-1,0': expected LEFT,RIGHT"),
    (["info", "--q", "2,64"], "'2,64': expected positive integers B,S,H,D"),
    (["mask", "--block", "0,4"], "'0,4': expected positive integers Q,K"),
    (["compile", "--scale=-1"], "'-1': expected a positive number"),
    (["check", "--jobs", "0"], "'0': expected positive integers N"),
    (["bench", "--lengths", "64,x"], "'64,x': expected positive integers N,N,..."),
])
def test_options_say_what_they_expect(command, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("command, message", [
    (["info", "--q", "2,64,8,128", "--kv", "2,64,3,128"], "info: q: received 8 heads with 3 KV heads"),
    (["check", "--backend", "fast", "--cases", "one-each"], "check: backend: received 'fast'; allowed: 'auto'"),
    (["bench", "--backend", "fast"], "bench: backend: received 'fast'; allowed: 'auto'"),
])
def test_what_attention_refuses_is_an_error_in_a_line(command, message, capsys):
    assert main(command) == 2
    assert message in capsys.readouterr().err


def test_check_passes_on_xla_and_counts(capsys):
    assert main(["check", "--backend", "xla", "--cases", "one-each,no-rows"]) == 0
    printed = capsys.readouterr().out
    assert "2 passed, 0 failed, 0 unsupported" in printed and "one-each" in printed


def test_check_fails_where_an_error_exceeds_its_bound(capsys, monkeypatch):
    def exact(spec, operands, cotangents, draw):  # leaves 1e-5, which bfloat16 cannot keep
        return reference.oracle(spec, operands, cotangents)

    monkeypatch.setattr(reference, "same_precision", exact)
    assert main(["check", "--backend", "xla", "--cases", "one-query"]) == 1
    printed = capsys.readouterr().out
    assert "TOO LARGE" in printed and "failed: one-query" in printed


def test_check_compiles_missing_kernels_once(capsys, tmp_path, monkeypatch):
    pytest.importorskip("cutlass")
    try:
        emulator.library()
    except (FileNotFoundError, OSError) as error:
        pytest.skip(f"the package's library is not built: {error}")
    monkeypatch.setenv("JAX_FA4_CACHE_DIR", str(tmp_path))
    platforms = os.environ.get("JAX_PLATFORMS")
    options = ["check", "--backend", "emulate:sm_90a", "--cases", "one-each,bias-shared", "--jobs", "2"]
    for compiled in (2, 0):
        assert main(options) == 0
        text = capsys.readouterr().out
        assert f"kernels: {compiled} compiled, the others from the cache" in text
        assert "1 passed, 0 failed, 1 unsupported by the backend" in text
    assert os.environ.get("JAX_PLATFORMS") == platforms


def test_check_names_the_cases_when_none_matches():
    with pytest.raises(SystemExit, match=r"--cases nothing-like-it.*kitchen-sink"):
        main(["check", "--cases", "nothing-like-it"])


def test_bench_writes_rows_and_a_plot(capsys, tmp_path):
    options = ["--backend", "xla", "--measure", "speed", "--lengths", "64", "--head-dims", "8", "--rounds", "1"]
    paths = ["--json", str(tmp_path / "bench.json"), "--plot", str(tmp_path / "bench.png")]
    assert main(["bench", *options, *paths]) == 0
    printed = capsys.readouterr().out
    assert "skipping jax.nn:cudnn: runs on gpu" in printed
    results = json.loads((tmp_path / "bench.json").read_text())
    rows = results["speed"]
    assert {row["peer"] for row in rows} == {"jax_fa4:xla", "jax.nn:xla"}
    assert {row["direction"] for row in rows} == {"forward", "backward", "both"}
    full = next(row for row in rows if row["direction"] == "forward" and " full " in row["workload"])
    assert np.isclose(full["flops_per_s"] * full["seconds"], 4 * 4 * 64 * 64 * 8)
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_bench_lists_what_the_compiler_made_of_each_kernel():
    pytest.importorskip("cutlass")
    small = Workload(1, 1024, 4, 64, True, "bfloat16")
    rows = kernel_rows([small, replace(small, batch=2), replace(small, head_dim=40, value_head_dim=7)], "sm_90a")
    assert {row["pass"] for row in rows} == {"forward", "backward"}
    once = kernel_rows([small], "sm_90a")
    assert rows == once, "an artifact is listed once, and what has no plan is left out"
    assert all(0 < row["registers"] <= 255 and row["workload"] == str(small) for row in rows)
    assert kernel_table(rows).splitlines()[0].split() == [
        "workload", "pass", "kernel", "registers", "stack_bytes", "code_bytes", "compile_seconds"
    ]


def test_a_workload_is_the_spec_of_its_call():
    q = jnp.zeros((1, 256, 4, 64), jnp.bfloat16)
    k = q[:, :, :2]
    workload = Workload(1, 256, 4, 64, True, "bfloat16", kv_heads=2, window=31)
    assert make_spec(Arguments(q, k, k, causal=True, window=(31, None)))[0] == workload.spec()
    assert make_spec(Arguments(q, q, q))[0] == Workload(1, 256, 4, 64, False, "bfloat16").spec()


def test_bench_refuses_unknown_peers_and_measures():
    with pytest.raises(SystemExit, match=r"unknown fa9; known: jax\.nn:xla"):
        main(["bench", "--peers", "fa9"])
    with pytest.raises(SystemExit, match="known: speed, kernels, memory, compile"):
        main(["bench", "--measure", "beauty"])


def test_timing_divides_by_calls_and_interleaves():
    order: list[str] = []
    clock = {name: Runnable(lambda name=name: order.append(name), lambda _: None) for name in "abc"}
    timings = list(time_interleaved(clock, rounds=6, target_s=0.0))
    progress = [name for name, timing in timings if timing is None]
    assert order[:6] == list("aabbcc") and order[6:] == progress  # two warm-up calls each, then rounds
    rounds = ["".join(progress[i : i + 3]) for i in range(0, 18, 3)]
    assert {"".join(sorted(r)) for r in rounds} == {"abc"} and len(set(rounds)) > 2  # each an order of its own
    assert [name for name, timing in timings if timing is not None] == list("abc")
    assert seconds_per_call(clock["a"], 10) < 0.1 and order[-10:] == ["a"] * 10


def test_workloads_count_operations_as_the_papers_do():
    work = constant_tokens(4096, 128, causal=False, dtype="bfloat16")
    assert (work.batch, work.heads) == (8, 16)
    assert work.flops("forward") == 4 * 8 * 16 * 4096**2 * 128
    causal = Workload(1, 1024, 2, 64, True, "float32")
    assert causal.flops("both") == 3.5 * causal.forward_flops == 3.5 * 2 * 2 * 1024**2 * 64


def test_tables_align():
    assert report.table([["name", "x"], ["a", "10.0"]]) == "name     x\n----  ----\na     10.0"


def test_mask_picture_by_hand():
    picture = mask_picture(8, 8, (2, 2), causal=True, window=(3, 0))
    rows = np.arange(8)
    expected = (rows[None] <= rows[:, None]) & (rows[None] >= rows[:, None] - 3)
    np.testing.assert_array_equal(picture.survives, expected)
    p, f, s = PARTIAL, FULL, SKIPPED
    np.testing.assert_array_equal(picture.states, [[p, s, s, s], [f, p, s, s], [p, f, p, s], [s, p, f, p]])
    assert "9 of 16 blocks visited (3 full, 6 partial)" in picture.summary()


def test_mask_command(capsys, tmp_path):
    assert main(["mask", "--queries", "256", "--causal", "--block", "64,64"]) == 0
    printed = capsys.readouterr().out
    assert "▒▒······\n██▒▒····\n████▒▒··\n██████▒▒" in printed
    path = tmp_path / "mask.png"
    assert main(["mask", "--queries", "96", "--keys", "128", "--documents", "40,88", "--out", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
