"""Files of a checkpoint: their layout on disk, manifests and checksums, and how damage is detected.

    checkpoints/
      step-00000100/
        manifest.json               step, session, branch, plain values; size and checksum of every part.json; its own
        part-00000/                 what rank 0 wrote
          part.json                 the same step and session; size and checksum of every file, also of frozen ones;
                                    full shapes of the weights that are stored as boxes
          model.safetensors         one tensor per logical name, or `name@0:4,0:8` for a box of it
          optimizer.safetensors     the same for a logical name and moment
      frozen/<checksum>.safetensors weights that do not change, stored once for all checkpoints that name them

A session is one start of the command; its name tells this start's parts from those that an earlier start left. A branch
lists the sessions that led to a checkpoint, each with the last step taken from it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

Content = TypeVar("Content")

FORMAT = 2

MANIFEST = "manifest.json"
PART_MANIFEST = "part.json"
FROZEN = "frozen"

Count = Annotated[int, msgspec.Meta(ge=0)]
Session = Annotated[str, msgspec.Meta(min_length=1)]
Branch = tuple[tuple[Session, Count], ...]
"""(session, its last step on this branch), oldest first."""

_STEP_FOLDER = re.compile(r"(?:abandoned-)?step-(\d{8,})(?:\.\d+)?")
_PartFolder = Annotated[str, msgspec.Meta(pattern=r"\Apart-\d{5,}\Z")]
_File = Annotated[str, msgspec.Meta(pattern=r"\A[a-z_]+\.safetensors\Z")]
_FrozenFile = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\.safetensors\Z")]
_CHUNK_BYTES = 1 << 22
_LONGEST_JSON_BYTES = 1 << 26


class DamagedError(ValueError):
    """Raised if a file of a checkpoint is not what was written; the text names the file."""


class Stamp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size and checksum of a file as written. checksum: SHA-256 in hexadecimal."""

    bytes: Count
    checksum: str


class RankPart(msgspec.Struct, frozen=True):
    """Files written by one rank. frozen: names of files in `frozen/` beside the checkpoint. shapes: full name → full
    shape of every tensor that is stored as boxes."""

    step: Count
    session: Session
    files: dict[_File, Stamp]
    frozen: dict[_FrozenFile, Stamp]
    shapes: dict[str, tuple[Count, ...]]

    def paths(self, folder: Path) -> dict[Path, Stamp]:
        """Return every tensor file with its stamp. folder: the part's own."""
        own = {folder / name: stamp for name, stamp in self.files.items()}
        shared = {folder.parent.parent / FROZEN / name: stamp for name, stamp in self.frozen.items()}
        return own | shared


class Manifest(msgspec.Struct, frozen=True):
    """Manifest that binds the parts. values: plain JSON, the same on all ranks. parts: folder → its part.json."""

    step: Count
    session: Session
    branch: Branch
    values: dict[str, Any]
    parts: Annotated[dict[_PartFolder, Stamp], msgspec.Meta(min_length=1)]

    @property
    def whole_branch(self) -> Branch:
        """The branch up to and including this checkpoint."""
        return (*self.branch, (self.session, self.step))


def part_name(rank: int) -> str:
    return f"part-{rank:05d}"


def step_of(folder: Path) -> int | None:
    """Return the step in a folder's name; None for other names."""
    match = _STEP_FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else None


def write_part(part: RankPart) -> str:
    """Return the text of part.json."""
    return _text({"format": FORMAT, **_plain(part)})


def write_manifest(manifest: Manifest) -> str:
    """Return the text of manifest.json, which ends with its own checksum."""
    content = {"format": FORMAT, **_plain(manifest)}
    return _text({**content, "checksum": _checksum_of(content)})


def read_manifest(checkpoint: Path) -> Manifest:
    """Read manifest.json. Raises DamagedError, also if the folder's name gives another step."""
    content = _read_json(checkpoint / MANIFEST, MANIFEST)
    checksum = content.pop("checksum", None)
    _expect(checksum == _checksum_of(content), MANIFEST, "differs from what was written")
    manifest = _converted(content, Manifest, MANIFEST)
    named, stated = step_of(checkpoint), manifest.values.get("step", manifest.step)
    _expect(named in (None, manifest.step), MANIFEST, f"is of step {manifest.step}, unlike the folder's name")
    _expect(stated == manifest.step, MANIFEST, f"is of step {manifest.step}, but its values are of another")
    return manifest


def read_parts(checkpoint: Path, manifest: Manifest) -> dict[Path, RankPart]:
    """Map the folder of each part that `manifest` names to its content. Raises DamagedError."""
    parts = {}
    for name, stamp in manifest.parts.items():
        place = f"{name}/{PART_MANIFEST}"
        path = checkpoint / name / PART_MANIFEST
        check_file(path, stamp, place, contents=True)
        part = read_part(path, place)
        _expect(part.step == manifest.step, place, f"is of step {part.step}, not {manifest.step}")
        _expect(part.session == manifest.session, place, "is of another start of the run")
        parts[checkpoint / name] = part
    return parts


def read_part(path: Path, place: str) -> RankPart:
    """Read a part.json. place: its name in errors. Raises DamagedError."""
    return _converted(_read_json(path, place), RankPart, place)


def stamp_of(path: Path) -> Stamp:
    """Compute the stamp of a file. Raises OSError."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return Stamp(size, digest.hexdigest())


def check_file(path: Path, stamp: Stamp, place: str, contents: bool) -> None:
    """Raise DamagedError if the file is absent, has another size or, if `contents` are read, another checksum."""
    try:
        _expect(path.is_file(), place, "is missing")
        size = path.stat().st_size
        _expect(size == stamp.bytes, place, f"has {size} bytes instead of {stamp.bytes}")
        _expect(not contents or stamp_of(path) == stamp, place, "differs from what was written")
    except OSError as error:
        raise DamagedError(f"{place} cannot be read ({error.strerror})") from None


def _read_json(path: Path, place: str) -> dict[str, Any]:
    try:
        _expect(path.is_file(), place, "is missing")
        _expect(path.stat().st_size <= _LONGEST_JSON_BYTES, place, "is too long")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise DamagedError(f"{place} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, DamagedError):
            raise
        raise DamagedError(f"{place} is not JSON") from None
    _expect(isinstance(content, dict), place, "is not a JSON object")
    found = content.get("format")
    _expect(found == FORMAT, place, f"is of format {found!r}, and this version reads {FORMAT}")
    return content


def _converted(content: dict[str, Any], kind: type[Content], place: str) -> Content:
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise DamagedError(f"{place} has unusable content: {error}") from None


def _expect(fits: bool, place: str, otherwise: str) -> None:
    if not fits:
        raise DamagedError(f"{place} {otherwise}")


def _plain(value: RankPart | Manifest) -> dict[str, Any]:
    # Through JSON and back, so that the checksum is of what a reader will find: keys are text, tuples are lists.
    return json.loads(json.dumps(msgspec.to_builtins(value)))


def _text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=1) + "\n"


def _checksum_of(content: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    except RecursionError:
        raise DamagedError(f"{MANIFEST} is nested too deeply") from None
    return hashlib.sha256(text.encode()).hexdigest()
