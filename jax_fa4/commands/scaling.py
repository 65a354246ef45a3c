"""``python -m jax_fa4 scaling``: what a ring of devices should reach, by the model of ``jax_fa4.ring.scaling``."""

import argparse
import json
from pathlib import Path

from jax_fa4.commands.options import count, positive
from jax_fa4.layout import LAYOUTS
from jax_fa4.ring.scaling import Machine, Prediction, Workload, predict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", type=count, nargs="+", default=[2, 8, 64, 512])
    parser.add_argument("--tokens", type=count, default=1 << 20)
    parser.add_argument("--heads", type=count, default=16)
    parser.add_argument("--kv-heads", type=count, default=16)
    parser.add_argument("--head-dim", type=count, default=128)
    parser.add_argument("--layout", choices=tuple(LAYOUTS), default="zigzag")
    parser.add_argument("--full", action="store_true", help="no causal mask")
    parser.add_argument("--forward-tflops", type=positive, required=True,
                        help="attention's rate on one device, measured")
    parser.add_argument("--backward-tflops", type=positive, required=True)
    parser.add_argument("--link-gb-per-s", type=positive, required=True, help="slowest link of the ring, one way")
    parser.add_argument("--latency-us", type=float, default=10.0, help="of a transfer")
    parser.add_argument("--step-us", type=float, default=20.0, help="fixed cost of a ring step")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--plot", type=Path, help="draw efficiency against devices")


def main(arguments: argparse.Namespace) -> int:
    """Prints the table; see ``jax_fa4.ring.scaling`` for the assumptions."""
    a = arguments
    machine = Machine(a.forward_tflops, a.backward_tflops, a.link_gb_per_s, a.latency_us, a.step_us)
    work = Workload(a.tokens, a.heads, a.kv_heads, a.head_dim, not a.full, a.layout)
    rows = [(devices, predict(machine, work, devices)) for devices in a.devices]
    print(f"{machine}\n{work}")
    print("devices  forward ms  backward ms  attention/step ms  transfer/step ms  hidden  efficiency")
    for devices, row in rows:
        print(f"{devices:7d}  {row.forward_ms:10.2f}  {row.backward_ms:11.2f}  {row.compute_per_step_ms:17.3f}  "
              f"{row.transfer_per_step_ms:16.3f}  {row.hidden:6.0%}  {row.efficiency:10.0%}")
    limit = first_exposed(machine, work)
    print("transfers stay hidden up to 4096 devices" if limit is None else
          f"from {limit} devices on a step's transfer takes longer than its attention")
    if a.json:
        a.json.write_text(json.dumps([{"devices": devices, **vars(row)} for devices, row in rows], indent=1))
    if a.plot:
        _plot(machine, work, a.plot)
    return 0


def first_exposed(machine: Machine, work: Workload) -> int | None:
    """The smallest power of two of devices at which some transfer is not hidden; None up to 4096."""
    counts = (1 << power for power in range(1, 13))
    return next((n for n in counts if n * 2 <= work.tokens and predict(machine, work, n).hidden < 1.0), None)


def _plot(machine: Machine, work: Workload, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    counts = [1 << power for power in range(1, 10)]
    rows: list[Prediction] = [predict(machine, work, devices) for devices in counts]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    left.plot(counts, [row.efficiency for row in rows], "o-")
    left.set(xscale="log", xlabel="devices", ylabel="efficiency", ylim=(0, 1.05), title=f"{work.tokens:,} tokens")
    right.plot(counts, [row.compute_per_step_ms for row in rows], "o-", label="attention")
    right.plot(counts, [row.transfer_per_step_ms for row in rows], "s--", label="transfer")
    right.set(xscale="log", yscale="log", xlabel="devices", ylabel="ms per step, mean of both passes")
    right.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
