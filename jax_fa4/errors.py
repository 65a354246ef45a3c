"""Errors a caller can act on: each says the argument, the value received, the values allowed, and the remedy."""

from typing import Any


class InvalidArgument(ValueError):
    """An argument of a public function that no backend could accept."""


class Unsupported(NotImplementedError):
    """A well-formed request that one backend cannot serve; `reason` says why, in a clause without a full stop."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


def invalid(argument: str, received: Any, allowed: str, remedy: str) -> InvalidArgument:
    """The InvalidArgument (to be raised by the caller) for one argument.

    Args:
      argument: its name, as the caller wrote it.
      received: the offending value, or a short description of it (never array contents).
      allowed: the values allowed, as a clause.
      remedy: what to do, as a sentence without a full stop.
    """
    return InvalidArgument(f"{argument}: received {received}; allowed: {allowed}. {remedy}.")
