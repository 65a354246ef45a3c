"""Our Blackwell forward kernel beside flash-attn-4's, unit by unit, on the software GPU.

    PYTHONPATH=.:tests python tests/kernels/sm100_peer.py      # a table in Markdown

flash-attn-4 is compiled unchanged by `emu.known_right`. Both kernels get the same inputs; one head, batch 1.
"""

import itertools

import numpy as np
from emu import known_right

from jax_fa4 import compile, counting, emulator, masks, plan
from jax_fa4.kernels.common.abi import Dims
from jax_fa4.spec import AttentionSpec

ARCH = "sm_100a"
CASES = tuple(itertools.product((64, 128), (False, True), (1024, 4096)))


def count(head_dim: int, causal: bool, length: int) -> dict[str, dict]:
    """{"theirs", "ours"}: counters of a kernel with its bound cycles, as `counting.summarize` gives them."""
    problem = known_right.Problem(length, 1, 1, head_dim, causal)
    o, lse = known_right.aligned(problem.q.shape, problem.q.dtype), known_right.aligned((1, 1, length), np.float32)
    name = f"d{head_dim}_{'causal' if causal else 'full'}"
    (where,) = known_right.folder(ARCH, name).glob(f"{name}_FlashAttentionForward*")
    theirs = known_right.Kernel(where)([problem.q, problem.k, problem.v, o, lse], problem.scale, threads=1)
    agree(o, lse, problem)

    mask = masks.Causal() if causal else masks.Full()
    spec = AttentionSpec("bfloat16", head_dim, head_dim, scale=problem.scale, mask=mask)
    artifact = compile.artifact(spec, ARCH, plan.SizeClass.MANY_TILES, "forward")
    o, lse = known_right.aligned(problem.q.shape, problem.q.dtype), known_right.aligned((1, 1, length), np.float32)
    arrays = {"q": problem.q, "k": problem.k, "v": problem.v, "o": o, "lse": lse}
    ours = emulator.launch(artifact, arrays, Dims(1, length, length, 1, 1, 148), threads=1)
    agree(o, lse, problem)
    summaries = {"theirs": counting.summarize([theirs]), "ours": counting.summarize([ours])}
    return {who: summary["kernels"][summary["kernel_names"][0]] for who, summary in summaries.items()}


def agree(o: np.ndarray, lse: np.ndarray, problem) -> None:
    error = np.linalg.norm(o.astype(np.float64) - problem.o) / np.linalg.norm(problem.o)
    assert error < 3e-3 and np.abs(lse - problem.lse).max() < 1e-4


ROWS = {
    "tensor core": lambda k: k["bound_cycles"]["tensor"],
    "special functions": lambda k: k["bound_cycles"]["mufu"],
    "FMA pipe": lambda k: k["bound_cycles"]["fma"],
    "ALU": lambda k: k["bound_cycles"]["alu"],
    "conversions": lambda k: k["bound_cycles"]["convert"],
    "shared memory, by threads": lambda k: k["bound_cycles"]["shared_memory"],
    "tensor memory, MB": lambda k: (k["bytes"]["tensor_memory_read"] + k["bytes"]["tensor_memory_written"]) / 1e6,
    "TMA, MB": lambda k: (k["bytes"]["bulk_read"] + k["bytes"]["bulk_written"]) / 1e6,
    "barrier instructions": lambda k: k["units"]["barrier"],
}
"""What the table shows: cycles at the least for units with a rate, else amounts."""


def main() -> None:
    counted = {case: count(*case) for case in CASES}
    heads = [f"D{d} {'causal' if c else 'full'} {n // 1024}k" for d, c, n in CASES]
    print("| | " + " | ".join(heads) + " |\n|" + "---|" * (1 + len(heads)))
    for name, value in ROWS.items():
        cells = []
        for kernels in counted.values():
            ours, theirs = value(kernels["ours"]), value(kernels["theirs"])
            cells.append(f"{ours:,.0f} / {theirs:,.0f} = {ours / theirs:.2f}")
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
