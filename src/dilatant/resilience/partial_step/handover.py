"""Gradient export: a rank that must leave during a step writes its gradients to the run folder for the others.

A file's name contains generation and step; a run uses the file only if it continues from exactly that state. The file
is written atomically; one rank reads it and verifies its hash.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, uint8

from dilatant.runtime.step.partial_step import AccumulationReport
from dilatant.runtime.step.unfinished_step import UnfinishedStep

_NAME = re.compile(r"(\d+)-(\d+)-(\d+)\.safetensors")


@dataclass(frozen=True, slots=True, eq=False)
class PartialGradients:
    """A departed rank's export. gradients: its own sums by logical name, see `UnfinishedStep.gradients`."""

    report: AccumulationReport
    gradients: Mapping[str, Tensor]


def export_gradients(folder: Path, generation: int, unfinished: UnfinishedStep) -> None:
    """Export this rank's gradients of the current step in `generation`. If it raises, no file is left."""
    report = unfinished.report()
    if report is None or all(len(share.ranks) > 1 for share in report.layers):
        return  # useless without the stage's other ranks
    local = {name: gradient.detach().cpu().contiguous() for name, gradient in unfinished.gradients.items()}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{generation}-{report.step}-{report.rank}.safetensors"
    temporary = folder / f"{secrets.token_hex(6)}.writing"
    metadata = {"finished": report.to_json(), "hash": _hash(local)}
    try:
        save_file(local, temporary, metadata)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_exported_gradients(folder: Path, generation: int, step: int, rank: int, size: int) -> list[PartialGradients]:
    """Read the gradients that ranks of `generation` exported for a step and that `rank` must read. It reads those whose
    exporting rank modulo `size`, the number of ranks now, is `rank`, and ignores unreadable or corrupted files."""
    found = []
    for path in sorted(folder.glob(f"{generation}-{step}-*.safetensors")):
        match = _NAME.fullmatch(path.name)
        if match is None or int(match[3]) % size != rank:
            continue
        with suppress(OSError, SafetensorError, ValueError, KeyError):
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                gradients = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if metadata["hash"] == _hash(gradients):
                found.append(PartialGradients(AccumulationReport.from_json(metadata["finished"]), gradients))
    return found


def _hash(gradients: Mapping[str, Tensor]) -> str:
    digest = xxhash.xxh3_128()  # gigabytes in the seconds that a notice leaves
    for name in sorted(gradients):
        digest.update(name.encode())
        digest.update(gradients[name].flatten().view(uint8).numpy().data)
    return digest.hexdigest()
