"""Pages of a run folder know each other: links lead to what is there, also after the folder has moved."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cases.planning.example_reports import small_report
from cases.planning.example_step import PLAN, STEP
from dilatant.config.errors import UserError
from dilatant.report.pages.page import write_page
from dilatant.report.pages.page_links import link_pages
from dilatant.report.pages.plan_page import render_step_page, write_plan_page


def links(page: Path) -> dict[str, str | None]:
    """Text → href; None for the page itself."""
    nav = re.search("<nav.*?</nav>", page.read_text(encoding="utf-8"))
    found = re.findall(r'<a (?:href="([^"]*)"|aria-current="page")>([^<]*)</a>', nav.group()) if nav else []
    return {text: href or None for href, text in found}


def run_folder(folder: Path) -> Path:
    (folder / "plan").mkdir(parents=True)
    write_plan_page(small_report("<!--links--><nav>"), folder / "plan" / "plan.html")
    write_page(folder / "timeline.html", render_step_page(STEP, PLAN, "the last step"))
    return folder


def test_every_link_leads_to_a_file_from_where_the_page_is(tmp_path):
    folder = run_folder(tmp_path / "a run #1")
    (folder / "metrics.jsonl").write_text("{}\n")
    link_pages(folder)
    moved = folder.rename(tmp_path / "moved")
    for place in ("timeline.html", "plan/plan.html"):
        found = links(moved / place)
        assert list(found) == ["Plan", "Last step", "Figures of every step"]
        targets = [href for href in found.values() if href]
        assert len(targets) == 2
        assert all((moved / place).parent.joinpath(href).is_file() for href in targets)


def test_links_follow_what_is_there(tmp_path):
    folder = run_folder(tmp_path / "run")
    link_pages(folder)
    once = (folder / "timeline.html").read_bytes()
    link_pages(folder)
    assert (folder / "timeline.html").read_bytes() == once
    (folder / "plan" / "plan.html").unlink()
    link_pages(folder)
    assert links(folder / "timeline.html") == {}


def test_files_that_are_no_pages_of_ours_stay_as_they_are(tmp_path):
    folder = run_folder(tmp_path / "run")
    (folder / "data.html").write_bytes(b"<p>mine</p>\xff")
    (folder / "metrics.jsonl").write_text("<!--links--><!--/links-->")
    link_pages(folder)
    assert (folder / "data.html").read_bytes() == b"<p>mine</p>\xff"
    assert (folder / "metrics.jsonl").read_text() == "<!--links--><!--/links-->"
    link_pages(tmp_path / "nowhere")


def test_page_writes_through_links_and_unwritable_path_is_error(tmp_path):
    target = tmp_path / "target.html"
    target.write_text("old")
    link = tmp_path / "link.html"
    link.symlink_to(target)
    write_page(link, render_step_page(STEP, PLAN, "mine"))
    assert link.is_symlink()
    assert "<h1>mine</h1>" in target.read_text()
    with pytest.raises(UserError, match=r"page '.*none/x.html' cannot be written: No such file"):
        write_page(tmp_path / "none" / "x.html", render_step_page(STEP, PLAN, "mine"))
