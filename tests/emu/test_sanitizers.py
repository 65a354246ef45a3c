"""The software GPU built with AddressSanitizer and UndefinedBehaviorSanitizer runs its tests without a report."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESTS = ("machine", "ptx", "judge", "global_order", "lateness", "uninitialised", "timing", "trace", "fuzz")


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name}")
    return found


@pytest.fixture(scope="module")
def sanitized() -> pathlib.Path:
    """The library, in a folder that a later run builds on."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or pytest.skip("needs a C++20 compiler")
    folder = pathlib.Path(tempfile.gettempdir()) / f"jax_fa4_sanitized_{zlib.crc32(str(ROOT).encode()):08x}"
    options = ["-DJAX_FA4_SANITIZE=address,undefined", "-DJAX_FA4_EMULATOR_ONLY=ON", f"-DCMAKE_CXX_COMPILER={compiler}"]
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    cmake = tool("cmake")
    subprocess.run([cmake, "-S", ROOT, "-B", folder, *generator, *options], check=True, capture_output=True)
    subprocess.run([cmake, "--build", folder, "--parallel", str(min(os.cpu_count() or 1, 8))], check=True,
                   capture_output=True)  # fmt: skip
    return folder / "libjax_fa4_ffi.so"


def run(sanitized: pathlib.Path, *command: str) -> subprocess.CompletedProcess:
    runtime = subprocess.check_output([tool("gcc"), "-print-file-name=libasan.so"], text=True).strip()
    environment = os.environ | {
        "JAX_FA4_LIBRARY": str(sanitized),
        "LD_PRELOAD": runtime,  # Python itself is not built with it
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # the build: 200 seconds of processor time
def test_no_reports(sanitized):
    files = [f"tests/emu/test_{name}.py" for name in TESTS]
    # Not the pictures: matplotlib throws C++ exceptions, which a preloaded AddressSanitizer does not find.
    done = run(sanitized, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not picture and not command", *files)
    output = done.stdout + done.stderr
    assert "runtime error" not in output and "AddressSanitizer" not in output, output[-4000:]
    assert done.returncode == 0 and " passed" in done.stdout, output[-4000:]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_sanitizer_is_there(sanitized):
    """A read beyond the module's text, whose length the interface has to believe, is reported."""
    spoil = (
        "import ctypes\nfrom jax_fa4 import emulator\nlib = emulator.library()\nerror = ctypes.c_void_p()\n"
        "text = bytes(8192)\nlib.emu_load(b'', 0, text, 16384, b'', ctypes.byref(error))\n"
    )
    done = run(sanitized, "-c", spoil)
    assert done.returncode != 0 and "AddressSanitizer" in done.stderr
