"""Reading checkpoints: find the newest, refuse damaged ones, and load tensors by name under any layout.

`files` describes what is on disk, `writer` how it gets there.

A tensor's full name is `<kind>.<weight>`, and for a moment of the optimizer `<kind>.<weight>.<moment>`. A piece of it
is stored as `<name>@<intervals>`, and the part's manifest tells the full shape.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dilatant.config.errors import UserError, one_line
from dilatant.plan.boxes import Box, parse_key
from dilatant.training.checkpoints.files import DamagedError, Manifest, check_file, read_manifest, read_parts, step_of

CONTINUED = "continues.txt"
"""File naming the checkpoint elsewhere that a run continues from, until the run has a checkpoint of its own."""

_READERS = 4
_ROUNDED = {torch.float32, torch.bfloat16}
"""Precisions of runs that may read what the others wrote."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A finished checkpoint on disk."""

    path: Path
    step: int


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """List the checkpoints of the run's branch in `folder`, newest first, not yet checked for damage.

    Those of an abandoned branch have other names. Raises UserError if the folder cannot be read.
    """
    try:
        paths = [path for path in folder.glob("step-*") if path.is_dir()] if folder.is_dir() else []
    except OSError as error:
        raise UserError(f"checkpoints in {str(folder)!r} cannot be read: {error.strerror}") from None
    found = [Checkpoint(path, step) for path in paths if (step := step_of(path)) is not None]
    return sorted(found, key=lambda checkpoint: checkpoint.step, reverse=True)


def damage(checkpoint: Path, contents: bool = True) -> str | None:
    """Describe what is wrong with a checkpoint folder; None if every file is as it was written.

    contents: read every byte; otherwise only manifests, which hold each other's checksums, and file sizes.
    """
    if not checkpoint.is_dir():
        return "there is no such folder"
    try:
        parts = read_parts(checkpoint, read_manifest(checkpoint))
        stamps = {path: stamp for folder, part in parts.items() for path, stamp in part.paths(folder).items()}
        base = checkpoint.parent

        def check(path: Path) -> None:
            inside = path.is_relative_to(checkpoint)
            check_file(path, stamps[path], str(path.relative_to(checkpoint if inside else base)), contents)

        with ThreadPoolExecutor(_READERS) as pool:
            list(pool.map(check, stamps))
    except DamagedError as problem:
        return str(problem)
    return None


