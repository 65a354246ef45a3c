"""Subcommands of ``python -m jax_fa4``: one module each, imported only when it runs.

A module has ``add_arguments(parser)`` and ``main(arguments) -> exit code``. ``COMMANDS`` is the registry;
``options`` is what they share.
"""

COMMANDS: dict[str, str] = {
    "info": "devices, versions, and which backend a call would take and why",
    "check": "run the case list against the float64 oracle on this machine",
    "bench": "time attention against the peers that are installed",
    "compile": "compile kernels ahead of time, without a GPU",
    "counters": "what a call's kernels execute, counted on the software GPU",
    "timeline": "draw what each warp role of a kernel did when, on the software GPU",
    "ring": "time Ring Attention on all GPUs against one",
    "scaling": "what a ring of devices should reach, by a small model",
    "mask": "draw a mask with its full, partial and skipped blocks",
}
