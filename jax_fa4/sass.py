"""What a kernel executes in machine code (SASS), by execution pipe and warp role.

PTX says little about arithmetic: the assembler removes its moves and fuses and splits what is left. So the machine code
is counted, times how often each of its basic blocks runs, and that is known from a run of the same kernel's PTX on the
software GPU. The assembler's line table (``--generate-line-info``, which leaves the code as it is) leads from each
machine instruction to its PTX line; a block runs as often as the lines of most of its instructions did. Needs nvdisasm
(``pip install nvidia-cuda-nvdisasm``).

    artifact = sass.compile_with_lines(spec, "sm_100a", size, "forward")
    report = emulator.launch(artifact, arrays, dims)
    print(sass.work(artifact.cubin, report.kernels[0], plan.roles))

`of_run` does so for the report of any run of a pass; `python -m jax_fa4 counters --machine-code` prints it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib.util
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any

from jax_fa4 import compile as compiler
from jax_fa4 import counting, emulator
from jax_fa4.artifact import Artifact
from jax_fa4.plan import Pass, SizeClass, choose_plan, make_kernel
from jax_fa4.spec import AttentionSpec

_PIPES = {
    "fma": "FFMA FADD FMUL IMAD HFMA2 HADD2 HMUL2",
    "fma_packed": "FFMA2 FADD2 FMUL2",
    "alu": "IADD3 IADD LOP3 LOP SHF SHL SHR LEA SEL ISETP FSETP FSEL FMNMX FMNMX3 PRMT VIADD VIADDMNMX VIMNMX VIMNMX3 "
    "IABS PLOP3 MOV CS2R R2P P2R BMSK SGXT IMNMX HSETP2 HMNMX2 FCHK",
    "mufu": "MUFU",
    "convert": "F2FP F2F I2F F2I I2FP FRND POPC FLO",
    "shuffle": "SHFL VOTE REDUX MATCH",
    "shared_memory": "LDS STS LDSM STSM ATOMS",
    "global_memory": "LDG STG LD ST ATOM ATOMG RED LDGSTS LDL STL",
    "barrier": "SYNCS BAR DEPBAR LDGDEPBAR UCGABAR_ARV UCGABAR_WAIT FENCE MEMBAR ERRBAR CCTL",
    "tensor": "UTCHMMA UTCQMMA UTCIMMA UTCBAR UTCCP HGMMA WARPGROUP HMMA",
    "tensor_memory": "LDTM STTM UTCATOMSWS UTCSHIFT",
    "copy": "UTMALDG UTMASTG UTMAREDG UTMACCTL UTMACMDFLUSH UBLKCP UBLKRED UBLKPF",
    "control": "BRA BRX EXIT CALL RET BSSY BSYNC BREAK WARPSYNC ELECT NOP NANOSLEEP YIELD JMP BPT USETMAXREG "
    "UVIRTCOUNT",
    "uniform": "R2UR S2UR LDCU VOTEU S2R LDC",
}
_PIPE_OF = {opcode: pipe for pipe, opcodes in _PIPES.items() for opcode in opcodes.split()}
_MOVABLE = frozenset({"fma", "fma_packed", "alu", "convert", "uniform", "control", "other"})
"""Pipes whose instructions the assembler may move to another block, or multiply: their lines say less of a block."""
ENDS_BLOCK = frozenset("BRA BRX EXIT RET JMP BSYNC CALL BREAK".split())
"""Opcodes after which a basic block ends."""


def pipe_of(opcode: str) -> str:
    """The execution pipe of a machine instruction ("alu", "fma", ...; "other" where it is not known)."""
    base = opcode.partition(".")[0]
    return _PIPE_OF.get(base) or ("uniform" if base.startswith("U") else "other")


@dataclasses.dataclass(frozen=True)
class Instruction:
    line: int  # of the PTX
    opcode: str


@dataclasses.dataclass(frozen=True)
class Work:
    """Machine instructions that warps executed.

    Attributes:
      kernel: its name.
      executed: by role, or roles that run the same code ("softmax0, softmax1"), and by opcode without modifiers.
      ctas: how many ran.
      agreement: of the executed instructions, the share whose own PTX line ran as often as their block is taken to.
    """

    kernel: str
    executed: Mapping[str, collections.Counter[str]]
    ctas: int
    agreement: float

    def pipes(self, role: str | None = None) -> dict[str, int]:
        """Instructions by execution pipe, of one role or of all."""
        total: collections.Counter[str] = collections.Counter()
        for name, opcodes in self.executed.items():
            if role in (None, name):
                for opcode, count in opcodes.items():
                    total[pipe_of(opcode)] += count
        return dict(total.most_common())

    def bound_cycles(self, architecture: int, sm_count: int) -> dict[str, float]:
        """Cycles that each arithmetic pipe needs for the launch, at the least (`counting.bounds` says how)."""
        share = max(1, min(self.ctas, sm_count))
        pipes, lanes = self.pipes(), counting.RATES[architecture].lanes
        cycles = {pipe: 32 * count / lanes[pipe] / share for pipe, count in pipes.items() if pipe in lanes}
        cycles["fma"] = cycles.get("fma", 0) + cycles.pop("fma_packed", 0)
        return cycles | {"issue": sum(pipes.values()) / 4 / share}

    def __str__(self) -> str:
        columns = {role: self.pipes(role) for role in self.executed} | {"all": self.pipes()}
        lines = [f"{counting.short_name(self.kernel)}: machine instructions of warps, {self.ctas} CTAs"]
        lines.append(f"  {'':14}" + "".join(f"  {role:>10}" for role in columns))
        for pipe in columns["all"]:
            row = "".join(f"  {pipes.get(pipe, 0):{max(10, len(role))},}" for role, pipes in columns.items())
            lines.append(f"  {pipe.replace('_', ' '):14}{row}")
        lines.append(f"  {100 * self.agreement:.1f} % ran as often as their own PTX line says")
        return "\n".join(lines)


def compile_with_lines(spec: AttentionSpec, arch: str, size: SizeClass, pass_: Pass) -> Artifact:
    """The artifact of a pass, with the assembler's line table; its machine code is that of `compile.artifact`."""
    return compiler.compile_kernel(make_kernel(spec, arch, size, pass_), arch, options="--generate-line-info")


