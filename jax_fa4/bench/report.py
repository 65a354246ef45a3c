"""The header, table and plot of a benchmark."""

import importlib.metadata
import os
import platform
from pathlib import Path

import jax

PACKAGES = ("jax-fa4", "jax", "jaxlib", "nvidia-cutlass-dsl", "dew-flash-attn", "tokamax", "torch", "flash-attn-4")


def environment() -> dict[str, str]:
    """The device and the versions that a figure belongs to."""
    device = jax.devices()[0]
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    cores = len(os.sched_getaffinity(0))
    flags = os.environ.get("XLA_FLAGS")
    return {
        "device": f"{device.device_kind} ({device.platform}, {jax.device_count()} visible)",
        "host": f"{platform.machine()}, {cores} cores, Python {platform.python_version()}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    } | ({"XLA_FLAGS": flags} if flags else {})


def table(rows: list[list[str]]) -> str:
    """Rows of cells as aligned text; the first row is the header."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(
        zip(row, widths, strict=True))).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def speed_table(rows: list[dict]) -> str:
    """One line per workload and direction, one column per implementation, in TFLOP/s (GFLOP/s on a CPU)."""
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    unit, scale = _unit(rows)
    cells = [["workload", unit, *peers, "ratio"]]
    for key in dict.fromkeys((row["workload"], row["direction"]) for row in rows):
        rates = {row["peer"]: row["flops_per_s"] for row in rows if (row["workload"], row["direction"]) == key}
        others = [rate for peer, rate in rates.items() if rate and not peer.startswith("jax_fa4")]
        ours = [rate for peer, rate in rates.items() if rate and peer.startswith("jax_fa4")]
        ratio = f"{max(ours) / max(others):.2f}x" if ours and others else "-"
        cells.append([*key, *(f"{rates[p] / scale:.1f}" if rates.get(p) else "-" for p in peers), ratio])
    return table(cells)


def speed_plot(rows: list[dict], path: Path) -> None:
    """A panel per direction: rate of each implementation over the workloads, as grouped bars."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    peers = list(dict.fromkeys(row["peer"] for row in rows))
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    directions = list(dict.fromkeys(row["direction"] for row in rows))
    unit, scale = _unit(rows)
    width = 0.8 / len(peers)
    size = (max(6.0, 1.1 * len(workloads)), 3.2 * len(directions))
    figure, panels = plt.subplots(len(directions), 1, figsize=size, layout="constrained", squeeze=False, sharex=True)
    for axes, direction in zip(panels[:, 0], directions, strict=True):
        for i, peer in enumerate(peers):
            rates = {row["workload"]: row["flops_per_s"] or 0.0 for row in rows
                     if row["peer"] == peer and row["direction"] == direction}
            at = [x + (i - (len(peers) - 1) / 2) * width for x in range(len(workloads))]
            axes.bar(at, [rates.get(workload, 0.0) / scale for workload in workloads], width, label=peer)
        axes.set(title=direction, ylabel=unit)
        axes.set_xticks(range(len(workloads)), workloads, rotation=30, ha="right", fontsize=8)
        axes.grid(axis="y", alpha=0.3)
    panels[0, 0].legend(fontsize=8)
    figure.suptitle(environment()["device"], fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _unit(rows: list[dict]) -> tuple[str, float]:
    fastest = max((row["flops_per_s"] or 0.0 for row in rows), default=0.0)
    return ("TFLOP/s", 1e12) if fastest > 1e12 else ("GFLOP/s", 1e9)
