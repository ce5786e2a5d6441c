"""The documentation as a site: every page is in its navigation, and every link leads somewhere, there and on GitHub."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import dilatant
from dilatant.cli.app import app
from dilatant.config.start import recipe_texts

ROOT = Path(__file__).parents[1]
FILLED = ("decisions/", "rooms/")
"""Folders whose pages the hooks put into the navigation."""


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    """The module that makes the site's pages."""
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "website" / "site_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(pages: ModuleType) -> dict[str, str]:
    """Generated page → its Markdown."""
    return pages.generated_pages()


def leaves(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    else:
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves(each)


def test_the_navigation_has_every_page_once(made: dict[str, str]) -> None:
    nav = [*leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])]
    files = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")} - {"README.md"}
    every = {page for page in files | made.keys() if not page.startswith(FILLED)}
    assert sorted(nav) == sorted(every | {"decisions/index.md"})


def test_pictures_are_those_that_their_script_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "website")
    pictures = importlib.import_module("concept_pictures").PICTURES
    for name, draw in pictures.items():
        assert (ROOT / "docs/images" / f"{name}.svg").read_text(encoding="utf-8") == draw(), name
        assert f"](images/{name}.svg)" in (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    assert len(pictures) == 9


def test_links_of_every_page_lead_somewhere(pages: ModuleType) -> None:
    for file in sorted((ROOT / "docs").rglob("*.md")):
        pages.link_within_site(file.read_text(), file.relative_to(ROOT).as_posix())
    with pytest.raises(ValueError, match=r"docs/data.md links to none.md, and there is no docs/none.md"):
        pages.link_within_site("[a](none.md)", "docs/data.md")


@pytest.mark.parametrize(
    ("source", "link", "expected"),
    [
        ("README.md", "docs/models.md#lora", "models.md#lora"),
        ("README.md", "docs/README.md", "pages.md"),
        ("README.md", "examples/own_parts.py", "https://github.com/dilatant/dilatant/blob/main/examples/own_parts.py"),
        ("docs/python.md", "../examples", "https://github.com/dilatant/dilatant/tree/main/examples"),
        ("docs/python.md", "../README.md#status", "index.md#status"),
        ("docs/running.md", "../src/dilatant/recipes/video.yaml", "recipes.md#video"),
        ("docs/decisions/194-degrees.md", "../data.md", "../data.md"),
        ("src/dilatant/data/README.md", "../../../docs/data.md", "../data.md"),
        ("docs/data.md", "https://ui.perfetto.dev", "https://ui.perfetto.dev"),
        ("docs/data.md", "#recipes", "#recipes"),
    ],
)
def test_a_link_leads_to_the_page_or_to_github(pages: ModuleType, source: str, link: str, expected: str) -> None:
    assert pages.link_within_site(f"[a]({link})", source) == f"[a]({expected})"
    assert pages.link_within_site(f"```\n[a]({link})\n```", source) == f"```\n[a]({link})\n```"


def test_generated_pages_have_every_command_name_and_recipe(made: dict[str, str]) -> None:
    for verb in (command.name for command in app.registered_commands):
        assert f"## dilatant {verb}\n" in made["cli.md"]
    assert "## dilatant data lint\n" in made["cli.md"]
    assert all(f"::: dilatant.{name}\n" in made["api.md"] for name in dilatant.__all__)
    assert all(f"## {name}\n" in made["recipes.md"] for name in recipe_texts())
    message = "| … is not a run folder: it has no config.yaml |"
    assert message in made["troubleshooting.md"].replace("&#95;", "_")


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="the site is not built without dilatant[docs]")
    pytest.importorskip("mkdocstrings", reason="the site is not built without dilatant[docs]")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert built.returncode == 0, built.stderr
    assert "parallelize" in (tmp_path / "site" / "api" / "index.html").read_text()
