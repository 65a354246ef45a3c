"""Where kernels use local memory, by the loops of their machine code."""

import collections
import re
from collections.abc import Iterable

import pytest

from jax_fa4 import sass

Graph = dict[int, set[int]]

_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(@!?U?P[0-9T]+ +)?([A-Z][A-Z0-9_.]*)(.*)")
_LABEL = re.compile(r"^(\.L_\w+):")


def local_memory(artifact) -> dict[str, int]:
    """How many instructions of an artifact's kernels read or write local memory, by where they stand.

    "step": in a loop with products within the loop over tiles, that is, in one over blocks of queries or keys. "loop":
    in a loop without products within another. "tile": in neither, so once a tile. What runs once is left out.
    """
    try:
        text = sass.disassemble(artifact.cubin)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    kernels = re.split(r"^\.text\.", text, flags=re.MULTILINE)[1:]
    found = [of_kernel(code.partition("\n\t.section")[0].splitlines()) for code in kernels]
    assert any(has_steps for _, has_steps in found), "no loop with products within another was found"
    return dict(sum((used for used, _ in found), collections.Counter()))


def of_kernel(lines: list[str]) -> tuple[collections.Counter[str], bool]:
    """`local_memory` of one kernel, and whether it has a loop with products within another."""
    blocks, following = _flow(lines)
    with_products = {i for i, block in enumerate(blocks) if "HGMMA" in block}
    loops = list(_loops(set(range(len(blocks))), following))
    used: collections.Counter[str] = collections.Counter()
    has_steps = False
    for i, block in enumerate(blocks):
        around = [loop for loop in loops if i in loop]
        products = sum(bool(loop & with_products) for loop in around)
        has_steps |= products > 1
        place = "step" if products > 1 else "loop" if len(around) > 1 else "tile"
        if around:
            used[place] += sum(opcode in ("LDL", "STL") for opcode in block)
    return +used, has_steps


def _flow(lines: Iterable[str]) -> tuple[list[list[str]], Graph]:
    """Opcodes of basic blocks, and which may come after which."""
    blocks: list[list[str]] = [[]]
    labels: dict[str, int] = {}
    ends: dict[int, tuple[str, str, bool]] = {}
    for line in lines:
        if label := _LABEL.match(line):
            if blocks[-1]:
                blocks.append([])
            labels[label[1]] = len(blocks) - 1
        elif found := _INSTRUCTION.match(line):
            opcode, _, modifiers = found[2].partition(".")
            blocks[-1].append(opcode)
            if opcode in sass.ENDS_BLOCK:
                conditional = bool(found[1]) or bool(re.match(r"\s*!?U?P\d|\s*U?R\d", found[3])) or "DIV" in modifiers
                ends[len(blocks) - 1] = opcode, found[3], conditional
                blocks.append([])
    following: Graph = {i: {i + 1} if i + 1 < len(blocks) else set() for i in range(len(blocks))}
    for i, (opcode, operands, conditional) in ends.items():
        if opcode in ("BRA", "JMP", "EXIT", "RET") and not conditional:
            following[i] = set()
        target = re.search(r"\((\.L_\w+)\)", operands)
        if opcode in ("BRA", "JMP") and target:
            following[i].add(labels[target[1]])
    return blocks, following


def _loops(nodes: set[int], following: Graph) -> Iterable[frozenset[int]]:
    """All loops, those within others too: strongly connected parts, and again without the ways back to their entry."""
    for part in _connected(nodes, following):
        if len(part) == 1 and not part & following[next(iter(part))]:
            continue
        yield frozenset(part)
        outside = nodes - part
        entries = {node for node in part if any(node in following[other] for other in outside)} or {min(part)}
        yield from _loops(part, {node: following[node] - entries for node in part})


def _connected(nodes: set[int], following: Graph) -> list[set[int]]:
    """Strongly connected parts (Tarjan, 1972)."""
    number: dict[int, int] = {}
    lowest: dict[int, int] = {}
    path: list[int] = []
    found: list[set[int]] = []
    for root in sorted(nodes):
        work = [(root, iter(()))] if root not in number else []
        while work:
            node, rest = work.pop()
            if node not in number:
                number[node] = lowest[node] = len(number)
                path.append(node)
                rest = iter(sorted(following[node] & nodes))
            for other in rest:
                if other not in number:
                    work += [(node, rest), (other, iter(()))]
                    break
                if other in path:
                    lowest[node] = min(lowest[node], number[other])
            else:
                if lowest[node] == number[node]:
                    start = path.index(node)
                    found.append(set(path[start:]))
                    del path[start:]
                if work:
                    parent = work[-1][0]
                    lowest[parent] = min(lowest[parent], lowest[node])
    return found
