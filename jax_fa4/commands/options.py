"""Types of command-line options, for ``argparse``: each says what it expects where it cannot read a text."""

import argparse
import math
from collections.abc import Callable


def _read(text: str, read: Callable, expected: str):
    """``read(text)``, or what was expected."""
    try:
        return read(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected {expected}") from None


def sizes(names: str, count: int | None = None) -> Callable[[str], tuple[int, ...]]:
    """The type of so many positive integers (None: any number), separated by commas and called ``names``."""

    def read(text: str) -> tuple[int, ...]:
        parts = tuple(int(part) for part in text.split(","))
        if len(parts) != (count or len(parts)) or min(parts) < 1:
            raise ValueError
        return parts

    return lambda text: _read(text, read, f"positive integers {names}")


shape = sizes("B,S,H,D, e.g. 1,512,1,128", 4)


def bounds(text: str) -> tuple[int | None, int | None]:
    """Of a window: "255,0", or "none,64"."""

    def read(text: str) -> tuple[int | None, int | None]:
        left, right = (None if part.strip().lower() == "none" else int(part) for part in text.split(","))
        if min(left or 0, right or 0) < 0:
            raise ValueError
        return left, right

    return _read(text, read, "LEFT,RIGHT, each an integer of at least 0 or none, e.g. 255,0 or none,64")


def positive(text: str) -> float:
    """A positive finite number."""

    def read(text: str) -> float:
        if not 0 < float(text) < math.inf:
            raise ValueError
        return float(text)

    return _read(text, read, "a positive number")


def count(text: str) -> int:
    """A positive integer."""
    return sizes("N", 1)(text)[0]
