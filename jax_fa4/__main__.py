"""``python -m jax_fa4 <command>``; see ``jax_fa4.commands``."""

import argparse
import importlib
import sys

from jax_fa4.commands import COMMANDS
from jax_fa4.errors import InvalidArgument, Unsupported


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand and returns its exit code: 2 for arguments that attention refuses."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m jax_fa4", description="FlashAttention-4 for JAX.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, summary in COMMANDS.items():
        command_parser = subparsers.add_parser(name, help=summary, description=summary)
        if argv[:1] == [name]:  # only the command that runs is imported
            module = importlib.import_module(f"jax_fa4.commands.{name}")
            module.add_arguments(command_parser)
            command_parser.set_defaults(main=module.main)
    arguments = parser.parse_args(argv)
    try:
        return arguments.main(arguments)
    except (InvalidArgument, Unsupported) as error:
        print(f"{arguments.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
