"""Result file of a run over several machines: the final first rank writes it, the leader reads it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import msgspec

from dilatant.config.files.durable import write_durably
from dilatant.training.rank import RunResult

FILE = "result.json"


def write_result(folder: Path, result: RunResult) -> None:
    """Write the result to `folder`, that of the coordinator's record."""
    write_durably(folder / FILE, msgspec.json.encode(asdict(result), enc_hook=str).decode() + "\n")


def read_result(folder: Path) -> RunResult | None:
    """Read the result; None where no rank reached the end. Raises ValueError for an invalid file."""
    try:
        text = (folder / FILE).read_bytes()
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(text, type=RunResult, dec_hook=lambda kind, value: kind(value))
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"{folder / FILE}: {error}") from None
