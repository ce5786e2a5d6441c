"""docs/config.md lists every key of the YAML file as the code reads it."""

from __future__ import annotations

from pathlib import Path

from dilatant.config.reference import reference


def test_the_page_of_keys_is_what_the_code_reads() -> None:
    page = Path(__file__).parents[2] / "docs" / "config.md"
    assert page.read_text(encoding="utf-8") == reference(), (
        "run `python -m dilatant.config.reference > docs/config.md`"
    )
