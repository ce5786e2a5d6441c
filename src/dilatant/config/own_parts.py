"""Parts of a run that the user writes in Python and passes to `dilatant.train`: they travel with the config to every
process of the run."""

from __future__ import annotations

import io
import os
import pickle
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any, Literal, NoReturn, TypedDict, get_args

from dilatant.config.environment import place_from
from dilatant.config.errors import UserError, type_and_text

PartName = Literal["train_data", "eval_data", "loss", "optimizer", "schedule", "callbacks", "metrics"]
PART_NAMES: tuple[PartName, ...] = get_args(PartName)


class Parts(TypedDict, total=False):
    """Keyword arguments of `dilatant.train`, which docs/python.md describes. model: an id, a folder, what `model:` in a
    YAML file holds, or a model that transformers has opened; processor: of such a model, or its tokenizer."""

    model: Any
    processor: Any
    train_data: Any
    eval_data: Any
    loss: Callable[..., Any]
    optimizer: Callable[..., Any]
    schedule: Callable[..., float]
    callbacks: Sequence[Any]
    metrics: Sequence[Callable[[Sequence[str], Sequence[str]], float]]


class OwnPart:
    """A user's object that can be sent to another process. name: what messages call it. key: differs in every run, as
    nothing tells whether the object's content changed; the same on all ranks of a machine. folder: the base of relative
    paths in it.

    Objects that pickle cannot take, and those of a notebook or of standard input, whose definitions other processes
    cannot import, are sent by value. Raises UserError when pickled if neither works.
    """

    def __init__(self, name: str, value: Any, key: str | None = None, folder: str | None = None) -> None:
        self.name = name
        self.value = value
        self.key = key or _key_of_run()
        self.folder = folder or os.getcwd()

    def __reduce__(self) -> tuple[Any, ...]:
        stream, about = io.BytesIO(), (self.name, self.key, self.folder)
        try:
            _ByReference(stream).dump(self.value)
            return _received, (*about, pickle.loads, stream.getvalue())
        except Exception:  # whatever a method of the object raises
            import dill  # which `datasets` needs, too
        try:
            return _received, (*about, dill.loads, dill.dumps(self.value, recurse=True))
        except Exception as error:
            raise UserError(
                f"{self.name} ({type(self.value).__name__}) cannot be sent to the run's other processes: "
                f"{type_and_text(error)}; leave out what belongs to this process alone (open files, locks, "
                "connections), or use no other process: parallel: single and data.workers: 0"
            ) from None


def _key_of_run() -> str:
    if place_from() is None:
        return uuid.uuid4().hex
    parent = os.getppid()  # the launcher of this machine
    stat = Path(f"/proc/{parent}/stat").read_text(encoding="utf-8")
    return f"{parent} {stat.rpartition(')')[2].split()[19]}"  # with the time when it began


def _received(name: str, key: str, folder: str, read: Callable[[bytes], Any], payload: bytes) -> OwnPart:
    return OwnPart(name, read(payload), key, folder)


class _ByReference(pickle.Pickler):
    """Pickler that refuses functions and classes that other processes cannot import from the main module."""

    def reducer_override(self, value: Any) -> Any:
        is_of_main = isinstance(value, type | FunctionType) and value.__module__ == "__main__"
        if is_of_main and not os.path.isfile(getattr(sys.modules["__main__"], "__file__", None) or ""):
            raise pickle.PicklingError
        return NotImplemented


def refuse_missing_part(name: PartName) -> NoReturn:
    raise UserError(
        f"the run got its {name} in Python ('python' in its config.yaml), so only Python can go on with it: "
        f"dilatant.train(load_config(...), {name}=...)"
    )
