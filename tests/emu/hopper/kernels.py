"""Our own sm_90a kernels on a real Hopper part and on the software GPU: the same artifacts, the same inputs.

    python tests/emu/hopper/kernels.py prepare FOLDER     # anywhere: compiles, computes the inputs, emulates
    python tests/emu/hopper/kernels.py run FOLDER OUT     # on the GPU, through JAX and the custom call
    python tests/emu/hopper/kernels.py compare FOLDER OUT # writes kernels.json (statistics), kernels.npz
                                                          # (samples), kernels_forms.txt

(PYTHONPATH: the repository and its tests folder; JAX_FA4_LIBRARY: the package's library.) FOLDER takes about 12 MB.
"""

import dataclasses
import functools
import json
import pathlib
import sys
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from emu import forms
from emu.our_calls import Call

from jax_fa4 import compile, launch
from jax_fa4.artifact import Artifact

ARCH = "sm_90a"
SAMPLE = 512  # elements of each output kept in the repository
RUNS = 5      # on the GPU, of each case
HERE = pathlib.Path(__file__).parent

LONG = (("B", 1), ("S", 1000), ("T", 1000), ("H", 2), ("K", 1))
CASES = {call.name: call for call in (
    *(Call(name, "forward", ARCH) for name in (
        "full", "causal-heavy", "full-float16", "d64-e32", "d192-e128", "d256", "mqa", "window", "softcap",
        "sinks-window-gqa", "lengths-causal", "segments", "score-function")),
    Call("d128", "forward", ARCH, LONG),
    *(Call(name, "backward", ARCH) for name in (
        "causal", "full-float16", "d192-e128", "d256", "mqa", "window-left", "softcap", "lengths-window-sinks",
        "segments", "window-runtime-causal", "deterministic")),
    Call("d128", "backward", ARCH, LONG),
)}  # fmt: skip


# -- prepare, run, compare --------------------------------------------------------------------------------------------

def prepare(folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    executed = set()
    for name, call in CASES.items():
        artifact, arrays = call.compiled(), call.inputs()
        outputs, report = call.emulate(artifact, arrays)
        (folder / f"{name}.artifact").write_bytes(artifact.to_bytes())
        save(folder / f"{name}.inputs.npz", arrays)
        save(folder / f"{name}.emulated.npz", outputs)
        executed |= forms.of_reports([report])
        print(name, flush=True)
    (folder / "forms.txt").write_text("\n".join(sorted(executed)) + "\n")


def run(folder: pathlib.Path, out: pathlib.Path) -> None:
    """Each case several times; an output that moves is said so."""
    summary = {"device": jax.devices()[0].device_kind, "moves": {}, "failed": {}}
    for name, call in CASES.items():
        try:
            artifact = Artifact.from_bytes((folder / f"{name}.artifact").read_bytes())
            compile.artifact = lambda *_, found=artifact: found
            inputs, kernel = load(folder / f"{name}.inputs.npz"), call.kernel_call
            step = jax.jit(functools.partial(launch.launch, kernel))
            runs = [jax.device_get(step(*(inputs[b.name] for b in kernel.inputs))) for _ in range(RUNS)]
            names = [b.name for b in kernel.outputs]
            moves = [n for n, *several in zip(names, *runs, strict=True) if len({x.tobytes() for x in several}) > 1]
            if moves:
                summary["moves"][name] = moves
            save(out / f"{name}.real.npz", dict(zip(names, runs[0], strict=True)))
        except Exception as error:
            summary["failed"][name] = repr(error)[:300]
        print(name, summary["failed"].get(name, "ran"), flush=True)
    (out / "kernels_run.json").write_text(json.dumps(summary, indent=1))


def compare(folder: pathlib.Path, out: pathlib.Path) -> None:
    summary = json.loads((out / "kernels_run.json").read_text()) | {"cases": {}}
    samples = {}
    for name in CASES:
        if name in summary["failed"]:
            continue
        real, emulated = load(out / f"{name}.real.npz"), load(folder / f"{name}.emulated.npz")
        summary["cases"][name] = {n: dataclasses.asdict(difference(emulated[n], real[n])) for n in real}
        for n, x in real.items():
            samples[f"{name}/{n}"] = x.reshape(-1)[picked(name, n, x.size)].astype(np.float32)
        print(name, {n: f"{d['relative']:.1e}, {d['equal']:.3f} equal" for n, d in summary["cases"][name].items()})
    (HERE / "kernels_forms.txt").write_text((folder / "forms.txt").read_text())
    (HERE / "kernels.json").write_text(json.dumps(summary, indent=1) + "\n")
    np.savez_compressed(HERE / "kernels.npz", **samples)


@dataclasses.dataclass(frozen=True)
class Difference:
    """Of an emulated output to the real one: norm of the difference over the norm of the real one, largest absolute
    difference, and the share of elements that are equal bit by bit. Infinite where infinities or NaNs differ."""

    relative: float
    largest: float
    equal: float


def difference(emulated: np.ndarray, real: np.ndarray) -> Difference:
    got, want = emulated.astype(np.float64), real.astype(np.float64)
    equal = float(np.mean((got == want) | (np.isnan(got) & np.isnan(want))))
    finite = np.isfinite(want)
    if not np.array_equal(got[~finite], want[~finite], equal_nan=True) or not np.isfinite(got[finite]).all():
        return Difference(float("inf"), float("inf"), equal)
    apart = got[finite] - want[finite]
    norm = float(np.linalg.norm(want[finite])) or 1.0
    return Difference(float(np.linalg.norm(apart)) / norm, float(np.abs(apart).max(initial=0)), equal)


def picked(case: str, output: str, size: int) -> np.ndarray:
    """Places of an output's sample."""
    draw = np.random.default_rng(zlib.crc32(f"{case}/{output}".encode()))
    return np.sort(draw.choice(size, min(size, SAMPLE), replace=False))


def save(path: pathlib.Path, arrays: dict[str, np.ndarray]) -> None:
    """npz has no bfloat16: such arrays go as their bits, with the type in the name."""
    bits = {n: x.view(np.uint16) if x.dtype == jnp.bfloat16 else x for n, x in arrays.items()}
    np.savez_compressed(path, **{f"{n}:{x.dtype}": bits[n] for n, x in arrays.items()})


def load(path: pathlib.Path) -> dict[str, np.ndarray]:
    with np.load(path) as stored:
        return {n.split(":")[0]: stored[n].view(jnp.dtype(n.split(":")[1])) for n in stored.files}


if __name__ == "__main__":
    {"prepare": prepare, "run": run, "compare": compare}[sys.argv[1]](*map(pathlib.Path, sys.argv[2:]))
