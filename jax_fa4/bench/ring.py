"""Ring Attention on all GPUs against one GPU, on the same total work."""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jax_fa4 import backends, vjp
from jax_fa4.api import attention
from jax_fa4.bench.overlap import profiled
from jax_fa4.bench.timing import Runnable, calls_for, seconds_per_call, time_interleaved
from jax_fa4.ring import ring_attention
from jax_fa4.ring.merge import merge
from jax_fa4.spec import Arguments, make_spec

HEAD_DIM = 128


@dataclass(frozen=True)
class RingWorkload:
    """Self-attention of one sequence, bfloat16, head dim 128.

    Attributes:
      tokens: sequence length, over all devices.
      heads, kv_heads: query and key/value heads.
      kind: "full", "causal" (zigzag layout) or "window" (4096 keys to the left, contiguous).
      direction: "forward" or "both" (forward and backward).
    """

    tokens: int
    heads: int
    kv_heads: int
    kind: str
    direction: str

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of `attention`."""
        masks: dict[str, dict[str, Any]] = {
            "full": {}, "causal": {"causal": True}, "window": {"causal": True, "window": (4095, None)},
        }
        return masks[self.kind]

    @property
    def layout(self) -> str:
        return "zigzag" if self.kind == "causal" else "contiguous"

    @property
    def flops(self) -> float:
        """Of the scores that the mask keeps; backward counts 2.5 times forward."""
        pairs = {
            "full": self.tokens**2,
            "causal": self.tokens**2 / 2,
            "window": self.tokens * 4096 - 4096**2 / 2,
        }[self.kind]
        return 4 * self.heads * HEAD_DIM * pairs * (1 if self.direction == "forward" else 3.5)

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of q, k, v and dO."""
        q, kv = (1, self.tokens, self.heads, HEAD_DIM), (1, self.tokens, self.kv_heads, HEAD_DIM)
        return q, kv, kv, q

    def __str__(self) -> str:
        return f"{self.tokens // 1024}k {self.heads}/{self.kv_heads} heads {self.kind} {self.direction}"


def function(attend: Callable, work: RingWorkload) -> Callable:
    """(q, k, v, do) -> o, or (o, dq, dk, dv) for both directions."""

    def both(q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array) -> Any:
        o, pull = jax.vjp(attend, q, k, v)
        return o, *pull(do)

    return (lambda q, k, v, do: attend(q, k, v)) if work.direction == "forward" else both


def over(mesh: Mesh, work: RingWorkload, backend: str, **options: Any) -> Callable:
    """The ring's function of global arrays."""
    attend = functools.partial(
        ring_attention, mesh=mesh, axis="sp", layout=work.layout, backend=backend, **work.options, **options
    )
    return function(attend, work)


def alone(work: RingWorkload, backend: str, **options: Any) -> Callable:
    """The same on one device."""
    return function(functools.partial(attention, backend=backend, **work.options, **options), work)


