"""docs/config.md lists every key of the YAML file as the code reads it."""

from __future__ import annotations

from pathlib import Path

from harness.config_reference import reference


def test_the_page_of_keys_is_what_the_code_reads() -> None:
    page = Path(__file__).parents[2] / "docs" / "config.md"
    assert page.read_text(encoding="utf-8") == reference(), (
        "run `PYTHONPATH=src:tests python -m harness.config_reference > docs/config.md`"
    )
