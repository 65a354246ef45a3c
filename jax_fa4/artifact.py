"""`Artifact`: a compiled kernel, and its form on disk. Plain Python: reading one imports no compiler."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zlib
from typing import Any

from jax_fa4.elf import KernelInfo, embedded_image
from jax_fa4.kernels.common.abi import Buffer

_MAGIC = b"jax_fa4 artifact 1\n"
PREFIX = "jax_fa4"
"""The prefix of an artifact's host symbols; the runtime library finds the host function by it."""


class DamagedArtifact(ValueError):
    """The bytes are no artifact of this version, or were changed since they were written."""


@dataclasses.dataclass(frozen=True)
class Artifact:
    """One kernel class compiled for one architecture.

    `object` is an x86-64 ELF object: the host function `symbol` (``void (void** arguments)``) with the cubin inside.
    `ptx` is the device code as text, which the software GPU executes. `kernels` is what the assembler settled for each
    kernel. `plan` is the plan in words and `compile_seconds` what compiling took, for reports.
    """

    arch: str
    name: str
    buffers: tuple[Buffer, ...]
    symbol: str
    object: bytes
    ptx: str
    kernels: tuple[KernelInfo, ...]
    plan: str = ""
    compile_seconds: float = 0.0

    @property
    def cubin(self) -> bytes:
        """The machine code, as nvdisasm takes it."""
        return embedded_image(self.object)

    @property
    def spilled(self) -> tuple[KernelInfo, ...]:
        """The kernels that use local memory: spilled registers or arrays that did not fit in them."""
        return tuple(k for k in self.kernels if k.stack_bytes)

    def report(self) -> str:
        """Registers, stack and shared memory of each kernel as a table."""
        lines = [f"{self.name} for {self.arch}, object {len(self.object)} bytes"]
        lines += [
            f"  {k.name[:60]:60} registers {k.registers:3} stack {k.stack_bytes} shared {k.shared_bytes} "
            f"code {k.code_bytes} bytes"
            for k in self.kernels
        ]
        return "\n".join(lines)

    def to_bytes(self) -> bytes:
        """The artifact as bytes, with a digest so that damage is noticed."""
        header = dataclasses.asdict(self)
        header.pop("object"), header.pop("ptx")
        head = json.dumps(header).encode()
        blobs = [head, self.object, self.ptx.encode()]
        payload = b"".join(len(blob).to_bytes(8, "little") for blob in blobs) + zlib.compress(b"".join(blobs), 6)
        return _MAGIC + hashlib.sha256(payload).digest() + payload

    @staticmethod
    def from_bytes(data: bytes) -> Artifact:
        """The inverse of `to_bytes`. Raises DamagedArtifact."""
        start = len(_MAGIC)
        payload = data[start + 32 :]
        if data[:start] != _MAGIC or hashlib.sha256(payload).digest() != data[start : start + 32]:
            raise DamagedArtifact(f"{len(data)} bytes that are no undamaged artifact of this version of jax_fa4")
        sizes = [int.from_bytes(payload[8 * i : 8 * i + 8], "little") for i in range(3)]
        body = zlib.decompress(payload[24:])
        head, object_, ptx = body[: sizes[0]], body[sizes[0] : sizes[0] + sizes[1]], body[sizes[0] + sizes[1] :]
        header: dict[str, Any] = json.loads(head)
        header["buffers"] = tuple(
            Buffer(b["name"], b["kind"], b["dtype"], tuple(_size(s) for s in b["shape"])) for b in header["buffers"]
        )
        header["kernels"] = tuple(KernelInfo(**kernel) for kernel in header["kernels"])
        return Artifact(object=object_, ptx=ptx.decode(), **header)


def _size(value: Any) -> Any:
    return tuple(_size(part) for part in value) if isinstance(value, list) else value
