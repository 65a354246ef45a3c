"""The Blackwell backward kernel: its budgets, its machine code, and its gradients on the software GPU."""

import dataclasses
import pathlib
import re

import jax.numpy as jnp
import numpy as np
import pytest
from emu import emulated

from jax_fa4 import accuracy, cases, compile, emulator, errors, masks, plan, reference, vjp
from jax_fa4.cases import Case, Shape
from jax_fa4.kernels.common.abi import Dims
from jax_fa4.kernels.sm100.bwd.plan import (
    DqOver,
    Registers,
    TensorMemory,
    backward_plan,
    narrow_plan,
    pair_plan,
    single_plan,
)
from jax_fa4.kernels.sm100.plans import REGISTERS, SMEM_BYTES, TMEM_COLUMNS
from jax_fa4.spec import Arguments, AttentionSpec, make_spec

ARCH = "sm_100a"
GRADIENTS = ("dq", "dk", "dv")

# Several tiles of keys and blocks of queries, ragged at both ends.
LONGER = (
    Case("long-full", (), Shape(B=1, S=300, T=430, H=2, K=1, D=128, E=128)),
    Case("long-causal", ("causal",), Shape(B=2, S=400, T=400, H=2, K=1, D=128, E=128)),
    Case("long-window", ("window",), Shape(B=1, S=500, T=500, H=2, K=2)),
    Case("d128-e64", ("causal",), Shape(B=1, S=200, T=260, H=2, K=1, D=128, E=64)),
    Case("d64-e128", ("causal",), Shape(B=1, S=200, T=260, H=2, K=1, D=64, E=128)),
    Case("long-d192-e128", ("causal",), Shape(B=1, S=200, T=260, H=2, K=1, D=192, E=128)),
    Case("d96-e192", (), Shape(B=1, S=260, T=200, H=2, K=1, D=96, E=192)),
    Case("long-d256", ("causal",), Shape(B=1, S=300, T=360, H=2, K=1, D=256, E=256)),
    Case("d192", (), Shape(B=1, S=200, T=300, H=2, K=1, D=192, E=192)),
    Case("d128-e256", ("causal",), Shape(B=1, S=260, T=200, H=2, K=1, D=128, E=256)),
    Case("d256-e64", ("window",), Shape(B=1, S=300, T=300, H=2, K=2, D=256, E=64)),
    Case("padded", ("causal",), Shape(B=1, S=200, T=200, H=2, K=1, D=72, E=40)),
)
FAST = ("long-causal", "kitchen-sink", "d256")
REPRESENTATIVE = ("full-float16", "kitchen-sink", "long-full", "long-causal", "long-d256", "long-d192-e128")
ALL = {case.name: case for case in (*cases.select(without=("empty",)), *LONGER)}


def backward_spec(case: Case, seed: int = 0, **changes):
    """(spec with changes, operands) of a case; skips what the kernel refuses."""
    spec, operands = make_spec(Arguments(**case.make(seed)))
    spec = dataclasses.replace(spec, **changes)
    try:
        plan.choose_plan(spec, ARCH, plan.SizeClass.MANY_TILES, "backward")
    except errors.Unsupported as error:
        pytest.skip(str(error))
    return spec, operands


def artifact_of(spec):
    return compile.artifact(spec, ARCH, plan.SizeClass.MANY_TILES, "backward")


def run(case: Case, seed: int = 0, draw: int = 0, settings: dict | None = None, **changes):
    """(spec, operands, cotangents, gradients) on the software GPU; `seed` is the interleaving's, `draw` the input's.

    `settings` are the emulator's, `changes` the spec's.
    """
    emulated.require_library()
    spec, operands = backward_spec(case, draw, **changes)
    artifact, shape = artifact_of(spec), case.shape
    settings = {"sm_count": 3, "threads": 1} | (settings or {})
    dims = Dims(shape.B, shape.S, shape.T, shape.H, shape.K, settings["sm_count"])
    do, dlse = reference.cotangents(operands, draw)
    o, lse = reference.forward(spec, operands)
    given = {"lse": lse.astype(jnp.float32), "delta": vjp.delta(o.astype(spec.dtype), do, dlse), "do": do}
    arrays = {b.name: _array(b, operands, given, dims) for b in artifact.buffers if b.kind != "scratch"}
    report = emulator.launch(artifact, arrays, dims, seed=seed, **settings)
    assert report.complaints == []
    return spec, operands, (do, dlse), {name: arrays[name] for name in GRADIENTS}


def _array(buffer, operands, given, dims) -> np.ndarray:
    """An input, or an output poisoned with NaN bytes."""
    if buffer.kind == "out":
        poison = np.full(buffer.size_bytes(dims), 0xFF, np.uint8)
        return poison.view(jnp.dtype(buffer.dtype)).reshape(buffer.dims(dims))
    if buffer.name in given:
        return np.ascontiguousarray(np.asarray(given[buffer.name]))
    name, _, index = buffer.name.rpartition("_")
    value = getattr(operands, name)[int(index)] if index.isdigit() else getattr(operands, buffer.name)
    return np.ascontiguousarray(np.asarray(value))


