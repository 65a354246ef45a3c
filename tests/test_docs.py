"""The documentation says nothing that does not run: code blocks, links, commands, names."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import jax_fa4
from jax_fa4.commands import COMMANDS

ROOT = Path(__file__).parent.parent
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_code_blocks_run_in_order(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": page.stem}
    for i, block in enumerate(blocks(page, "python")):
        if "..." not in block:  # a fragment that shows where an argument goes
            exec(compile(block, f"{page.name}[{i}]", "exec"), namespace)
    assert "jax_fa4" in namespace or "emulator" in namespace


def test_the_printed_mask_picture_is_the_one_in_the_text():
    from jax_fa4.draw import mask_picture

    text = str(mask_picture(1024, 1024, block=(128, 128), causal=True, window=(383, 0)))
    assert blocks(ROOT / "docs" / "masks.md", "text") == [text + "\n"]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "BUILD.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page):
    for command in re.findall(r"python -m jax_fa4 (\w+)", page.read_text()):
        assert command in COMMANDS, command


def test_every_page_is_in_the_navigation_and_every_public_name_in_the_reference():
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f": {page.name}" in navigation
    reference = (ROOT / "docs" / "api.md").read_text()
    for name in jax_fa4.__all__:
        if name.isupper():
            continue  # constants are described where they are used
        documented = re.search(rf"^::: jax_fa4\.([\w.]+\.)?{name}$", reference, re.M)
        assert documented, name


def test_every_entry_of_the_reference_is_there_after_one_import():
    names = re.findall(r"^::: (jax_fa4\.[\w.]+)$", (ROOT / "docs" / "api.md").read_text(), re.M)
    assert "jax_fa4.nn.dot_product_attention" in names
    subprocess.run([sys.executable, "-c", f"import jax_fa4; print({', '.join(names)})"], check=True)
