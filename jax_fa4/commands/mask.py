"""``python -m jax_fa4 mask``: draws a mask in the terminal, or to a picture with ``--out``."""

import argparse
from pathlib import Path

import jax.numpy as jnp

from jax_fa4.commands.options import bounds, count, sizes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--queries", type=count, default=1024, help="query rows (default: 1024)")
    parser.add_argument("--keys", type=count, help="keys (default: as many as queries)")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--window", type=bounds, metavar="LEFT,RIGHT", help="bounds, or none, e.g. 255,0 or none,64")
    parser.add_argument("--documents", type=sizes("N,N,..."), metavar="N,N,...",
                        help="packed sequence: the lengths of its documents")
    parser.add_argument("--kv-length", type=int, help="keys that exist")
    parser.add_argument("--q-length", type=int, help="queries that exist")
    parser.add_argument("--block", type=sizes("Q,K", 2), default=(128, 128), metavar="Q,K",
                        help="block shape (default: 128,128)")
    parser.add_argument("--out", type=Path, help="write a picture (.png, .svg, .pdf) instead of text")


def main(arguments: argparse.Namespace) -> int:
    from jax_fa4.draw import mask_picture

    rows, columns = arguments.queries, arguments.keys or arguments.queries
    options: dict = {"causal": arguments.causal, "window": arguments.window}
    if arguments.documents:
        lengths = jnp.array(arguments.documents)
        for name, size in (("q_segment_ids", rows), ("kv_segment_ids", columns)):
            options[name] = jnp.searchsorted(jnp.cumsum(lengths), jnp.arange(size), side="right")[None]
    for name, length in (("q_lengths", arguments.q_length), ("kv_lengths", arguments.kv_length)):
        if length is not None:
            options[name] = jnp.array([length])
    picture = mask_picture(rows, columns, arguments.block, **options)
    if arguments.out:
        picture.save(arguments.out)
        print(f"{picture.title}\n{picture.summary()}\nwrote {arguments.out}")
    else:
        print(picture)
    return 0