def parameters(names=tuple(ALL)) -> list:
    return [pytest.param(ALL[n], id=n, marks=() if n in FAST else pytest.mark.slow) for n in names]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_plans_keep_to_the_budgets(dtype):
    for head_dim in range(8, 257, 8):
        for value_head_dim in (8, 64, head_dim, 256):
            chosen = backward_plan(AttentionSpec(dtype, head_dim, value_head_dim))
            assert chosen.tile_d >= head_dim and chosen.tile_e >= value_head_dim
            assert chosen.shared_bytes <= SMEM_BYTES
            assert chosen.tmem.dq + chosen.tmem.dq_columns <= TMEM_COLUMNS


@pytest.mark.parametrize(("head_dim", "mask", "keys"), [
    (64, masks.Full(), 256),
    (64, masks.Causal(), 128),
    (64, masks.Causal() & masks.Segments(), 128),
    (64, masks.Window(64, 64), 128),
    (128, masks.Causal(), 256),
])  # fmt: skip
def test_tiles_are_small_where_much_of_a_large_one_would_lie_beyond_an_edge(head_dim, mask, keys):
    assert backward_plan(AttentionSpec("bfloat16", head_dim, head_dim, mask=masks.canonical(mask))).block_k == keys


@pytest.mark.parametrize(("chosen", "dq_over", "overlapping"), [
    (single_plan(64, 64), DqOver.NOTHING, set()),
    (single_plan(128, 64), DqOver.DP, {("dp", "dq")}),
    (single_plan(64, 128), DqOver.NOTHING, set()),
    (single_plan(128, 128), DqOver.DP, {("dp", "dq")}),
    (pair_plan(64, 64), DqOver.NOTHING, set()),
    (pair_plan(128, 64), DqOver.NOTHING, set()),
    (pair_plan(128, 128), DqOver.SCORES, {("dq", "scores")}),
    (narrow_plan(192, 192), DqOver.NOTHING, set()),
    (narrow_plan(256, 256), DqOver.NOTHING, set()),
])  # fmt: skip
def test_tensor_memory_overlaps_only_where_the_table_says(chosen, dq_over, overlapping):
    table = chosen.tmem
    widths = {"scores": table.score_columns, "dp": table.score_columns, "dq": table.dq_columns,
              "dv": table.dv_columns, "dk": table.dk_columns}  # fmt: skip
    ranges = {name: range(getattr(table, name), getattr(table, name) + width) for name, width in widths.items()}
    assert table.dq_over is dq_over
    assert {(a, b) for a in ranges for b in ranges if a < b and set(ranges[a]) & set(ranges[b])} == overlapping
    if not chosen.narrow:
        # P, 32 columns for each half of the queries, lies within S, outside dP and, in a pair, outside dQ.
        free = set(ranges["scores"]) - set(ranges["dp"]) - (set(ranges["dq"]) if chosen.paired else set())
        for start in (table.scores, table.scores + table.p_distance):
            assert set(range(start, start + 32)) <= free


def test_a_plan_over_its_budget_says_both_numbers():
    chosen = single_plan(128, 128)
    with pytest.raises(ValueError, match=rf"needs \d+ bytes, a block has {SMEM_BYTES}"):
        dataclasses.replace(chosen, q_stages=3)
    with pytest.raises(ValueError, match=f"needs 640, an SM has {TMEM_COLUMNS}"):
        TensorMemory(128, 256)
    with pytest.raises(ValueError, match=f"of {REGISTERS}"):
        Registers(reduce=200)


