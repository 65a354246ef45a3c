"""Reads what is needed from the two kinds of ELF file in an artifact, host objects and cubins."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator

_FUNCTION = 2  # STT_FUNC
_SYMBOL_TABLE = 2  # SHT_SYMTAB
# Attributes in a cubin's .nv.info sections: (format, attribute, payload); format 4 carries a 16-bit payload size.
_SIZED, _REGISTERS, _FRAME_BYTES = 0x04, 0x2F, 0x11


@dataclasses.dataclass(frozen=True)
class Section:
    name: str
    kind: int
    info: int
    link: int
    size: int
    data: bytes


@dataclasses.dataclass(frozen=True)
class KernelInfo:
    """What the assembler settled for one kernel of a cubin.

    `stack_bytes` is the local memory of a thread: zero means no register was spilled and no array lives in memory.
    """

    name: str
    registers: int
    stack_bytes: int
    shared_bytes: int  # static; dynamic shared memory is set at launch
    code_bytes: int


def _text(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode()


def sections(image: bytes) -> list[Section]:
    """All sections of a 64-bit little-endian ELF image. Raises ValueError if it is none."""
    if image[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"not a 64-bit little-endian ELF image: it begins with {image[:6]!r}")
    (table,) = struct.unpack_from("<Q", image, 40)
    entry, count, names = struct.unpack_from("<HHH", image, 58)
    rows = [struct.unpack_from("<IIQQQQIIQQ", image, table + i * entry) for i in range(count)]
    strings = image[rows[names][4] : rows[names][4] + rows[names][5]]
    no_bits = 8
    return [
        Section(_text(strings, r[0]), r[1], r[7], r[6], r[5], b"" if r[1] == no_bits else image[r[4] : r[4] + r[5]])
        for r in rows
    ]


def embedded_image(image: bytes) -> bytes:
    """The ELF image inside another: the cubin that a host object carries. Raises ValueError if there is none."""
    start = image.find(b"\x7fELF", 4)
    if start < 0:
        raise ValueError("the object holds no cubin")
    (table,) = struct.unpack_from("<Q", image, start + 40)
    entry, count = struct.unpack_from("<HH", image, start + 58)
    (segments,) = struct.unpack_from("<Q", image, start + 32)
    segment_entry, segment_count = struct.unpack_from("<HH", image, start + 54)
    end = max(table + entry * count, segments + segment_entry * segment_count)
    return image[start : start + end]


def _symbols(parts: list[Section]) -> Iterator[tuple[str, int, int]]:
    """(name, type, section index) of every symbol, in the table's order."""
    for part in parts:
        if part.kind == _SYMBOL_TABLE:
            for offset in range(0, len(part.data), 24):
                name, info, _, section, _, _ = struct.unpack_from("<IBBHQQ", part.data, offset)
                yield _text(parts[part.link].data, name), info & 15, section


def functions(image: bytes) -> list[str]:
    """Names of the functions that an object defines."""
    return [name for name, kind, section in _symbols(sections(image)) if kind == _FUNCTION and section]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while offset + 4 <= len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, offset)
        offset += 4
        if form == _SIZED:
            yield attribute, data[offset : offset + size]
            offset += size


def kernels(cubin: bytes) -> tuple[KernelInfo, ...]:
    """Registers, stack and static shared memory of each kernel in a cubin, by name."""
    parts = sections(cubin)
    names = [name for name, _, _ in _symbols(parts)]
    registers: dict[str, int] = {}
    frames: dict[str, int] = {}
    for part in parts:
        if part.name == ".nv.info":
            for attribute, payload in _attributes(part.data):
                if attribute in (_REGISTERS, _FRAME_BYTES):
                    symbol, value = struct.unpack("<II", payload)
                    (registers if attribute == _REGISTERS else frames)[names[symbol]] = value
    size = {part.name: part.size for part in parts}
    return tuple(
        KernelInfo(
            name, registers[name], frames.get(name, 0), size.get(f".nv.shared.{name}", 0), size.get(f".text.{name}", 0)
        )
        for name in sorted(registers)
    )
