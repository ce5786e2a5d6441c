"""File discovery: the data files that a path, folder or pattern names, limited to the requested split of a folder."""

from __future__ import annotations

import glob
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from dilatant.config.errors import UserError
from dilatant.data.readers.source_files import Form

SUFFIXES: Mapping[str, Form] = {
    ".parquet": "parquet",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".tar": "tar",
    ".arrow": "arrow",
}
ABOUT = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
"""Files in which `datasets` describes the data next to them."""
SPLITS: Mapping[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Split → the words in file and folder names that denote the split."""


def find_files(
    path: str, split: str | None = None, held_out: bool = False
) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Return the data files, sorted, and descriptions of the files in a folder that are skipped.

    split: the split to use of a folder that has several; None means `train`. held_out: the files are for evaluation,
    where the user must name the split. Raises UserError.
    """
    found: list[Path] = []
    passed_over: list[str] = []
    for pattern in _expand_braces(str(Path(path).expanduser())):
        place = Path(pattern)
        if place.is_dir():
            inside = [file for file in sorted(place.rglob("*")) if _is_data(file, place)]
            if not inside:
                raise UserError(
                    f"folder {str(place)!r} holds no data file; expected {', '.join(SUFFIXES)} files in it"
                )
            inside, others = _of_split(place, inside, split, held_out)
            found += inside
            passed_over += others
        elif place.exists():
            found.append(place)
        else:
            named = map(Path, sorted(glob.glob(pattern, recursive=True)))
            matches = [match for match in named if match.is_file()]  # skips broken links
            if not matches:
                nothing = "matches no file" if glob.has_magic(pattern) else "does not exist"
                raise UserError(f"data path {pattern!r} {nothing}")
            found += matches
    return tuple(dict.fromkeys(found)), tuple(passed_over)


def _is_data(file: Path, folder: Path) -> bool:
    if file.suffix.lower() not in SUFFIXES or file.name in ABOUT:
        return False
    if file.name.startswith("cache-") and file.suffix == ".arrow":  # a cache file of `datasets`
        return False
    return not any(part.startswith(".") for part in file.relative_to(folder).parts)


def _of_split(
    folder: Path, files: Sequence[Path], wanted: str | None, held_out: bool
) -> tuple[list[Path], list[str]]:
    """Return the files of the requested split, and what is skipped. A file that names no split belongs to `train`."""
    words = {file: _splits_of(file.relative_to(folder)) for file in files}
    count = Counter(split for splits in words.values() for split in splits)
    known = next((split for split, names in SPLITS.items() if wanted in names), wanted)
    if wanted is not None and known not in count and (count or known != "train"):
        by_word = [file for file in files if wanted.lower() in _words(file.relative_to(folder))]
        if not by_word:
            there = f"; there are {', '.join(sorted(count))}" if count else ""
            raise UserError(f"folder {str(folder)!r} holds no file of the split {wanted!r}{there}")
        return by_word, [f"{len(files) - len(by_word)} files that are not of the split {wanted!r}"]
    if len(count) < 2 and (wanted is None or len(count) == 0 or all(words.values())):
        return list(files), []
    if wanted is None and (held_out or "train" not in count):
        raise UserError(
            f"folder {str(folder)!r} holds the splits {', '.join(sorted(count))}; name the one to use with 'split' of "
            "the data source, or its files by a pattern"
        )
    chosen = known or "train"
    kept = [file for file in files if chosen in words[file] or (chosen == "train" and not words[file])]
    others = [
        f"{split} ({number:,} of {len(files):,} files)"
        for split, number in sorted(count.items())
        if split != chosen
    ]
    return kept, [f"the splits {', '.join(others)}; only {chosen!r} is read"]


def _splits_of(file: Path) -> frozenset[str]:
    """Return the split that the name of a file, or else its nearest folder that names one, stands for; none if that
    name contains several."""
    for part in reversed(file.parts):
        words = _words(Path(part))
        found = frozenset(split for split, names in SPLITS.items() if not words.isdisjoint(names))
        if found:
            return found if len(found) == 1 else frozenset()
    return frozenset()


def _words(file: Path) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z]+", str(file).lower()))


def _expand_braces(pattern: str) -> list[str]:
    """Expand `shard-{000..003}.tar`, as WebDataset users write it, and `{a,b}`."""
    match = re.search(r"\{([^{}]*)\}", pattern)
    if match is None or Path(pattern).exists():
        return [pattern]
    body = match.group(1)
    span = re.fullmatch(r"(\d+)\.\.(\d+)", body)
    if span:
        width = len(span.group(1))
        choices = [str(number).zfill(width) for number in range(int(span.group(1)), int(span.group(2)) + 1)]
    else:
        choices = body.split(",")
    head, tail = pattern[: match.start()], pattern[match.end() :]
    return [full for choice in choices for full in _expand_braces(head + choice + tail)]