@pytest.mark.parametrize(("dims", "mask"), [
    ((128, 128), masks.Causal()),
    pytest.param((128, 128), masks.Full(), marks=pytest.mark.slow),
    pytest.param((128, 128), masks.Causal() & masks.Segments(), marks=pytest.mark.slow),
    pytest.param((64, 64), masks.Causal(), marks=pytest.mark.slow),
    pytest.param((64, 64), masks.Causal() & masks.Segments(), marks=pytest.mark.slow),
    pytest.param((192, 128), masks.Causal(), marks=pytest.mark.slow),
    pytest.param((192, 128), masks.Causal() & masks.Segments(), marks=pytest.mark.slow),
    pytest.param((256, 256), masks.Causal(), marks=pytest.mark.slow),
    pytest.param((256, 256), masks.Causal() & masks.Segments(), marks=pytest.mark.slow),
])  # fmt: skip
def test_machine_code_keeps_to_the_plan(dims, mask):
    spec = AttentionSpec("bfloat16", *dims, scale=dims[0] ** -0.5, mask=masks.canonical(mask))
    artifact, registers = artifact_of(spec), backward_plan(spec).registers
    assert artifact.spilled == ()
    main = max(artifact.kernels, key=lambda kernel: kernel.code_bytes)
    assert main.registers == 65536 // backward_plan(spec).warps.threads, "what the block starts with"
    budgets = re.findall(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32\s+(\d+)", artifact.ptx)
    assert set(budgets) == {
        ("inc", str(registers.reduce)), ("inc", str(registers.compute)), ("dec", str(registers.other))
    }  # fmt: skip


@pytest.mark.parametrize("case", parameters())
def test_gradients_keep_to_the_accuracy_rule(case):
    """A strict run: it also reports what hardware forgives."""
    spec, operands, cotangents, gradients = run(case, seed=1, draw=1, settings={"strict": True})
    assert artifact_of(spec).spilled == ()
    rows = accuracy.judge(gradients, spec, operands, cotangents)
    assert [row.name for row in rows] == list(GRADIENTS)
    assert all(row.ok for row in rows), "\n".join(map(str, rows))


@pytest.mark.slow
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_every_interleaving_is_right(name):
    """dK and dV come out the same bit for bit; dQ, whose sums are in an order of the interleaving, to the last bit."""
    spec, operands, cotangents, first = run(ALL[name])
    rows = accuracy.judge(first, spec, operands, cotangents)
    assert all(row.ok for row in rows), "\n".join(map(str, rows))
    dq = first["dq"].astype(np.float64)
    last_bit = float(jnp.finfo(spec.dtype).eps) * np.maximum(np.abs(dq), np.sqrt(np.mean(dq**2)))
    for seed in range(1, 20):
        again = run(ALL[name], seed)[3]
        assert all(first[key].tobytes() == again[key].tobytes() for key in ("dk", "dv")), f"seed {seed}"
        assert (np.abs(again["dq"].astype(np.float64) - dq) <= last_bit).all(), f"seed {seed}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["long-causal", "long-window", "odd-group"])
def test_deterministic_gradients_do_not_depend_on_the_order_of_execution(name):
    first = run(ALL[name], deterministic=True)[3]
    for seed, sm_count in [(seed, sm_count) for seed in range(1, 8) for sm_count in (1, 3, 64)]:
        again = run(ALL[name], seed, settings={"sm_count": sm_count}, deterministic=True)[3]
        for key, value in first.items():
            assert value.tobytes() == again[key].tobytes(), f"{key}, seed {seed}, {sm_count} multiprocessors"


@pytest.mark.slow
def test_gradients_in_float32():
    spec, operands, cotangents, gradients = run(ALL["long-causal"], float32_out=True)
    assert all(value.dtype == np.float32 for value in gradients.values())
    rows = accuracy.judge(gradients, spec, operands, cotangents)
    assert all(row.ok for row in rows), "\n".join(map(str, rows))


def _train(backend: str, steps: int):
    """(gradients of the first step by parameter, losses) of examples/train_lm.py's model in bfloat16."""
    import jax
    import optax
    import train_lm
    from flax import nnx
    from flax_model import Decoder, DecoderConfig

    args = train_lm.parse_arguments(["--backend", backend, "--dtype", "bfloat16", "--seq-len", "192", "--batch", "2"])
    names = [field.name for field in dataclasses.fields(DecoderConfig) if field.name in args]
    options = {name: getattr(args, name) for name in names}
    model, corpus = Decoder(DecoderConfig(**options), nnx.Rngs(0)), train_lm.read_corpus()
    optimizer = nnx.Optimizer(model, optax.adamw(4e-3), wrt=nnx.Param)
    random, first, losses = np.random.default_rng(0), None, []
    for step in range(steps):
        starts = random.integers(0, len(corpus.train) - args.seq_len - 1, args.batch)
        batch = train_lm.windows(corpus.train, starts, args.seq_len)
        if step == 0:
            first = nnx.jit(nnx.grad(train_lm.loss_of))(model, batch)
        losses.append(float(train_lm.train_step(model, optimizer, batch)))
    return {jax.tree_util.keystr(k): v for k, v in jax.tree_util.tree_leaves_with_path(nnx.state(first))}, losses


@pytest.mark.slow
def test_training_follows_the_xla_path(monkeypatch):
    """The example's model through both kernels: gradients of the first step, and twenty losses."""
    emulated.require_library()
    pytest.importorskip("flax")
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parents[2] / "examples")
    want, want_losses = _train("xla", 20)
    got, losses = _train("emulate:sm_100a", 20)
    assert want.keys() == got.keys() and len(want) > 10
    for name, value in want.items():
        value, other = (np.asarray(a, np.float64) for a in (value, got[name]))
        assert np.linalg.norm(other - value) <= 1e-2 * np.linalg.norm(value), name
    np.testing.assert_allclose(losses, want_losses, atol=1e-2)
    assert losses[-1] < losses[0] - 1.0
