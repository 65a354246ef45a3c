"""How much of the time that GPUs spend on transfers is hidden behind computation, read off a profile."""

import dataclasses
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import jax
from jax.profiler import ProfileData

Interval = tuple[float, float]
TRANSFERS = ("nccl", "MemcpyP2P", "collective-permute")
"""What the names of transfers between GPUs contain."""


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Of all GPUs and calls, in milliseconds per GPU and call.

    Attributes:
      busy_ms: something ran.
      transfer_ms: a transfer ran.
      exposed_ms: a transfer ran and nothing beside it.
    """

    busy_ms: float
    transfer_ms: float
    exposed_ms: float

    @property
    def hidden(self) -> float:
        """Share of the transfers' time that computation covers."""
        return 1 - self.exposed_ms / self.transfer_ms if self.transfer_ms else 1.0


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals in ascending order that cover the same points."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def length(intervals: Iterable[Interval]) -> float:
    """Sum of the lengths of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def overlap(devices: list[list[tuple[str, float, float]]], calls: int) -> Overlap:
    """From what each GPU ran.

    Args:
      devices: (name, start, end) in nanoseconds of all kernels and copies of each GPU.
      calls: how many calls they belong to.
    """
    busy = moving = exposed = 0.0
    for events in devices:
        transfers = union((a, b) for name, a, b in events if any(word in name for word in TRANSFERS))
        compute = union((a, b) for name, a, b in events if not any(word in name for word in TRANSFERS))
        together = length(union((*transfers, *compute)))
        busy, moving = busy + together, moving + length(transfers)
        exposed += together - length(compute)
    share = 1e6 * calls * max(len(devices), 1)
    return Overlap(busy / share, moving / share, exposed / share)


def events_of(profile: ProfileData) -> list[list[tuple[str, float, float]]]:
    """(name, start, end) in nanoseconds of what each GPU of a profile ran: the events on its streams."""
    return [
        [(event.name, event.start_ns, event.start_ns + event.duration_ns)
         for line in plane.lines if line.name.startswith("Stream") for event in line.events]
        for plane in profile.planes if plane.name.startswith("/device:GPU")
    ]


def profiled(call: Callable[[], object], calls: int = 3) -> Overlap:
    """Profiles calls of a function that has run before.

    Raises:
      RuntimeError: the profile holds no GPU.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                jax.block_until_ready(call())
        found = [ProfileData.from_file(str(path)) for path in Path(folder).rglob("*.xplane.pb")]
        devices = [events for profile in found for events in events_of(profile)]
    if not any(devices):
        raise RuntimeError("the profile holds no events of a GPU: JAX's profiler needs a GPU and CUPTI")
    return overlap(devices, calls)