def newest_valid(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest undamaged checkpoint of the run's branch, and a warning for every damaged one passed over.

    Every byte of the candidates is read: one rank calls this and tells the others (see `identity`). A run that
    continues from a checkpoint elsewhere gets that one until it has one of its own.
    """
    candidates = list_checkpoints(folder)
    warned: list[str] = []
    with _reading(folder / CONTINUED):
        text = (folder / CONTINUED).read_text(encoding="utf-8") if (folder / CONTINUED).is_file() else ""
    if text.strip():
        elsewhere = Path(text.strip())
        step = step_of(elsewhere)
        candidates.insert(0, Checkpoint(elsewhere, -1 if step is None else step))
    for candidate in candidates:
        problem = damage(candidate.path)
        if problem is None:
            return Checkpoint(candidate.path, read_manifest(candidate.path).step), warned
        warned.append(f"checkpoint {candidate.path.name} is damaged and was skipped: {problem}")
    return None, warned


def best_of(newest: Checkpoint) -> Checkpoint:
    """Return the best checkpoint (`evaluation.keep_best`) of the run of `newest`; `newest` if that is missing or
    damaged."""
    best = read_manifest(newest.path).values.get("best")
    step = best.get("step") if isinstance(best, dict) else None
    path = newest.path.with_name(f"step-{step:08d}") if isinstance(step, int) else newest.path
    return newest if damage(path) is not None else Checkpoint(path, read_manifest(path).step)


def identity(checkpoint: Path) -> str:
    """Return step, session and part checksums of `checkpoint` as this process sees it: equal on ranks that see the
    same.

    Reads manifests and file sizes only. Raises UserError if anything is missing or damaged here.
    """
    problem = damage(checkpoint, contents=False)
    if problem is not None:
        raise UserError(
            f"checkpoint {str(checkpoint)!r} cannot be used: {problem}; all machines must see the same folder"
        )
    manifest = read_manifest(checkpoint)
    parts = ",".join(f"{name}:{stamp.checksum}" for name, stamp in sorted(manifest.parts.items()))
    return f"{manifest.step} {manifest.session} {parts}"


def load(
    checkpoint: Path, tensors: Tensors, known: Collection[str] | None = None, shapes: Shapes | None = None
) -> dict[str, Any]:
    """Fill `tensors` in place from `checkpoint`, on any device; return the plain values saved with them.

    Each box is assembled from whatever boxes are stored. known: all weights of the model, if `tensors` is only a part
    of it. shapes: full shapes of the weights of which `tensors` has boxes. Raises UserError, with nothing filled, if
    the checkpoint is damaged; if a tensor is absent there or has another shape or dtype (fp32 and bf16 are converted);
    or if the checkpoint holds weights that the model lacks, so that it is of another model.
    """
    wanted = list(pieces_of(tensors, shapes or {}))
    names = {*(piece.box.name for piece in wanted), *(f"model.{name}" for name in known or ())}
    manifest, stored = _stored(checkpoint)
    problems: dict[str, None] = {}  # each once: a weight may be wanted in several boxes
    reads: dict[Path, list[tuple[BoxPiece, StoredPiece, Box]]] = {}
    for piece in wanted:
        name, whole = piece.box.name, piece.box.whole
        held = stored.get(name)
        if held is None:
            problems[f"{name} is not in the checkpoint"] = None
        elif held[0].box.whole != whole:
            problems[f"{name} is {list(whole)} here and {list(held[0].box.whole)} there"] = None
        elif (dtype := held[0].dtype) != piece.tensor.dtype and not {dtype, piece.tensor.dtype} <= _ROUNDED:
            problems[f"{name} is {str(piece.tensor.dtype)[6:]} here and {str(dtype)[6:]} there"] = None
        else:
            cells = sources(piece.box, held)
            if sum(cell.size for _, cell in cells) != piece.box.size:
                problems[f"{name} is not all in the checkpoint"] = None
            for source, cell in cells:
                reads.setdefault(source.file, []).append((piece, source, cell))
    problems |= {f"{name} is in the checkpoint only": None for name in sorted(stored)
                 if name.startswith("model.") and name not in names}  # fmt: skip
    if problems:
        first = list(problems)[:3]
        shown = "; ".join(first) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else "")
        raise UserError(
            f"checkpoint {str(checkpoint)!r} belongs to another model: {shown}. "
            "Use the config saved in its run folder, or another output_dir"
        )
    with torch.no_grad():
        for file, of_file in reads.items():
            with _reading(file), safe_open(file, framework="pt") as reader:
                for piece, source, cell in of_file:
                    if cell == source.box:
                        part = reader.get_tensor(source.key)
                    else:
                        part = reader.get_slice(source.key)[source.box.place(cell)]
                    piece.tensor[piece.box.place(cell)].copy_(part)
    return manifest.values


def stored_shapes(checkpoint: Path, prefix: str) -> dict[str, tuple[int, ...]]:
    """Return the full shape of every tensor under `prefix.`, by name without the prefix. Raises UserError."""
    return {
        name.removeprefix(prefix + "."): pieces[0].box.whole
        for name, pieces in _stored(checkpoint)[1].items()
        if name.startswith(prefix + ".")
    }


def _stored(checkpoint: Path) -> tuple[Manifest, dict[str, list[StoredPiece]]]:
    """Return the manifest, and map each full name to its pieces in all parts. Raises UserError if a part is damaged or
    pieces overlap."""
    found: dict[str, list[StoredPiece]] = {}
    try:
        manifest = read_manifest(checkpoint)
        parts = read_parts(checkpoint, manifest)
        for folder, part in parts.items():
            for file, stamp in part.paths(folder).items():
                place = f"{folder.name}/{file.name}"
                check_file(file, stamp, place, contents=False)
                kind = "model" if file.name in part.frozen else file.stem
                with _reading(file), safe_open(file, framework="pt") as reader:
                    for key in reader.keys():  # noqa: SIM118  # it is no dict
                        view = reader.get_slice(key)
                        dtype = (view[:0] if view.get_shape() else reader.get_tensor(key)).dtype
                        try:
                            box = stored_box(f"{kind}.{key}", view.get_shape(), part.shapes)
                        except ValueError as error:
                            raise DamagedError(f"{place}: {error}") from None
                        found.setdefault(box.name, []).append(StoredPiece(box, file, key, dtype))
        for name, pieces in found.items():
            if len({(piece.box.whole, piece.dtype) for piece in pieces}) > 1:
                raise DamagedError(f"{name} is stored in unlike forms")
            if overlap(pieces):
                raise DamagedError(f"{name} is stored twice")
    except DamagedError as problem:
        raise UserError(f"checkpoint {str(checkpoint)!r} is damaged: {problem}") from None
    return manifest, found


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, UnicodeDecodeError) as error:
        raise UserError(f"{str(path)!r} cannot be read: {one_line(error)}") from None


Tensors = dict[str, Any]
"""Tensors under nested names: {"model": {key: tensor}, "optimizer": {key: {"exp_avg": tensor}}}, keyed by `Box.key`."""

Shapes = Mapping[str, tuple[int, ...]]
"""Weight → full shape, for weights of which only a part is held."""


@dataclass(frozen=True, slots=True, eq=False)
class BoxPiece:
    """Tensor to store or to fill; its box has the full name."""

    box: Box
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """Location and form of a stored piece."""

    box: Box
    file: Path
    key: str
    dtype: torch.dtype


def pieces_of(tensors: Tensors, shapes: Shapes, prefix: str = "") -> Iterator[BoxPiece]:
    """Yield every tensor with its box. A scalar beside a weight's boxes (its step count) is of the whole weight."""
    for key, value in tensors.items():
        name, intervals = parse_key(key)
        if intervals is None or name not in shapes:
            if isinstance(value, Tensor):
                yield BoxPiece(Box.of(prefix + key, value.shape), value)
            else:
                yield from pieces_of(value, shapes, f"{prefix}{key}.")
            continue
        for kind, tensor in (("", value),) if isinstance(value, Tensor) else value.items():
            full, shape = f"{prefix}{name}.{kind}".removesuffix("."), shapes[name]
            is_whole = tensor.ndim == 0 and shape
            yield BoxPiece(Box.of(full, ()) if is_whole else Box(full, shape, intervals), tensor)


def stored_box(name: str, shape: Sequence[int], shapes: Shapes) -> Box:
    """Return the box stored as `name`. shapes: by full name. Raises ValueError if the piece does not fit its tensor."""
    whole, intervals = parse_key(name)
    if intervals is None or whole not in shapes:
        return Box.of(name, shape)
    box = Box(whole, shapes[whole], intervals)
    if box.shape != tuple(shape):
        raise ValueError(f"{name} has shape {list(shape)}")
    return box


def overlap(stored: Sequence[StoredPiece]) -> bool:
    """Return True if any two pieces of one tensor hold the same element."""
    if len(stored) == 1:
        return False
    ordered = sorted((p.box for p in stored), key=lambda box: box.intervals[:1])
    for number, box in enumerate(ordered):
        if not box.whole or not box.size:
            return True
        for other in ordered[number + 1 :]:
            if other.intervals[0] and other.intervals[0][0][0] >= box.intervals[0][-1][1]:
                break
            if box.meet(other) is not None:
                return True
    return False


def sources(wanted: Box, stored: Sequence[StoredPiece]) -> list[tuple[StoredPiece, Box]]:
    """Return the cells of `wanted`, each with the piece that holds it; cells that are stored nowhere are absent."""
    found = []
    for piece in stored:
        both = wanted.meet(piece.box)
        if both is not None:
            found += [(piece, cell) for cell in both.cells()]
    return found
