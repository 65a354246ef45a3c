"""Trains a byte-level language model with ``jax_fa4.attention`` on the Python standard library's sources.

    python examples/train_lm.py                    # about two minutes on two CPU cores
    python examples/train_lm.py --zero-attention   # the same run with attention's output zeroed
    python examples/train_lm.py --dtype bfloat16 --seq-len 8192 --remat attention   # on a GPU

Prints the held-out loss (nats per byte) before and after, and a sample; writes ``loss.png`` and ``metrics.json``.
"""

import argparse
import json
import os
import sys
import sysconfig
import time
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax_model import REMAT_POLICIES, Decoder, DecoderConfig
from jax.typing import ArrayLike
from tqdm import tqdm


class Corpus(NamedTuple):
    """Bytes to train on and bytes held out, from different files."""

    train: np.ndarray
    held_out: np.ndarray


def read_corpus(held_out_every: int = 20) -> Corpus:
    """The standard library's ``.py`` files, every twentieth of them held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = [path for path in sorted(root.rglob("*.py")) if not skipped & set(path.relative_to(root).parts)]
    if len(files) < held_out_every:
        sys.exit(f"found {len(files)} Python sources under {root}, too few to train on: is the standard library there?")
    texts = [path.read_bytes() for path in files]
    held_out = b"".join(texts[::held_out_every])
    train = b"".join(text for i, text in enumerate(texts) if i % held_out_every)
    return Corpus(np.frombuffer(train, np.uint8), np.frombuffer(held_out, np.uint8))


def windows(text: np.ndarray, starts: np.ndarray, length: int) -> jax.Array:
    """``length + 1`` bytes from each start: inputs and, shifted by one, targets."""
    return jnp.asarray(text[starts[:, None] + np.arange(length + 1)], jnp.int32)


def loss_of(model: Decoder, batch: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats per byte of [B, S + 1] bytes."""
    return optax.softmax_cross_entropy_with_integer_labels(model(batch[:, :-1]), batch[:, 1:]).mean()


@nnx.jit
def train_step(model: Decoder, optimizer: nnx.Optimizer, batch: jax.Array) -> jax.Array:
    loss, gradients = nnx.value_and_grad(loss_of)(model, batch)
    optimizer.update(model, gradients)
    return loss


held_out_step = nnx.jit(loss_of)


def held_out_loss(model: Decoder, text: np.ndarray, args: argparse.Namespace) -> float:
    """Mean loss over evenly spaced held-out windows, about 32k bytes in all."""
    batches = max(1, 32_768 // (args.batch * args.seq_len))
    starts = np.linspace(0, len(text) - args.seq_len - 1, batches * args.batch).astype(np.int64)
    losses = [held_out_step(model, windows(text, part, args.seq_len)) for part in np.split(starts, batches)]
    return float(np.mean(losses))


def sample(model: Decoder, prompt: bytes, args: argparse.Namespace) -> str:
    """Continues the prompt by ``args.sample_bytes`` bytes, at temperature 0.8, with a window of fixed length."""

    @nnx.jit
    def next_byte(model: Decoder, tokens: ArrayLike, last: ArrayLike, key: jax.Array) -> jax.Array:
        return jax.random.categorical(key, model(jnp.asarray(tokens))[0, last] / 0.8)

    text = list(prompt)
    for step in range(args.sample_bytes):
        recent = text[-args.seq_len :]
        tokens = np.zeros((1, args.seq_len), np.int32)
        tokens[0, : len(recent)] = recent  # what follows the last byte is out of its sight: the model is causal
        text.append(int(next_byte(model, tokens, len(recent) - 1, jax.random.key(step))))
    return bytes(text).decode("utf-8", "replace")


def plot(losses: list[float], before: float, after: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(np.arange(1, len(losses) + 1), losses, lw=0.8, alpha=0.8, label="training")
    axes.plot([0, len(losses)], [before, after], "o", ms=8, label=f"held out: {before:.2f} to {after:.2f}")
    axes.set(xlabel="step", ylabel="nats per byte", title="Byte-level language model, jax_fa4.attention")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    on_gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="auto", help="auto, xla, cuda or emulate:<arch> (default: auto)")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--remat", choices=tuple(REMAT_POLICIES), default="none", help="what backward recomputes")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--window", type=int, help="keys seen to the left of each query (default: all)")
    parser.add_argument("--sinks", action="store_true", help="with attention sinks")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16" if on_gpu else "float32")
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--zero-attention", action="store_true", help="zero attention's output: what is it worth?")
    parser.add_argument("--sample-bytes", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for loss.png and metrics.json")
    args = parser.parse_args(argv)
    if args.width % args.heads or args.heads % args.kv_heads:
        parser.error(f"--heads {args.heads} must divide --width {args.width} and be a multiple of --kv-heads")
    for name in ("steps", "seq_len", "batch"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    return args


def main(argv: list[str] | None = None) -> dict[str, float]:
    args = parse_arguments(argv)
    options = {field.name: getattr(args, field.name) for field in fields(DecoderConfig) if hasattr(args, field.name)}
    config = DecoderConfig(**options)
    corpus = read_corpus()
    model = Decoder(config, nnx.Rngs(args.seed))
    schedule = optax.warmup_cosine_decay_schedule(0.0, args.learning_rate, min(30, args.steps), args.steps + 1)
    transform = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.05))
    optimizer = nnx.Optimizer(model, transform, wrt=nnx.Param)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    device = jax.devices()[0]
    print(
        f"{parameters:,} parameters, {config.dtype}, attention backend {config.backend!r} on {device.device_kind}; "
        f"{len(corpus.train):,} training bytes, {len(corpus.held_out):,} held out"
    )

    before = held_out_loss(model, corpus.held_out, args)
    print(f"held-out loss before: {before:.3f} nats/byte")
    random = np.random.default_rng(args.seed)
    losses: list[float] = []
    began, cpu_began = time.perf_counter(), os.times().user
    with tqdm(range(args.steps), desc="training", unit="step", dynamic_ncols=True) as progress:
        for _ in progress:
            starts = random.integers(0, len(corpus.train) - args.seq_len - 1, args.batch)
            losses.append(float(train_step(model, optimizer, windows(corpus.train, starts, args.seq_len))))
            progress.set_postfix(loss=f"{np.mean(losses[-20:]):.3f}")
    seconds, cpu_seconds = time.perf_counter() - began, os.times().user - cpu_began
    after = held_out_loss(model, corpus.held_out, args)
    rate = args.steps * args.batch * args.seq_len / seconds
    print(f"held-out loss after:  {after:.3f} nats/byte ({seconds:.0f} s, {rate:,.0f} bytes/s)")

    if args.sample_bytes:
        print("--- sample", "-" * 60)
        print(sample(model, b"def __init__(self, ", args))
        print("-" * 71)
    args.out.mkdir(parents=True, exist_ok=True)
    plot(losses, before, after, args.out / "loss.png")
    metrics = {"before": before, "after": after, "seconds": seconds, "cpu_seconds": cpu_seconds, "steps": args.steps}
    (args.out / "metrics.json").write_text(json.dumps(metrics, indent=1))
    print(f"wrote {args.out / 'loss.png'} and {args.out / 'metrics.json'}")
    return metrics


if __name__ == "__main__":
    main()
