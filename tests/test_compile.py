"""Compiling without a GPU, artifacts as bytes, and the caches."""

import concurrent.futures
import ctypes
import dataclasses
import json
import os
import subprocess
import sys
import threading

import pytest
from toy_kernel import ScaledCopy

from jax_fa4 import compile as compiler
from jax_fa4 import elf, masks, runtime
from jax_fa4.__main__ import main
from jax_fa4.artifact import Artifact, DamagedArtifact
from jax_fa4.cache import DiskCache
from jax_fa4.kernels.common import abi
from jax_fa4.plan import SizeClass
from jax_fa4.spec import AttentionSpec

pytest.importorskip("cutlass", reason="needs the compiler: pip install nvidia-cutlass-dsl")

SPEC = AttentionSpec("bfloat16", 64, 64, scale=0.125, mask=masks.Causal())
FORWARD = (SPEC, "sm_90a", SizeClass.MANY_TILES, "forward")


@pytest.fixture(scope="module", params=["sm_90a", "sm_100a"])
def toy(request) -> Artifact:
    return compiler.compile_kernel(ScaledCopy(), request.param)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and no artifacts in memory."""
    monkeypatch.setenv("JAX_FA4_CACHE_DIR", str(tmp_path))
    compiler.clear_memory()
    yield tmp_path
    compiler.clear_memory()


@pytest.fixture
def counted(monkeypatch, toy):
    """Replaces the compiler by one that hands out the toy; the list grows by one a call."""
    calls: list[str] = []

    def fake(kernel, arch):
        calls.append(arch)
        return toy

    monkeypatch.setattr(compiler, "compile_kernel", fake)
    return calls


def test_shapes_of_buffers():
    dims = abi.Dims(B=2, S=100, T=70, H=8, K=2, sm_count=132)
    buffer = abi.scratch("x", "float32", ("B", "H", ("round_up", "S", 64), ("ceil", "T", 32), ("mul", "K", 3)))
    assert buffer.dims(dims) == (2, 8, 128, 3, 6)
    assert buffer.size_bytes(dims) == 2 * 8 * 128 * 3 * 6 * 4
    with pytest.raises(ValueError, match="unknown symbol 'Z'"):
        abi.scratch("x", "float32", ("Z",)).dims(dims)
    with pytest.raises(ValueError, match="unknown operator 'div'"):
        abi.scratch("x", "float32", (("div", "S", 2),)).dims(dims)
    with pytest.raises(ValueError, match="complex64"):
        abi.itemsize("complex64")


def test_buffers_follow_from_the_spec():
    mask = masks.canonical(masks.Window(None, masks.RUNTIME) & masks.Lengths(True, True) & masks.Segments())
    spec = dataclasses.replace(SPEC, group=4, mask=mask, sink=True, positions=True, float32_out=True)
    names = [b.name for b in abi.backward_buffers(spec)]
    assert names == [
        "q", "k", "v", "sinks", "q_segment_ids", "kv_segment_ids", "q_lengths", "kv_lengths", "positions", "window",
        "lse", "delta", "do", "dq", "dk", "dv",
    ]
    by_name = {b.name: b for b in abi.backward_buffers(spec)}
    assert (by_name["dk"].dtype, by_name["do"].dtype) == ("float32", "bfloat16")
    assert by_name["k"].shape == ("B", "T", "K", 64)


def test_artifact_says_what_was_compiled(toy):
    assert {name.split("_")[2] for name in (k.name for k in toy.kernels)} == {"scale", "finish"}
    assert all(0 < k.registers <= 64 and k.code_bytes > 0 for k in toy.kernels)
    assert toy.spilled == ()
    assert toy.symbol in elf.functions(toy.object)
    assert toy.cubin[:4] == b"\x7fELF" and elf.kernels(toy.cubin) == toy.kernels
    assert f".target {toy.arch}" in toy.ptx
    assert [b.kind for b in toy.buffers] == ["in", "out", "out", "scratch"]
    assert f"{toy.arch}, object {len(toy.object)} bytes" in toy.report()


def test_host_code_needs_no_more_than_its_documented_processor(toy):
    # EVEX-encoded moves to zmm registers, which the compiler emits for the build machine's own processor.
    assert b"\x62\xf1\x7c\x48" not in toy.object[: toy.object.find(b"\x7fELF", 4)]


def test_artifact_as_bytes(toy):
    data = toy.to_bytes()
    assert Artifact.from_bytes(data) == toy
    assert len(data) < len(toy.object) + len(toy.ptx)
    for damaged in (data[:-1], data[:100], b"", data[:500] + bytes([data[500] ^ 1]) + data[501:]):
        with pytest.raises(DamagedArtifact):
            Artifact.from_bytes(damaged)


def test_arguments_of_a_host_function(toy):
    dims = abi.Dims(2, 17, 18, 4, 3, 132)
    pointers = {b.name: 4096 * (i + 1) for i, b in enumerate(toy.buffers)}
    arguments = runtime.Arguments(toy, pointers, dims, stream=77)
    assert len(arguments) == 6 + 1 + 4 + 1
    integers = [ctypes.c_int32.from_address(p).value for p in arguments.vector[:6]]
    addresses = [ctypes.c_uint64.from_address(p).value for p in arguments.vector[6:11]]
    assert integers == [2, 17, 18, 4, 3, 132]
    assert addresses == [77, 4096, 8192, 12288, 16384]
    assert arguments.vector[11] == ctypes.addressof(arguments.result)
    with pytest.raises(ValueError, match="partial"):
        runtime.Arguments(toy, {"x": 1, "scaled": 1, "total": 1}, dims)


def test_where_the_runtime_library_is(monkeypatch, tmp_path):
    assert runtime.library_path().endswith("libcute_dsl_runtime.so")
    file = tmp_path / "mine.so"
    monkeypatch.setenv("JAX_FA4_RUNTIME", str(file))
    with pytest.raises(FileNotFoundError, match="JAX_FA4_RUNTIME"):
        runtime.library_path()
    file.touch()
    assert runtime.library_path() == str(file)


def test_what_is_checked_without_the_compiler_is_what_kernels_lower():
    from jax_fa4.kernels.common import scalar_check, scalar_jaxpr

    assert set(scalar_jaxpr._RULES) == scalar_check.PRIMITIVES


def test_not_an_elf_image():
    with pytest.raises(ValueError, match="not a 64-bit"):
        elf.sections(b"no elf at all" * 10)
    with pytest.raises(ValueError, match="no cubin"):
        elf.embedded_image(b"\x7fELF" + bytes(100))


def test_memory_then_disk_then_compiler(cache, counted, toy):
    assert compiler.artifact(*FORWARD) == toy
    assert compiler.artifact(*FORWARD) == toy
    assert len(counted) == 1
    compiler.clear_memory()
    assert compiler.artifact(*FORWARD) == toy
    assert len(counted) == 1, "the second process finds it on disk"
    assert len(list(cache.iterdir())) == 1


def test_damaged_entry_is_compiled_again(cache, counted, toy):
    compiler.artifact(*FORWARD)
    (file,) = cache.iterdir()
    file.write_bytes(file.read_bytes()[:200])
    compiler.clear_memory()
    assert compiler.artifact(*FORWARD) == toy
    assert len(counted) == 2
    assert Artifact.from_bytes(file.read_bytes()) == toy


def test_threads_compile_once(cache, counted, toy):
    start = threading.Barrier(8)

    def work():
        start.wait()
        return compiler.artifact(*FORWARD)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = [f.result() for f in [pool.submit(work) for _ in range(8)]]
    assert results == [toy] * 8 and len(counted) == 1


def test_a_folder_that_cannot_be_written_costs_a_warning(cache, counted, toy, monkeypatch):
    blocked = cache / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("JAX_FA4_CACHE_DIR", str(blocked))
    with pytest.warns(UserWarning, match="JAX_FA4_CACHE_DIR"):
        assert compiler.artifact(*FORWARD) == toy


def test_least_recently_used_goes_first(tmp_path, toy):
    size = len(toy.to_bytes())
    cache = DiskCache(tmp_path, limit_bytes=3 * size)
    for age, key in enumerate("abc"):
        cache.put(key, "t", toy)
        os.utime(cache.path(key, "t"), (1000 + age, 1000 + age))
    assert cache.get("a", "t") == toy  # used now
    cache.put("d", "t", toy)
    assert sorted(path.name[0] for path in tmp_path.iterdir()) == ["a", "c", "d"]


def test_without_a_compiler_any_toolchain_will_do(cache, counted, toy, monkeypatch):
    compiler.artifact(*FORWARD)
    compiler.clear_memory()
    monkeypatch.setattr(compiler, "toolchain", lambda: None)
    assert compiler.artifact(*FORWARD) == toy
    with pytest.raises(ModuleNotFoundError, match="python -m jax_fa4 compile"):
        compiler.artifact(dataclasses.replace(SPEC, group=2), *FORWARD[1:])


def test_key_depends_on_all_that_matters(monkeypatch):
    keys = {compiler.artifact_key(*FORWARD)}
    for other in (
        (dataclasses.replace(SPEC, scale=0.5), *FORWARD[1:]),
        (dataclasses.replace(SPEC, mask=masks.Window(3, 0)), *FORWARD[1:]),
        (SPEC, "sm_100a", *FORWARD[2:]),
        (*FORWARD[:3], "backward"),
    ):
        keys.add(compiler.artifact_key(*other))
    monkeypatch.setattr(compiler, "_sources", lambda: "other sources")
    keys.add(compiler.artifact_key(*FORWARD))
    assert len(keys) == 6


HIT = """
import json, sys, time
from jax_fa4 import compile as compiler, masks
from jax_fa4.plan import SizeClass
from jax_fa4.spec import AttentionSpec
spec = AttentionSpec("bfloat16", 64, 64, scale=0.125, mask=masks.Causal())
times = []
for _ in range(10):
    compiler.clear_memory()
    start = time.process_time()  # not the clock on the wall: test machines are shared
    found = compiler.artifact(spec, "sm_90a", SizeClass.MANY_TILES, "forward")
    times.append(time.process_time() - start)
print(json.dumps([min(times), "cutlass" in sys.modules, found.kernels[0].registers]))
"""


def test_command_fills_a_cache_that_other_processes_use(cache, capsys):
    options = ["--arch", "sm_90a", "--head-dim", "64", "--causal", "--forward-only", "--jobs", "1"]
    assert main(["compile", *options, "--cache", str(cache)]) == 0
    out = capsys.readouterr().out
    assert "sm_90a forward" in out and "1 kernels in" in out
    run = subprocess.run([sys.executable, "-c", HIT], capture_output=True, text=True, check=True)
    seconds, imported_compiler, registers = json.loads(run.stdout)
    assert not imported_compiler
    assert registers >= 32
    assert seconds < 0.05


def test_command_refuses_unknown_architectures(capsys):
    with pytest.raises(SystemExit):
        main(["compile", "--arch", "sm_80"])
    assert "sm_90a" in capsys.readouterr().err


def test_command_says_what_no_kernel_does(cache, capsys):
    assert main(["compile", "--arch", "sm_90a", "--head-dim", "68", "--cache", str(cache)]) == 1
    assert "68" in capsys.readouterr().err