def of_run(report: emulator.Report, spec: AttentionSpec, arch: str, size: SizeClass, pass_: Pass) -> list[Work]:
    """The machine code that a run of this package's kernels executed, kernel by kernel; `report` is that of the run.

    Raises:
      FileNotFoundError: there is no nvdisasm.
    """
    lined = compile_with_lines(spec, arch, size, pass_)
    lines = line_map(compiler.artifact(spec, arch, size, pass_).ptx, lined.ptx)
    roles = choose_plan(spec, arch, size, pass_).roles
    return [work(lined.cubin, k, roles if k["tensor_flops"] else None, lines) for k in report.kernels]


def line_map(plain: str, lined: str) -> dict[int, int]:
    """Lines of a PTX text -> the same ones in the text that the compiler writes with line info among it.

    Raises:
      ValueError: the texts differ by more than that.
    """
    old, new = ([(i, text) for i, text in enumerate(ptx.splitlines(), 1) if _is_code(text)] for ptx in (plain, lined))
    new = new[: len(old)]  # the line table's sections come last
    if [text for _, text in old] != [text for _, text in new]:
        raise ValueError("ptx: the texts with and without line info are not of the same kernel")
    return {i: j for (i, _), (j, _) in zip(old, new, strict=True)}


def _is_code(text: str) -> bool:
    return bool(text.strip()) and not text.lstrip().startswith((".loc", ".file", "//"))


