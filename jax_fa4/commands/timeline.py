"""``python -m jax_fa4 timeline``: what each warp role of a kernel did when, on the software GPU."""

import argparse
import sys
from pathlib import Path

from jax_fa4.commands.options import bounds, count, positive, shape

_ENDINGS = (".json", ".png", ".svg", ".pdf")


def _span(text: str) -> tuple[int, int]:
    first, last = (int(part) for part in text.split(","))
    if not 0 <= first < last:
        raise argparse.ArgumentTypeError(f"{text!r}: expected FIRST,LAST with 0 <= FIRST < LAST")
    return first, last


def _out(text: str) -> Path:
    path = Path(text)
    if path.suffix not in _ENDINGS:
        raise argparse.ArgumentTypeError(f"{text!r}: the ending must be one of {', '.join(_ENDINGS)}")
    return path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", default="sm_100a", choices=("sm_90a", "sm_100a", "sm_103a"))
    parser.add_argument("--shape", type=shape, default=(1, 512, 1, 128), metavar="B,S,H,D",
                        help="default: 1,512,1,128")
    parser.add_argument("--keys", type=count, help="length of keys and values (default: S)")
    parser.add_argument("--kv-heads", type=count, help="default: H")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--window", type=bounds, metavar="LEFT,RIGHT", help="bounds, or none, e.g. 255,0 or none,64")
    parser.add_argument("--softcap", type=positive, help="cap of the scores")
    parser.add_argument("--backward", action="store_true", help="show the backward kernel")
    parser.add_argument("--kernel", metavar="NAME", help="of a pass with several (default: the one with the products)")
    parser.add_argument("--multiprocessors", type=count, default=1, metavar="N",
                        help="default: 1, which does all tiles")
    parser.add_argument("--order", type=int, metavar="SEED", help="the order of this interleaving instead of cycles")
    parser.add_argument("--between", type=_span, metavar="FIRST,LAST", help="only this span of time")
    parser.add_argument(
        "--out", type=_out, action="append", metavar="FILE",
        help="a trace for ui.perfetto.dev (.json) or a picture (.png, .svg, .pdf); may be repeated",
    )


def main(arguments: argparse.Namespace) -> int:
    from jax_fa4 import timeline

    a = arguments
    options = {"causal": a.causal, "window": a.window, "softcap": a.softcap}
    kv_shape = (a.keys or a.shape[1], a.kv_heads or a.shape[2])
    try:
        found = timeline.record(
            a.arch, a.shape, kv_shape=kv_shape, dtype=a.dtype, backward=a.backward, cycles=a.order is None,
            seed=a.order or 0, sm_count=a.multiprocessors, kernel=a.kernel,
            **{name: value for name, value in options.items() if value},
        )
    except ValueError as error:
        print(f"timeline: {error}", file=sys.stderr)
        return 2
    if a.between:
        found = found.between(*a.between)
    print(found)
    for path in a.out or ():
        found.save(path)
        print(f"wrote {path}")
    return 0
