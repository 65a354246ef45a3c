"""Traces: what each warp and each operation in flight did when; and the timeline that is drawn from them."""

import collections
import json

import numpy as np
import pytest
from emu import emulated, ptx_cases

from jax_fa4 import timeline
from jax_fa4.__main__ import main

CASES = {case.name: case for case in ptx_cases.cases()}
SYNCHRONISING = ("barrier", "mbarrier", "bulk", "cluster", "divergence", "wgmma_n64_bf16_f32_128B_KK_k64",
                 "tcgen05_m128_n128_group1_128B_KK", "tcgen05_m256_n128_group2_128B_KK")  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _library():
    emulated.require_library()


def traced(name: str, seed: int = 0, **settings) -> dict:
    return emulated.launch(CASES[name], seed, trace=100, **settings)[1].kernels[0]


@pytest.mark.parametrize("timing", [False, True], ids=["order", "cycles"])
@pytest.mark.parametrize("name", SYNCHRONISING)
def test_every_instruction_is_in_a_run_and_a_warp_does_one_thing_at_a_time(name, timing):
    kernel = traced(name, timing=timing)
    events = [e for e in kernel["trace"] if e.kind in ("run", "wait")]
    executed = collections.Counter()
    for e in events:
        executed[e.warp] += e.amount if e.kind == "run" else 0
    assert [executed[warp] for warp in range(len(kernel["warps"]))] == [w["instructions"] for w in kernel["warps"]]
    last: dict[tuple, int] = {}
    for e in events:
        assert last.get((e.cluster, e.cta, e.warp), 0) <= e.begin <= e.end, e
        last[e.cluster, e.cta, e.warp] = e.end
    if timing:
        ends = [max(end for place, end in last.items() if place[0] == c) for c in range(kernel["clusters"])]
        assert ends == kernel["cluster_cycles"]


@pytest.mark.parametrize("name", SYNCHRONISING)
def test_tracing_changes_nothing(name):
    plain, with_trace = (emulated.launch(CASES[name], 7, trace=trace) for trace in (0, 1))
    for buffer, contents in plain[0].items():
        np.testing.assert_array_equal(contents, with_trace[0][buffer])
    (kernel,) = with_trace[1].kernels
    assert kernel.pop("trace") and plain[1].kernels == [kernel]
    assert traced(name, 7)["trace"] == traced(name, 7, threads=1)["trace"]


@pytest.mark.parametrize("timing", [False, True], ids=["order", "cycles"])
def test_operations_are_the_ones_that_are_counted(timing):
    kernel = traced("bulk", timing=timing)
    of = collections.defaultdict(list)
    for e in kernel["trace"]:
        of[e.kind].append(e)
        assert e.begin <= e.started <= e.end and e.begin <= e.moved <= e.end, e
    bulk = [e for e in of["load"] if e.what != "cp.async"]
    assert [e.amount for e in bulk] == [512, 512] and sum(e.amount for e in bulk) == kernel["bytes"]["bulk_read"]
    assert [e.amount for e in of["store"]] == [1024] and [e.amount for e in of["reduce"]] == [256] * 4
    (arrival,), waits = of["arrive"], [e for e in of["wait"] if e.what.startswith("mbarrier")]
    # Both copies report to the barrier that the warp arrived at, and the wait for it ends when both are complete.
    assert {e.address for e in bulk} == {arrival.address} and arrival.warp == 0
    assert {e.address for e in waits} <= {arrival.address}
    if waits:
        assert waits[-1].end >= max(e.end for e in bulk)


