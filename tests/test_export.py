"""Programs that leave the process they were made in: exported, compiled ahead of time, kept in a compilation cache."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import call, launch, plan, registry, targets

pytest.importorskip("flatbuffers", reason="jax.export serialises with it")

SHAPES = ((1, 128, 2, 64), (1, 128, 1, 64), (1, 128, 1, 64))


@pytest.fixture(autouse=True)
def library():
    try:
        registry.register()
    except OSError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", autouse=True)
def shared_cache(tmp_path_factory):
    """Compiled kernels of this module, for its subprocesses too."""
    with pytest.MonkeyPatch.context() as patch:
        if "JAX_FA4_CACHE_DIR" not in os.environ:
            patch.setenv("JAX_FA4_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        yield


def arrays(shapes=SHAPES):
    generator = np.random.default_rng(3)
    return [jnp.asarray(generator.standard_normal(shape), jnp.bfloat16) for shape in shapes]


def attend(backend, **options):
    return lambda q, k, v: jax_fa4.attention(q, k, v, causal=True, backend=backend, **options)


def assert_close(got, wanted):
    got, wanted = np.asarray(got, np.float32), np.asarray(wanted, np.float32)
    assert np.linalg.norm(got - wanted) <= 6e-3 * np.linalg.norm(wanted)


def export(function, *shapes, platforms=("cuda",)):
    return jax.export.export(jax.jit(function), platforms=platforms, disabled_checks=call.EXPORT_CHECKS)(*shapes)


def test_an_exported_program_carries_a_kernel_for_each_architecture():
    with targets.target("sm_90a", "sm_100a"):
        exported = export(attend("cuda"), *arrays())
    again = jax.export.deserialize(exported.serialize())
    text = again.mlir_module()
    assert again.platforms == ("cuda",)
    assert 'archs = "sm_90a sm_100a"' in text
    assert text.count("stablehlo.custom_call @jax_fa4(") == 1
    for arch in ("sm_90a", "sm_100a"):
        assert f'{arch} = "f0VMR' in text  # an ELF object in base64
    assert "ptx" not in text


def test_auto_on_a_machine_without_gpu_exports_for_both_platforms():
    exported = export(attend("auto"), *arrays(), platforms=("cpu", "cuda"))
    with targets.target("sm_90a"):
        one = export(attend("auto"), *arrays(), platforms=("cuda",))
    assert "@jax_fa4(" in exported.mlir_module() and "@jax_fa4(" in one.mlir_module()
    assert_close(exported.call(*arrays()), attend("xla")(*arrays()))


def test_symbolic_batch_and_length():
    batch, rows = jax.export.symbolic_shape("b, s")
    shapes = [jax.ShapeDtypeStruct((batch, rows, *shape[2:]), jnp.bfloat16) for shape in SHAPES]
    exported = jax.export.deserialize(export(attend("emulate:sm_90a"), *shapes, platforms=("cpu",)).serialize())
    for sizes in ((1, 64), (2, 37)):
        values = arrays([(*sizes, *shape[2:]) for shape in SHAPES])
        assert_close(exported.call(*values), attend("xla")(*values))


RUN = """
import sys
import jax, numpy as np
import jax_fa4
from jax_fa4 import registry
registry.register()
exported = jax.export.deserialize(open(sys.argv[1], "rb").read())
out = exported.call(*np.load(sys.argv[2]).values())
np.save(sys.argv[3], np.asarray(out, np.float32))
print("cutlass" in sys.modules)
"""


def test_an_exported_program_runs_in_a_process_without_the_compiler(tmp_path):
    float_arrays = [x.astype(jnp.float32) for x in arrays()]

    def function(*values):
        return attend("emulate:sm_90a")(*[x.astype(jnp.bfloat16) for x in values])

    (tmp_path / "program").write_bytes(export(function, *float_arrays, platforms=("cpu",)).serialize())
    np.savez(tmp_path / "in.npz", *float_arrays)
    environment = os.environ | {"JAX_FA4_CACHE_DIR": str(tmp_path / "empty")}
    command = [sys.executable, "-c", RUN, *(str(tmp_path / name) for name in ("program", "in.npz", "out.npy"))]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "False"
    assert_close(np.load(tmp_path / "out.npy"), attend("xla")(*arrays()))


def test_ahead_of_time():
    values = arrays()
    lowered = jax.jit(attend("emulate:sm_90a")).lower(*[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in values])
    assert_close(lowered.compile()(*values), attend("xla")(*values))


def test_architectures_share_one_call_with_the_larger_scratch(monkeypatch):
    kernel = launch.KernelCall(jax_fa4.spec.AttentionSpec("bfloat16", 64, 64), "forward", plan.DEFAULT_TARGETS)
    dims = launch.abi.Dims(2, 100, 100, 4, 4, 0)
    scratch = launch.abi.scratch

    def artifact(*sizes):
        buffers = (*kernel.buffers, *(scratch(f"s{i}", "float32", ("B", size)) for i, size in enumerate(sizes)))
        return launch.Artifact("sm_90a", "", buffers, "f", b"", "", ())

    slots = launch._scratch([artifact(10, 3), artifact("S")], dims)
    assert [(x.shape, x.dtype) for x in slots] == [((2 * 100 * 4,), jnp.uint8), ((2 * 3 * 4,), jnp.uint8)]
    attributes = launch._attributes(kernel, (artifact(10, 3), artifact("S")), (1, 2))
    assert attributes["buffer_counts"].tolist() == [7, 6]
    assert attributes["dims"].tolist() == [0, 0, 0, 1, 1, 1, 0, 2, 1, 2]


CACHED = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import jax_fa4
seen = []
jax.monitoring.register_event_listener(lambda name, **_: seen.append(name))
mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
shape = (2, 64, 1, 64)
q = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.bfloat16)
results = []
for sharding in (None, NamedSharding(mesh, P("data"))):
    x = q if sharding is None else jax.device_put(q, sharding)
    for causal in (True, False):
        before = len(seen)
        function = jax.jit(lambda x, causal=causal: jax_fa4.attention(
            x, x, x, causal=causal, backend="emulate:sm_90a"))
        out = np.asarray(function(x), np.float32)
        hit = sum(name.endswith("/compilation_cache/cache_hits") for name in seen[before:])
        results.append([hit, float(np.linalg.norm(out)), float(np.abs(out[:, 0]).max())])
print(json.dumps(results))
"""


def test_a_second_process_finds_its_programs_in_the_compilation_cache(tmp_path):
    """Also split over devices, where the program's text must tell kernels apart that its callback alone sees."""
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY": "1",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    runs = []
    for _ in range(2):
        run = subprocess.run([sys.executable, "-c", CACHED], capture_output=True, text=True, env=environment)
        assert run.returncode == 0, run.stderr
        runs.append(json.loads(run.stdout.splitlines()[-1]))
    first, second = runs
    assert [hit for hit, *_ in second] == [1, 1, 1, 1], (first, second)
    assert [rest for _, *rest in first] == [rest for _, *rest in second]
    (_, causal, _), (_, full, _), (_, split_causal, _), (_, split_full, _) = second
    assert causal == split_causal and full == split_full and causal != full