def work(
    cubin: bytes, kernel: Mapping[str, Any], roles: Mapping[str, range] | None = None,
    lines: Mapping[int, int] | None = None,
) -> Work:
    """Counts the machine code of one kernel.

    Args:
      cubin: machine code with the assembler's line table (`compile_with_lines`).
      kernel: an entry of `emulator.Report.kernels`: a run of the PTX that the cubin was made from.
      roles: warps by role, `plan.roles`.
      lines: from lines of the PTX that ran to lines of the PTX that the cubin was made from, if they differ.

    Raises:
      ValueError: the cubin has no such kernel, or no line table.
      FileNotFoundError: there is no nvdisasm.
    """
    code = blocks(disassemble(cubin), kernel["kernel"])
    name = functools.cache(lambda mask: counting.roles_of(mask, roles or {}))
    place = {line: (lines or {}).get(line, line) for line, _ in kernel["lines"]}
    ran = {place[line]: (count, m) for (line, count), m in zip(kernel["lines"], kernel["line_warps"], strict=True)}
    executed: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    seen: set[tuple[int, str]] = set()
    agreeing = total = 0
    for block in code:
        count, mask = _trips(block, ran, seen)
        for instruction in block:
            executed[name(mask)][instruction.opcode.partition(".")[0]] += count
            total += count
            agreeing += count if ran.get(instruction.line, (0, 0))[0] == count else 0
    most = sorted(executed.items(), key=lambda item: -item[1].total())
    ran_at_all = {role: opcodes for role, opcodes in most if opcodes.total()}
    return Work(kernel["kernel"], ran_at_all, kernel["ctas"], agreeing / max(1, total))


def _trips(
    block: Iterable[Instruction], ran: Mapping[int, tuple[int, int]], seen: set[tuple[int, str]]
) -> tuple[int, int]:
    """How often a block ran, and in which warps (a mask): what most of its instructions' lines say, or of those that
    the assembler leaves in their place, where it has any. The code that retries a wait repeats the instruction
    elsewhere: the software GPU counts retries apart, and here they are left out."""
    places: collections.Counter[tuple[int, int]] = collections.Counter()
    others: collections.Counter[tuple[int, int]] = collections.Counter()
    repeated = False
    for instruction in block:
        said = ran.get(instruction.line, (0, 0))
        if pipe_of(instruction.opcode) in _MOVABLE:
            others[said] += 1
        elif (instruction.line, instruction.opcode) in seen:
            repeated = True
        else:
            seen.add((instruction.line, instruction.opcode))
            places[said] += 1
    if not places and repeated:
        return 0, 0
    return (places or others).most_common(1)[0][0]


_LINE = re.compile(r'\s*//## File "\.nv_debug_ptx_txt", line (\d+)')
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[0-9T]+ +)?([A-Z][A-Z0-9_.]*)")


def blocks(text: str, kernel: str) -> list[list[Instruction]]:
    """The basic blocks of a kernel in what ``nvdisasm -gp`` prints."""
    lines = iter(text.splitlines())
    if not any(line.rstrip() == f".text.{kernel}:" for line in lines):
        raise ValueError(f"the machine code has no kernel {kernel}")
    result: list[list[Instruction]] = [[]]
    at = 0
    for line in lines:
        if line.startswith(("//------", "\t.section")):
            break
        if found := _LINE.match(line):
            at = int(found[1])
        elif line.startswith(".L_"):
            result.append([])
        elif found := _INSTRUCTION.match(line):
            result[-1].append(Instruction(at, found[1]))
            if found[1].partition(".")[0] in ENDS_BLOCK:
                result.append([])
    if not at:
        raise ValueError(f"{kernel}: no line table in the machine code; compile it with --generate-line-info")
    return [block for block in result if block]


def disassemble(cubin: bytes) -> str:
    """Machine code as text, with PTX lines where the cubin has them. Raises FileNotFoundError without nvdisasm."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return subprocess.run([nvdisasm(), "-gp", "-c", str(path)], capture_output=True, text=True, check=True).stdout


@functools.cache
def nvdisasm() -> str:
    """Path of NVIDIA's disassembler: on PATH, or from the package nvidia-cuda-nvdisasm."""
    if found := shutil.which("nvdisasm"):
        return found
    package = importlib.util.find_spec("nvidia")
    for root in (package.submodule_search_locations or ()) if package else ():
        for candidate in sorted(pathlib.Path(root).glob("*/bin/nvdisasm"), reverse=True):
            return str(candidate)
    raise FileNotFoundError("nvdisasm is neither on PATH nor installed: pip install nvidia-cuda-nvdisasm")
