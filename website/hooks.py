"""Hooks by which mkdocs adds the generated pages, and makes links of docs/ hold in the site."""

from __future__ import annotations

import logging
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify
from site_pages import decision_pages, generated_pages, link_within_site, room_pages

log = logging.getLogger("mkdocs.hooks")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Complete the navigation by the decisions and the rooms; anchors are those of GitHub."""
    more = {"Decisions": decision_pages(), "Contributing": sorted(room_pages().values())}
    for section in config.nav or []:
        for title, pages in more.items():
            if title in section:
                section[title] = [*section[title], *pages]
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages. docs/README.md is one of them, since README.md is the first page."""
    if (index := files.get_file_from_path("README.md")) is not None:
        files.remove(index)
    for page, text in generated_pages().items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **others: Any) -> str:
    """Rewrite the links of a page of docs/ that lead out of it. A link to nothing is a warning, so `--strict` fails."""
    if page.file.generated_by:
        return markdown
    try:
        return link_within_site(markdown, f"docs/{page.file.src_uri}")
    except ValueError as error:
        log.warning("%s", error)
        return markdown
