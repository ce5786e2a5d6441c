"""How the command line refuses what a user got wrong."""

from __future__ import annotations


def refused(result: tuple[int, str, str], *says: str) -> None:
    code, _, err = result
    assert code == 2, err
    assert any(line.startswith("error: ") for line in err.splitlines())
    assert "Traceback" not in err
    for text in says:
        assert text in err
