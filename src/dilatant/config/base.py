"""Base class of the config sections: typed, frozen, with unknown keys refused; and text fields that hold paths."""

from __future__ import annotations

import os
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator

from dilatant.config.environment import expand_path
from dilatant.config.files.remote_files import RemotePath, is_address

OWN_NAME = r"^[A-Za-z_]\w*(\.\w+)*[.:]\w+$"
"""Pattern of the dotted name of a user's function or object."""
_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+]?\d{1,2}")


class Section(BaseModel):
    """A part of the YAML file. Unknown keys are errors; values are checked when read."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _read_whole_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """Convert whole numbers in exponent notation: YAML reads 1e3 as a text. Raises ValueError for true, yes or on
        in place of a number, which pydantic takes for 1."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
        kinds = typing.get_args(annotation) if is_union else (annotation,)
        if isinstance(value, bool) and bool not in kinds and (int in kinds or float in kinds):
            raise ValueError("give a number" + (", or null for none" if type(None) in kinds else ""))
        if not isinstance(value, str) or not _EXPONENT.fullmatch(value):
            return value
        is_whole = annotation in (int, int | None) and float(value).is_integer()
        return int(float(value)) if is_whole else value


class NamedSection(Section):
    """Section whose first key is one of WORDS, or the dotted name of a user's part, which makes all keys useless but
    those in BESIDE. A text in place of the section is its first key."""

    WORDS: ClassVar[tuple[str, ...]]
    BESIDE: ClassVar[tuple[str, ...]] = ()

    @property
    def own(self) -> str | None:
        """Dotted name of the user's part, if any."""
        name: str = getattr(self, next(iter(type(self).model_fields)))
        return None if name in self.WORDS else name

    @model_validator(mode="before")
    @classmethod
    def _text_is_the_first_key(cls, value: object) -> object:
        return {next(iter(cls.model_fields)): value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _own_part_has_its_own_values(self) -> Self:
        (first, _), *fields = type(self).model_fields.items()
        if self.own is not None and not re.fullmatch(OWN_NAME, self.own):
            words = ", ".join(self.WORDS)
            raise ValueError(f"{first!r} is {self.own!r}; give one of {words}, or your own as package.module.function")
        for key, field in fields if self.own is not None else ():
            if key not in self.BESIDE and getattr(self, key) != field.get_default(call_default_factory=True):
                raise ValueError(f"{key!r} is not used with your own {self.own!r}; set it there, or leave it out")
        return self


@dataclass(frozen=True, slots=True)
class PathRule:
    """Mark of a text field that is a path. words: texts with a meaning of their own; to name a file that is called like
    one, write ./ before it. is_id: a text that names nothing in the folder from which paths start is an id of the hub.
    moves: as an option, the path means the working folder even where only the YAML file's folder has such a file.
    is_data: may be an address such as s3://bucket/folder."""

    words: tuple[str, ...] = ("",)
    is_id: bool = False
    moves: bool = False
    is_data: bool = False

    def absolute(self, text: str, base: Path) -> str:
        """Return the absolute path that `text` means in the folder `base`, or an id or word unchanged."""
        if text in self.words:
            return text
        if self.is_data and is_address(text):
            return str(RemotePath(expand_path(text, base)))
        path = base / expand_path(text, base)
        return os.path.normpath(path) if not self.is_id or "$" in text or os.path.exists(path) else text

    def from_working_folder(self, text: str, base: Path) -> str:
        """Return the value of an option of the command line: its path is resolved in the working folder, as a shell
        completes it. A path that exists only in the YAML file's folder `base` keeps its meaning there."""
        if not text or text in self.words or "\0" in text or (self.is_data and is_address(text)):
            return text
        path = expand_path(text, Path.cwd())
        here, there = Path.cwd() / path, base / path
        is_here = os.path.exists(here)  # not Path.exists, which refuses long names
        stays = not is_here if self.is_id else os.path.exists(there) and not is_here and not self.moves
        return text if stays else os.path.normpath(here)


AnyPath = Annotated[str, PathRule()]
DataPath = Annotated[str, PathRule(is_data=True)]
IdOrPath = Annotated[str, PathRule(("", "auto", "bytes"), is_id=True)]


def _rules(annotation: Any) -> Iterator[PathRule]:
    """Yield the rules in the branches of an optional or a union; a mapping or list has none itself."""
    if typing.get_origin(annotation) is Annotated:
        yield from (mark for mark in annotation.__metadata__ if isinstance(mark, PathRule))
    elif typing.get_origin(annotation) not in (dict, tuple):
        for argument in typing.get_args(annotation):
            yield from _rules(argument)


def path_rule(annotation: Any) -> PathRule | None:
    """Return the rule of a text field with this annotation; None for one that holds no path."""
    return next(_rules(annotation), None)


def annotation_of(section: type[BaseModel], name: str) -> Any:
    """Return the annotation of a field with its marks, which pydantic keeps apart; None for an unknown field."""
    field = section.model_fields.get(name)
    if field is None or not field.metadata:
        return field and field.annotation
    return Annotated[field.annotation, *field.metadata]


def with_absolute_paths(value: Any, base: Path, annotation: Any = None) -> Any:
    """Return a section, or a value in one, with every path in it resolved in the folder `base`."""
    if isinstance(value, Section):
        resolved = {
            name: with_absolute_paths(getattr(value, name), base, annotation_of(type(value), name))
            for name in type(value).model_fields
        }
        changed = {name: each for name, each in resolved.items() if each != getattr(value, name)}
        return value.model_copy(update=changed) if changed else value
    if isinstance(value, dict):
        return {name: with_absolute_paths(each, base) for name, each in value.items()}
    if isinstance(value, tuple):
        return tuple(with_absolute_paths(each, base) for each in value)
    rule = path_rule(annotation) if isinstance(value, str) else None
    return value if rule is None else rule.absolute(value, base)
