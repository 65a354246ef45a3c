"""What importing jax_fa4 costs, and what a person is told to type."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jax_fa4

ROOT = Path(__file__).parent.parent


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_is_light():
    """No kernel compiler, CUDA library or plotting; under 0.3 s of processor time beyond importing jax."""
    code = """
import sys, time, jax
def libraries():
    return {line.split("/")[-1].strip() for line in open("/proc/self/maps") if "libcu" in line or "jax_fa4" in line}
loaded, before, began = libraries(), set(sys.modules), time.process_time()
import jax_fa4
print(time.process_time() - began)
print(*sorted({name.split(".")[0] for name in set(sys.modules) - before}))
print(*libraries() - loaded)  # JAX's own CUDA plug-in may have loaded some
"""
    seconds, modules, libraries = run_python(code).split("\n")[:3]
    assert float(seconds) < 0.3
    assert {"cutlass", "cuda", "flax", "matplotlib", "torch", "tqdm"}.isdisjoint(modules.split())
    assert libraries == ""


def test_all_names_exist_and_are_listed():
    for name in jax_fa4.__all__:
        assert hasattr(jax_fa4, name), name
    assert {*jax_fa4.__all__, "nn", "flax"} <= set(dir(jax_fa4))


def test_drop_ins_are_importable_without_flax():
    code = "import sys; sys.modules['flax'] = None; import jax_fa4.flax, jax_fa4.nn; print('fine')"
    assert run_python(code) == "fine\n"


def test_readme_has_the_two_commands_in_one_line_each():
    commands = re.findall(r"^python3\.11 -m venv .*$", (ROOT / "README.md").read_text(), re.M)
    assert len(commands) == 2
    main_job, tests = commands
    assert '".[examples]"' in main_job and main_job.endswith("examples/train_lm.py")
    assert '".[test]"' in tests and all(tool in tests for tool in ("ruff check .", "mypy", "pytest"))


def test_extras_are_those_that_the_documents_name():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    documents = "".join((ROOT / name).read_text() for name in ("README.md", "BUILD.md"))
    named = set(re.findall(r"\.\[(\w+)\]", documents))
    assert named <= set(extras)
    assert {"cuda13", "flax", "examples", "test"} <= set(extras)
