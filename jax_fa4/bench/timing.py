"""How long a call takes: warm-up, enough calls to fill a clock tick, medians over interleaved rounds."""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Runnable:
    """Something to time.

    Attributes:
      call: starts the work once and returns a handle; it may return before the work is done.
      wait: blocks until the work behind a handle is done.
    """

    call: Callable[[], Any]
    wait: Callable[[Any], Any]


@dataclass(frozen=True)
class Timing:
    """Seconds per call: the median over rounds, and the spread as (min, max)."""

    median_s: float
    spread_s: tuple[float, float]


def seconds_per_call(work: Runnable, calls: int) -> float:
    """Mean seconds per call over ``calls`` calls started back to back."""
    began = time.perf_counter()
    handle = None
    for _ in range(calls):
        handle = work.call()
    work.wait(handle)
    return (time.perf_counter() - began) / calls


def calls_for(work: Runnable, target_s: float) -> int:
    """How many calls take about ``target_s`` seconds, between 1 and 50; runs the work twice as warm-up."""
    work.wait(work.call())
    return max(1, min(50, int(target_s / max(seconds_per_call(work, 1), 1e-6))))


def time_interleaved(
    works: Mapping[str, Runnable], rounds: int, target_s: float = 0.06
) -> Iterator[tuple[str, Timing | None]]:
    """Times several pieces of work in turn, round after round, so that a drifting clock hits all of them alike.

    Each round has an order of its own, drawn with a fixed seed: a card that has just been hot is slower under its power
    limit, and nobody is to follow the same neighbour every time.

    Args:
      works: what to time, by name.
      rounds: how often each is timed.
      target_s: about how long one round of one piece lasts.

    Yields:
      (name, None) after each round of each piece, for a progress bar; then (name, its timing) for each piece.
    """
    calls = {name: calls_for(work, target_s) for name, work in works.items()}
    samples: dict[str, list[float]] = {name: [] for name in works}
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        order = list(works)
        shuffle(order)
        for name in order:
            samples[name].append(seconds_per_call(works[name], calls[name]))
            yield name, None
    for name, values in samples.items():
        yield name, Timing(statistics.median(values), (min(values), max(values)))
