"""Artifacts on disk: one file each, written atomically, checked when read, bounded in total size."""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
import warnings
from collections.abc import Iterator

from jax_fa4.artifact import Artifact, DamagedArtifact

_SUFFIX = ".artifact"
_DEFAULT_BYTES = 1 << 30


class DiskCache:
    """A folder of artifacts named ``<key>-<toolchain>.artifact``, shared by any number of processes.

    A file appears whole or not at all. One that is damaged counts as absent and is written anew. The files that were
    used least recently go when the total grows beyond `limit_bytes`. A folder that cannot be written costs a warning.
    The folder may be copied to another machine: without a compiler there, any toolchain's artifact for a key will do.
    """

    def __init__(self, folder: str | os.PathLike | None = None, limit_bytes: int | None = None):
        default = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jax_fa4"
        self.folder = pathlib.Path(folder or os.environ.get("JAX_FA4_CACHE_DIR") or default)
        self.limit_bytes = limit_bytes or int(os.environ.get("JAX_FA4_CACHE_BYTES") or _DEFAULT_BYTES)

    def path(self, key: str, toolchain: str) -> pathlib.Path:
        return self.folder / f"{key}-{toolchain}{_SUFFIX}"

    def get(self, key: str, toolchain: str | None) -> Artifact | None:
        """The artifact, or None. `toolchain` None: of any toolchain, the newest."""
        for path in [self.path(key, toolchain)] if toolchain else self._files(f"{key}-*{_SUFFIX}")[::-1]:
            try:
                artifact = Artifact.from_bytes(path.read_bytes())
                os.utime(path)
                return artifact
            except DamagedArtifact:
                with contextlib.suppress(OSError):
                    path.unlink()
            except OSError:
                continue
        return None

    def contains(self, key: str) -> bool:
        """Whether there is an artifact of any toolchain (it may still prove damaged)."""
        return bool(self._files(f"{key}-*{_SUFFIX}"))

    def put(self, key: str, toolchain: str, artifact: Artifact) -> None:
        """Writes an artifact; then removes the least recently used ones beyond the limit."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.folder, suffix=".tmp")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(artifact.to_bytes())
                os.replace(name, self.path(key, toolchain))
            except BaseException:
                os.unlink(name)
                raise
            self._trim()
        except OSError as error:
            warnings.warn(
                f"jax_fa4: compiled kernels cannot be kept in {self.folder} ({error}); set JAX_FA4_CACHE_DIR to a "
                "folder that can be written, or they are compiled again in every process",
                stacklevel=2,
            )

    def _files(self, pattern: str = f"*{_SUFFIX}") -> list[pathlib.Path]:
        """Files by time of last use, oldest first."""
        return [path for _, _, path in sorted(self._stats(pattern))]

    def _stats(self, pattern: str) -> Iterator[tuple[float, int, pathlib.Path]]:
        for path in self.folder.glob(pattern):
            with contextlib.suppress(OSError):  # another process may have removed it
                stat = path.stat()
                yield stat.st_mtime, stat.st_size, path

    def _trim(self) -> None:
        files = sorted(self._stats(f"*{_SUFFIX}"))
        excess = sum(size for _, size, _ in files) - self.limit_bytes
        for _, size, path in files[:-1]:  # the newest stays, however large
            if excess <= 0:
                break
            with contextlib.suppress(OSError):
                path.unlink()
            excess -= size
