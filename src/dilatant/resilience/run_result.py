"""How a run of several machines ended: told through its folder to who leads it, by its first rank at the end."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import msgspec

from dilatant.config.files.durable import write_durably
from dilatant.training.rank import RunResult

FILE = "result.json"


def write_result(folder: Path, result: RunResult) -> None:
    """folder: of the coordinator's record."""
    write_durably(folder / FILE, msgspec.json.encode(asdict(result), enc_hook=str).decode() + "\n")


def read_result(folder: Path) -> RunResult | None:
    """None where no rank came to the end. Raises ValueError for something else."""
    try:
        text = (folder / FILE).read_bytes()
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(text, type=RunResult, dec_hook=lambda kind, value: kind(value))
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"{folder / FILE}: {error}") from None