def test_products_are_in_the_trace():
    kernel = traced("tcgen05_m256_n128_group2_128B_KK", timing=True)
    products = [e for e in kernel["trace"] if e.kind == "mma"]
    assert [e.what for e in products] == ["m256n128k16"] * 4
    assert sum(e.amount for e in products) == kernel["tensor_flops"] == 2 * 256 * 128 * 64
    # A pair of CTAs makes 2 * 8192 operations a cycle; each is taken up when the one before leaves the unit.
    starts = [e.started for e in products]
    assert np.diff(starts).tolist() == [2 * 256 * 128 * 16 // 16384] * 3
    (commit,) = [e for e in kernel["trace"] if e.kind == "commit"]
    assert commit.end >= products[-1].end


def test_only_so_many_clusters_are_traced():
    case = CASES["cluster"]
    assert case.grid == 2 * case.cluster
    _, report = emulated.launch(case, 0, trace=1)
    assert {(e.cluster, e.cta) for e in report.kernels[0]["trace"]} == {(0, 0), (0, 1)}
    assert {(e.cluster, e.sm) for e in traced("cluster", sm_count=1)["trace"]} == {(0, 0), (1, 0)}
    assert "trace" not in emulated.launch(case, 0)[1].kernels[0]


class Plan:
    roles = {"leader": range(1), "others": range(1, 4)}
    accumulators = {0: "S"}


def test_timeline_of_a_small_kernel(tmp_path):
    _, report = emulated.launch(CASES["tcgen05_m128_n128_group1_128B_KK"], 0, trace=1, timing=True)
    found = timeline.Timeline.of(report, Plan())
    assert found.unit == "cycles" and found.end == max(e.end for e in report.kernels[0]["trace"])
    by_role = collections.Counter(track.role for track in found.tracks)
    assert by_role["leader"] == 1 and by_role["others"] == 3
    (core,) = [track for track in found.tracks if track.role == "tensor core"]
    (product,) = core.slices  # four steps of K in one accumulator
    assert product.name == "S" and product.details["steps"] == 4
    for track in found.tracks:
        assert all(a.end <= b.begin for a, b in zip(track.slices, track.slices[1:], strict=False)), track.name
    waits = {s.name for track in found.tracks for s in track.slices if s.kind == "wait"}
    assert "tensor core" in waits  # whoever waits for the commit waits for the tensor core
    assert "leader" in str(found) and "busy" in str(found)

    found.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == sum(len(track.slices) for track in found.tracks)
    assert max(e["ts"] + e["dur"] for e in slices) == found.end
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"leader (warp 0)", "others (warp 3)", "tensor core"} <= names

    half = found.between(0, found.end // 2)
    assert half.end <= found.end // 2 and len(half.tracks) == len(found.tracks)
    with pytest.raises(ValueError, match="ends in '.txt'; allowed are .json"):
        found.save(tmp_path / "trace.txt")


def test_picture_has_a_row_for_each_role_and_unit(tmp_path):
    pytest.importorskip("matplotlib")
    _, report = emulated.launch(CASES["tcgen05_m128_n128_group1_128B_KK"], 0, trace=1, timing=True)
    found = timeline.Timeline.of(report, Plan())
    axes = found.figure().axes[0]
    rows = [label.get_text() for label in axes.get_yticklabels()]
    assert rows[:3] == ["leader", "others", "tensor core"]
    found.save(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_what_cannot_be_shown_is_said():
    _, report = emulated.launch(CASES["barrier"])
    with pytest.raises(ValueError, match=r"no events; run with emulator.Settings\(trace=1\)"):
        timeline.Timeline.of(report)
    with pytest.raises(ValueError, match="no kernel is called 'other'; the run had main"):
        timeline.Timeline.of(report, kernel="other")


@pytest.mark.parametrize(
    "given, message",
    [
        (["--shape", "1,512,128"], "expected positive integers B,S,H,D"),
        (["--out", "x.txt"], "the ending must be one of .json"),
        (["--between", "5,5"], "0 <= FIRST < LAST"),
        (["--arch", "sm_80"], "invalid choice"),
    ],
)
def test_command_refuses(given, message, capsys):
    with pytest.raises(SystemExit):
        main(["timeline", *given])
    assert message in capsys.readouterr().err


def test_command_says_why_a_kernel_refuses(capsys):
    assert main(["timeline", "--shape", "1,64,1,20"]) == 2
    assert "head dim" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_attention(arch, backward):
    pytest.importorskip("cutlass")
    rows, width = 256, 64
    found = timeline.record(arch, (1, rows, 1, width), backward=backward)
    roles = {track.role for track in found.tracks}
    assert {"load", "tensor core", "TMA loads"} <= roles and found.unit == "cycles"
    assert {"mma", "softmax0", "correction"} <= roles or arch == "sm_90a" or backward
    made = sum(s.details["FLOP"] for track in found.tracks if track.role == "tensor core" for s in track.slices)
    needed = (10 if backward else 4) * rows * rows * width
    # Hopper's forward issues the first scores of a next tile before it knows whether there is one; its backward makes
    # dQ of the step before a CTA's first, and drops it.
    assert made == needed + (2 * 128 * 128 * width if arch == "sm_90a" else 0)
