"""Trains the Flax decoder on a data x tensor x sequence mesh, its long axis by Ring Attention, with checkpoints.

    python examples/sharded_training.py                                 # eight virtual CPU devices, 2 x 2 x 2
    python examples/sharded_training.py --sequence 8 --seq-len 8192     # all devices along the sequence
    python examples/sharded_training.py --steps 200                     # goes on where the last run was killed

The same script runs on GPUs: the mesh takes whatever devices JAX sees. Batches depend on the step alone, so a run that
was killed and started again has the same losses. Losses go to ``losses.jsonl``, checkpoints beside it.
"""

import argparse
import functools
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from flax_model import REMAT_POLICIES, Decoder, DecoderConfig
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm
from train_lm import read_corpus

import jax_fa4

TENSOR_SPLITS = {
    "query": P(None, "tensor", None),
    "key": P(None, "tensor", None),
    "value": P(None, "tensor", None),
    "out": P("tensor", None, None),
    "gate_up": P(None, "tensor"),
    "down": P("tensor", None),
    "logits": P(None, "tensor"),
    "sinks": P("tensor"),
}
"""How the parameters of a module are split, by the module's name; all others are whole on every device."""


@dataclass(frozen=True)
class Trainer:
    """What one run holds fixed.

    Attributes:
      mesh: axes data, tensor, sequence.
      config: the decoder's sizes; its attention runs over the mesh.
      layout: of rows over the sequence axis.
      transform: the optimizer.
      seed: of the parameters.
    """

    mesh: Mesh
    config: DecoderConfig
    layout: str
    transform: optax.GradientTransformation
    seed: int

    @functools.cached_property
    def graph(self) -> Any:
        """The model's static part."""
        return nnx.split(nnx.eval_shape(lambda: Decoder(self.config, nnx.Rngs(0))))[0]

    def create(self) -> dict[str, Any]:
        """Parameters and optimizer state, made on the devices that hold them."""
        shapes = jax.eval_shape(self._new_state)
        return jax.jit(self._new_state, out_shardings=self.shardings(shapes))()

    def _new_state(self) -> dict[str, Any]:
        parameters = nnx.state(Decoder(self.config, nnx.Rngs(self.seed)), nnx.Param)
        pure = nnx.to_pure_dict(parameters)
        return {"parameters": pure, "optimizer": self.transform.init(pure)}

    def shardings(self, shapes: Any) -> Any:
        """Shardings of a state, from the names on each array's path; optimizer moments lie as their parameters."""

        def of(path: tuple, leaf: Any) -> NamedSharding:
            names = [str(getattr(entry, "key", "")) for entry in path]
            spec = next((TENSOR_SPLITS[name] for name in names if name in TENSOR_SPLITS), P())
            return NamedSharding(self.mesh, spec if len(spec) <= leaf.ndim else P())

        return jax.tree_util.tree_map_with_path(of, shapes)

    def place(self, windows: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """Inputs and targets [B, S] of windows [B, S + 1], in the layout's order, on their devices."""
        order = jax_fa4.layout_positions(windows.shape[1] - 1, self.layout, self.mesh.shape["sequence"])
        sharding = NamedSharding(self.mesh, P("data", "sequence"))
        tokens, targets = (x[:, order].astype(np.int32) for x in (windows[:, :-1], windows[:, 1:]))
        return jax.device_put(tokens, sharding), jax.device_put(targets, sharding)

    def loss(self, parameters: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        """Mean cross-entropy in nats per byte."""
        model = nnx.merge(self.graph, nnx.State(parameters))
        order = jax_fa4.layout_positions(tokens.shape[1], self.layout, self.mesh.shape["sequence"])
        logits = model(tokens, positions=jnp.asarray(order))
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def step(self, state: dict[str, Any], tokens: jax.Array, targets: jax.Array) -> tuple[dict[str, Any], jax.Array]:
        loss, gradients = jax.value_and_grad(self.loss)(state["parameters"], tokens, targets)
        updates, optimizer = self.transform.update(gradients, state["optimizer"], state["parameters"])
        return {"parameters": optax.apply_updates(state["parameters"], updates), "optimizer": optimizer}, loss


def make_mesh(args: argparse.Namespace) -> Mesh:
    """data x tensor x sequence over all devices; axes that the user left open share what remains."""
    count = jax.device_count()
    sizes = {name: getattr(args, name) for name in ("data", "tensor", "sequence")}
    fixed = math.prod(size for size in sizes.values() if size)
    if count % fixed:
        raise SystemExit(f"--data x --tensor x --sequence is {fixed}, which does not divide {count} devices")
    free = count // fixed
    for name, size in sizes.items():
        if size is None:
            sizes[name] = 2 if free % 2 == 0 and name != "sequence" and free > 2 else 1
            sizes[name] = free if name == "sequence" else sizes[name]
            free //= sizes[name]
    used = math.prod(sizes.values())
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * 3,
                         devices=jax.devices()[:used])


def make_trainer(args: argparse.Namespace) -> Trainer:
    mesh = make_mesh(args)
    attend = functools.partial(
        jax_fa4.ring_attention, mesh=mesh, axis="sequence", batch_axis="data", head_axis="tensor", layout=args.layout
    )
    config = DecoderConfig(
        layers=args.layers, width=args.width, heads=args.heads, kv_heads=args.kv_heads, dtype=args.dtype,
        window=args.window, backend=args.backend, remat=args.remat, attend=attend,
    )
    transform = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(args.learning_rate, b2=0.98))
    return Trainer(mesh, config, args.layout, transform, args.seed)