def gathered(mesh: Mesh, work: RingWorkload) -> Callable | None:
    """cuDNN's attention with gathered keys, by `jax.nn`; only full attention: it knows no position of a shard."""
    if work.kind != "full":
        return None

    def body(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        k, v = (lax.all_gather(x, "sp", axis=1, tiled=True) for x in (k, v))
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")

    rows = P(None, "sp")
    attend = jax.shard_map(body, mesh=mesh, in_specs=(rows, rows, rows), out_specs=rows, check_vma=False)
    return function(attend, work)


def mesh_of_all() -> Mesh:
    """All devices along one axis."""
    return jax.make_mesh((jax.device_count(),), ("sp",), axis_types=(AxisType.Auto,))


def arrays(work: RingWorkload, sharding: Any, seed: int = 0) -> list[jax.Array]:
    """Random q, k, v, dO, made where they lie."""

    @functools.partial(jax.jit, static_argnums=(1,), out_shardings=sharding)
    def draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.normal(key, shape, jnp.bfloat16)

    keys = jax.random.split(jax.random.key(seed), 4)
    return [draw(key, shape) for key, shape in zip(keys, work.shapes(), strict=True)]


def runnable(call: Callable[[], Any]) -> Runnable:
    """Calls follow each other without a wait, but on CPUs: there collectives of queued calls run out of threads."""
    if jax.default_backend() == "cpu":
        return Runnable(lambda: jax.block_until_ready(call()), lambda done: done)
    return Runnable(call, jax.block_until_ready)


def best_seconds(call: Callable, given: list[jax.Array], rounds: int) -> float:
    """Seconds per call: the median of `rounds` rounds of about 0.1 s each, after a warm-up that compiles."""
    work = runnable(lambda: call(*given))
    calls = calls_for(work, 0.1)
    return float(np.median([seconds_per_call(work, calls) for _ in range(rounds)]))


def device_bytes(compiled: Any) -> int:
    """What a compiled program needs on each device: arguments, results and temporaries."""
    need = compiled.memory_analysis()
    return need.argument_size_in_bytes + need.output_size_in_bytes + need.temp_size_in_bytes


def link_bytes_per_s(mesh: Mesh, megabytes: int, repeats: int = 16) -> float:
    """One-way bandwidth between neighbours: repeated transfers around the ring, nothing beside them."""
    count = mesh.size
    pairs = tuple((i, (i + 1) % count) for i in range(count))

    def body(x: jax.Array) -> jax.Array:
        return lax.scan(lambda x, _: (lax.ppermute(x, "sp", pairs), None), x, None, length=repeats)[0]

    rows = P("sp")
    call = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=rows, out_specs=rows))
    x = jax.device_put(jnp.zeros((count * megabytes << 20) // 4, jnp.float32), NamedSharding(mesh, rows))
    return repeats * (megabytes << 20) / best_seconds(call, [x], 5)


def inner_step(tokens: int, backend: str, rounds: int) -> dict[str, Any]:
    """What a ring step costs over plain attention of the same work, on one device: float32 results, merge, sums."""
    work = RingWorkload(tokens, 16, 16, "full", "both")
    q, k, v, do = arrays(work, SingleDeviceSharding(jax.devices()[0]))
    spec, operands = make_spec(Arguments(q, k, v))
    plain = backends.resolve(backend, spec, operands)
    partial = dataclasses.replace(spec, float32_out=True)
    step = backends.resolve(backend, partial, operands)
    o, lse = jax.jit(lambda x: plain.forward(spec, x))(operands)
    delta = jax.jit(vjp.delta)(o, do)
    first = (o.astype(jnp.float32), lse)
    sums = [x.astype(jnp.float32) for x in (q, k, v)]

    def backward_step(x: Any, lse: jax.Array, delta: jax.Array, do: jax.Array, sums: list[jax.Array]) -> Any:
        new = step.backward(partial, x, lse, delta, do)
        return [a + b for a, b in zip(sums, (new.dq, new.dk, new.dv), strict=True)]

    calls: dict[str, tuple[Callable, list[Any]]] = {
        "forward_s": (lambda x: plain.forward(spec, x), [operands]),
        "forward_step_s": (lambda x, first: merge(first, step.forward(partial, x)), [operands, first]),
        "backward_s": (lambda *x: plain.backward(spec, *x), [operands, lse, delta, do]),
        "backward_step_s": (backward_step, [operands, lse, delta, do, sums]),
    }
    row: dict[str, Any] = {"inner step": f"{tokens} tokens, 16 heads"}
    row |= {name: best_seconds(jax.jit(call), given, rounds) for name, (call, given) in calls.items()}
    row["forward_overhead"] = row["forward_step_s"] / row["forward_s"] - 1
    row["backward_overhead"] = row["backward_step_s"] / row["backward_s"] - 1
    return row


def measure(work: RingWorkload, backend: str, rounds: int) -> dict[str, Any]:
    """One row: seconds on all devices, on each alone, on each while all are busy, of cuDNN with gathered keys.

    All are timed in turn. No two devices are equally fast: `one_s` is the mean of `alone_s`. Devices of one host may
    share a power budget: `one_of_busy_s` tells what each of them does while all work, and `speed_up_of_busy` is the
    ring's gain over that.
    """
    mesh = mesh_of_all()
    spread = NamedSharding(mesh, P(None, "sp"))
    given = arrays(work, spread)
    ring = jax.jit(over(mesh, work, backend)).lower(*given).compile()
    local = [arrays(work, SingleDeviceSharding(device)) for device in mesh.devices.flat]
    single = [jax.jit(alone(work, backend)).lower(*x).compile() for x in local]
    alone_calls = [functools.partial(one, *x) for one, x in zip(single, local, strict=True)]
    calls: dict[str, Callable[[], Any]] = {
        "ring_s": lambda: ring(*given),
        "one_of_busy_s": lambda: [call() for call in alone_calls],
    } | {f"alone {i}": call for i, call in enumerate(alone_calls)}
    row: dict[str, Any] = {"workload": str(work), "devices": mesh.size,
                           "ring_device_bytes": device_bytes(ring), "one_device_bytes": device_bytes(single[0])}
    peer = gathered(mesh, work)
    if peer is not None:
        try:
            gather = jax.jit(peer).lower(*given).compile()
            jax.block_until_ready(gather(*given))
            calls["cudnn_gathered_s"] = lambda: gather(*given)
        except Exception as error:  # a peer's failure is a row without its figure, not the end of the run
            row["cudnn_error"] = f"{type(error).__name__}: {str(error)[:120]}"
    works = {name: runnable(call) for name, call in calls.items()}
    seconds = {name: timing.median_s for name, timing in time_interleaved(works, rounds, target_s=0.15) if timing}
    row["alone_s"] = [seconds.pop(f"alone {i}") for i in range(mesh.size)]
    row |= seconds | {"one_s": statistics.mean(row["alone_s"])}
    row["speed_up"] = row["one_s"] / row["ring_s"]
    row["speed_up_of_busy"] = row["one_of_busy_s"] / row["ring_s"]
    row["ring_tflops"] = work.flops / row["ring_s"] / 1e12
    row["one_tflops"] = work.flops / row["one_s"] / 1e12
    if jax.default_backend() == "gpu":
        seen = profiled(calls["ring_s"])
        row |= dataclasses.asdict(seen) | {"transfer_hidden": seen.hidden}
    return row


def compared(tokens: int) -> list[RingWorkload]:
    """What `compare` runs."""
    kinds = (("full", 16, 16), ("causal", 32, 4), ("window", 16, 16))
    return [RingWorkload(tokens, heads, kv_heads, kind, "both") for kind, heads, kv_heads in kinds]


def compare(tokens: int, backend: str, repeats: int) -> Iterator[dict[str, Any]]:
    """The ring against one device, and against itself `repeats` times (deterministic): errors per kind of mask."""
    from jax_fa4.layout import from_layout, to_layout

    mesh = mesh_of_all()
    for work in compared(tokens):
        there, back = (functools.partial(f, layout=work.layout, devices=mesh.size) for f in (to_layout, from_layout))
        natural = arrays(work, SingleDeviceSharding(jax.devices()[0]))
        want = jax.jit(alone(work, backend, deterministic=True))(*natural)
        given = [jax.device_put(there(x), NamedSharding(mesh, P(None, "sp"))) for x in natural]
        call = jax.jit(over(mesh, work, backend, deterministic=True))
        first = [np.asarray(x) for x in call(*given)]
        equal = sum(
            all(np.asarray(x).tobytes() == y.tobytes() for x, y in zip(call(*given), first, strict=True))
            for _ in range(repeats)
        )
        errors = []
        for ring, one in zip(first, want, strict=True):
            got, exact = np.asarray(back(jnp.asarray(ring)), np.float32), np.asarray(one, np.float32)
            errors.append(float(np.linalg.norm(got - exact) / np.linalg.norm(exact)))
        yield {"compared": str(work), "relative_errors": errors, "bitwise_equal": f"{equal} of {repeats}"}
