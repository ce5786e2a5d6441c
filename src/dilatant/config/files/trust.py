"""Trust in code that a config names: models with custom code; metrics, callbacks, a loss, an optimizer, a schedule.

A config that the user wrote, or named on the command line, is trusted. A config found in a run folder may come from
another person: its code runs only with `--trust-remote-code`, or if a run started by this user wrote the same config
there. Such starts are recorded in the user's state folder, never in the run folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from dilatant.config.environment import state_folder
from dilatant.config.errors import UserError


def run_folder_of(config: Path) -> Path | None:
    """Return the run folder if a run or a plan wrote this config.yaml; None for any other file."""
    folder = config.resolve().parent
    if config.name != "config.yaml":
        return None
    if os.path.lexists(folder / "report.json") and os.path.lexists(folder / "plan.json"):
        return folder.parent if folder.name == "plan" else folder
    marks = ("metrics.jsonl", "step.json", ".lock")
    written = any(os.path.lexists(folder / mark) for mark in marks) or any(folder.glob("checkpoints/step-*"))
    return folder if written else None


def require_trust(config: Path, tree: dict[str, Any], overrides: Iterable[str]) -> None:
    """Raise UserError, naming key and remedy, if a config found in a run folder names code that would run.

    tree: the whole config as plain values. overrides: `--set` options of this command, whose keys are trusted.
    """
    keys = [override.partition("=")[0] for override in overrides]
    for key, what in _named_code(tree):
        by_override = any(f"{key}.".startswith(f"{own}.") or own.startswith(f"{key}.") for own in keys)
        if not by_override and not _is_valid_record(_record_path(config.parent, key, what)):
            raise UserError(
                f"{str(config)!r} names code to run in {key!r} ({what}), and may be somebody else's; look at it, then "
                "give --trust-remote-code (in Python: load_config(..., trust_remote_code=True)) to run it"
            )


def names_code(tree: dict[str, Any]) -> bool:
    """Return True for a config that names code to run."""
    return bool(_named_code(tree))


def record_trust(folder: Path, tree: dict[str, Any]) -> None:
    """Record that the user started a run that wrote the config `tree` into `folder`, so that commands on the run need
    no confirmation. Without the record, such commands require it."""
    for key, what in _named_code(tree):
        note = _record_path(folder, key, what)
        with suppress(OSError):
            note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
            with os.fdopen(os.open(note, flags, 0o600), "w", encoding="utf-8") as file:
                file.write(f"{folder.resolve()}\n{key}: {what}\n")


def _named_code(tree: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (dotted key, named code) pairs."""
    own = [("evaluation.metrics", name) for name in tree["evaluation"]["metrics"] if ":" in name]
    own += [("train.loss", name)] if (name := tree["train"]["loss"]) else []
    own += [("train.callbacks", name) for name in tree["train"]["callbacks"]]
    for section, key in (("optimizer", "name"), ("schedule", "kind")):
        own += [(f"train.{section}", name)] if re.search("[.:]", name := tree["train"][section][key]) else []
    return [*_remote_code(tree, ""), *own]


def _remote_code(node: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, dict):
        if node.get("trust_remote_code"):
            from_where = [node.get(name) for name in ("id", "tokenizer", "processor")]
            yield f"{key}trust_remote_code", ", ".join(str(one) for one in from_where if one)
        for name, below in node.items():
            yield from _remote_code(below, f"{key}{name}.")


def _record_path(folder: Path, key: str, what: str) -> Path:
    """Return the file that records trust in this code in this folder."""
    name = json.dumps([str(folder.resolve()), key, what])
    return state_folder() / "trusted" / hashlib.sha256(name.encode()).hexdigest()


def _is_valid_record(note: Path) -> bool:
    """Return True for a record that only this user can have written."""
    try:
        seen = [note.lstat(), note.parent.lstat()]
    except OSError:
        return False
    return stat.S_ISREG(seen[0].st_mode) and all(one.st_uid == os.geteuid() and not one.st_mode & 0o022 for one in seen)