def batch_at(step: int, text: np.ndarray, args: argparse.Namespace) -> np.ndarray:
    """The windows of a step: they depend on nothing else, so that a resumed run sees the same data."""
    starts = np.random.default_rng([args.seed, step]).integers(0, len(text) - args.seq_len - 1, args.batch)
    return text[starts[:, None] + np.arange(args.seq_len + 1)]


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=int, help="devices along the batch")
    parser.add_argument("--tensor", type=int, help="devices along heads and MLP")
    parser.add_argument("--sequence", type=int, help="devices of the ring")
    parser.add_argument("--layout", default="zigzag", choices=("contiguous", "zigzag", "striped"))
    parser.add_argument("--steps", type=int, default=40, help="in all, those of earlier runs counted")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--window", type=int)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--remat", choices=tuple(REMAT_POLICIES), default="attention")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--out", type=Path, default=Path("out/sharded"), help="folder of checkpoints and losses")
    args = parser.parse_args(argv)
    for name in ("steps", "batch", "seq_len", "save_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    return args


def main(argv: list[str] | None = None) -> list[float]:
    """Trains and returns the losses of the steps that this run made."""
    args = parse_arguments(argv)
    trainer = make_trainer(args)
    shape = ", ".join(f"{name} {size}" for name, size in trainer.mesh.shape.items())
    print(f"mesh: {shape} on {jax.devices()[0].device_kind}; {args.layout} layout, remat {args.remat!r}")
    text = read_corpus().train
    args.out.mkdir(parents=True, exist_ok=True)
    options = ocp.CheckpointManagerOptions(save_interval_steps=args.save_every, max_to_keep=2)
    with ocp.CheckpointManager(args.out.absolute() / "checkpoints", options=options) as checkpoints:
        state, first = trainer.create(), 0
        if checkpoints.latest_step() is not None:
            first = checkpoints.latest_step()
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
            state = checkpoints.restore(first, args=ocp.args.StandardRestore(abstract))
            print(f"goes on after step {first}")
        losses = []
        began = time.perf_counter()
        with (
            tqdm(range(first, args.steps), desc="training", unit="step", dynamic_ncols=True) as progress,
            (args.out / "losses.jsonl").open("a") as log,
        ):
            for step in progress:
                state, loss = trainer.step(state, *trainer.place(batch_at(step, text, args)))
                losses.append(float(loss))
                log.write(json.dumps({"step": step + 1, "loss": losses[-1]}) + "\n")
                log.flush()
                checkpoints.save(step + 1, args=ocp.args.StandardSave(state), force=step + 1 == args.steps)
                rate = len(losses) * args.batch * args.seq_len / (time.perf_counter() - began)
                progress.set_postfix(loss=f"{losses[-1]:.3f}", tokens_per_s=f"{rate:,.0f}")
        checkpoints.wait_until_finished()
    if losses:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats/byte in steps {first + 1} to {args.steps}")
    else:
        print(f"nothing to do: --steps {args.steps} were made before (remove {args.out} to start anew)")
    return losses


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # of the cpu platform only; GPUs are those that are there
    main()
