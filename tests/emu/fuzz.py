"""Damaged PTX and damaged objects: the software GPU must answer with a result or an error, never crash or hang.

    python tests/emu/fuzz.py SEED COUNT        (PYTHONPATH: the repository and its tests folder)

Prints one line per outcome; a crash or a hang ends the process, and the last line names the input that did it.
"""

import collections
import faulthandler
import pathlib
import random
import re
import sys

from emu import emulated, ptx_cases

from jax_fa4 import emulator

TOKEN = re.compile(r"[%$\w.:]+|[^\s\w]")
SMALL = ("shuffle", "divergence", "memory", "barrier", "mbarrier", "cluster", "atomics", "matrix", "bulk",
         "tma_main_f16_2d_128B_0_8", "wgmma_n64_f16_f32_64B_KK_k16", "tcgen05_m128_n64_group1_128B_KK_tensor_memory")
LIMIT = 1_000_000  # warp instructions; the undamaged kernels take a few thousand
NUMBERS = ("0", "1", "-1", "7", "16", "0xffffffff", "4294967296", "0x7fffffffffffffff", "99999999999999999999")


def damaged_text(text: str, rng: random.Random) -> str:
    """One to three edits of tokens or lines within the kernel's body."""
    lines = text.split("\n")
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(lines))
        tokens = TOKEN.findall(lines[at])
        kind = rng.randrange(7)
        if kind == 0:
            del lines[at]
        elif kind == 1:
            lines.insert(rng.randrange(len(lines)), lines[at])
        elif kind == 2:
            other = rng.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        elif not tokens:
            lines[at] = rng.choice(("{", "}", ";", ".reg .b32 %<9>;", "bra nowhere;", "/*", "\"", "@p"))
        elif kind == 3:
            lines[at] = lines[at].replace(rng.choice(tokens), "", 1)
        elif kind == 4:
            donor = TOKEN.findall(rng.choice(lines)) or ["x"]
            lines[at] = lines[at].replace(rng.choice(tokens), rng.choice(donor), 1)
        elif kind == 5:
            lines[at] = re.sub(r"\b\d+\b", lambda m: rng.choice(NUMBERS), lines[at], count=1)
        else:
            place = rng.randrange(len(lines[at]) + 1)
            lines[at] = lines[at][:place] + chr(rng.randrange(1, 256)) + lines[at][place:]
    return "\n".join(lines)


def damaged_object(data: bytes, rng: random.Random) -> bytes:
    """An ELF object cut short, or with some bytes of its headers, symbols or relocations changed."""
    if rng.random() < 0.3:
        return data[:rng.randrange(len(data))]
    out = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        low, high = rng.choice(((0, 64), (len(out) - 2048, len(out)), (len(out) * 3 // 4, len(out))))
        out[rng.randrange(max(0, low), high)] = rng.randrange(256)
    return bytes(out)


def main() -> int:
    faulthandler.enable()
    seed, count = int(sys.argv[1]), int(sys.argv[2])
    objects = [pathlib.Path(p).read_bytes() for p in sys.argv[3:]]
    cases = {case.name: case for case in ptx_cases.cases() if case.name in SMALL}
    outcomes = collections.Counter()
    for index in range(seed, seed + count):
        rng = random.Random(index)
        faulthandler.dump_traceback_later(60, exit=True)
        if objects and rng.random() < 0.3:
            print(f"object {index}", flush=True)
            try:
                emulator.load(damaged_object(rng.choice(objects), rng), cases["memory"].text, "none")
                outcomes["object loaded"] += 1
            except emulator.EmulationError:
                outcomes["object refused"] += 1
            continue
        case = cases[rng.choice(SMALL)]
        print(f"text {index} {case.name}", flush=True)
        try:
            emulated.run(case, seed=index, text=damaged_text(case.text, rng), limit=LIMIT)
            outcomes["ran"] += 1
        except emulator.EmulationError as error:
            assert str(error).strip(), "an error without a message"
            outcomes["refused" if str(error).startswith("PTX line") else "stopped"] += 1
        except UnicodeEncodeError:
            outcomes["no text"] += 1
    faulthandler.cancel_dump_traceback_later()
    print(dict(outcomes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
