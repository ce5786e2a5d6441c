"""COCO captions and VQA in their own JSON: lists of images, annotations and questions that name each other by id.

A sample is a caption of COCO, or a question of VQA with its answer; the answers may be in another file of the source.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from dilatant.config.errors import UserError, as_user_error
from dilatant.config.files.remote_files import map_file
from dilatant.data.errors import SampleError
from dilatant.data.readers.record_fields import CHAT_COLUMNS
from dilatant.data.readers.source_files import RecordsOfFiles, Scan, SourceFiles

_Id = int | str


class _Image(msgspec.Struct):
    id: _Id
    file_name: str


class _Question(msgspec.Struct):
    question: str
    question_id: int
    image_id: _Id | None = None
    image: str | None = None


class _Annotation(msgspec.Struct):
    question_id: int | None = None
    image_id: _Id | None = None
    caption: str | None = None
    multiple_choice_answer: str | None = None
    answers: list[dict[str, Any]] = []

    @property
    def answer(self) -> str | None:
        """The answer that VQA scores best: the commonest one, of equally common ones the first."""
        texts = [str(each.get("answer")) for each in self.answers]
        return self.multiple_choice_answer or (max(texts, key=Counter(texts).__getitem__) if texts else None)


class _File(msgspec.Struct):
    images: list[_Image] = []
    annotations: list[_Annotation] = []
    questions: list[_Question] = []
    data_subtype: str = ""


LISTS = {"images": _Image, "annotations": _Annotation, "questions": _Question}


class AnnotationRecords(RecordsOfFiles):
    """Captions or questions of several files. Raises UserError for answers whose questions are in none of the
    files."""

    def __init__(self, files: SourceFiles) -> None:
        super().__init__(files)
        if not len(self):
            raise UserError(
                f"{files.names[0]} holds answers without their questions; name both files, for example by a pattern: "
                "path: v2_*_train2014_*.json"
            )

    @cached_property
    def unused(self) -> tuple[str, ...]:
        names = self._files.array("unused").tobytes().decode().split("\0")
        return tuple(dict.fromkeys(filter(None, names)))

    def fields(self, place: str, file: int, number: int) -> dict[str, Any]:
        fields = self._row("rows", file, number)
        if "question" in fields:
            keys, order, first = self._answers
            key = int(self._files.part("keys", file)[number])
            at = int(np.searchsorted(keys, key))
            if at == len(keys) or keys[at] != key:
                raise SampleError(place, "is a question without an annotation", "add it, or remove the question")
            holder = int(np.searchsorted(first, order[at], side="right")) - 1
            fields |= self._row("answers", holder, int(order[at] - first[holder]))
        if fields["image"] is None:
            raise SampleError(place, "names an image that 'images' lacks", "add it")
        return fields

    def _row(self, name: str, file: int, number: int) -> dict[str, Any]:
        first, end = self._files.part(f"{name} ends", file)[number : number + 2].tolist()
        return json.loads(self._files.part(name, file)[first:end].tobytes())

    @cached_property
    def _answers(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """The questions' ids of all answers, sorted; the number of each answer; and the first answer of every file."""
        keys = self._files.array("answer keys")
        order = np.argsort(keys, kind="stable")
        counts = [len(self._files.part("answer keys", file)) for file in range(len(self._files.paths))]
        return keys[order], order, np.cumsum([0, *counts])


def _json_lists(path: Path) -> dict[str, msgspec.Raw]:
    return msgspec.json.decode(memoryview(map_file(path)), type=dict[str, msgspec.Raw])


def is_annotations(path: Path) -> bool:
    """Return True for JSON that is one object with lists of annotations or questions, joined by ids."""
    try:
        found = _json_lists(path)
    except (msgspec.MsgspecError, RecursionError):
        return False  # JSON Lines, most of all
    begins = [bytes(memoryview(found[name])[:4096]) for name in ("annotations", "questions") if name in found]
    is_chat = not found.keys().isdisjoint(CHAT_COLUMNS)
    return not is_chat and any(begin.startswith(b"[") and b'_id"' in begin for begin in begins)


def scan_annotations(path: Path, name: str) -> Scan:
    """Return the captions and questions of a file, and the answers in it. Raises UserError naming a file that is
    damaged or holds none.

    rows, answers: their columns as JSON, as bytes, split at "rows ends" and "answers ends". keys, answer keys: int64,
    the questions' ids. unused: names of the file's other keys as bytes, each followed by a zero.
    """
    with as_user_error(f"{name} cannot be read as COCO or VQA JSON", msgspec.MsgspecError, RecursionError):
        raw = _json_lists(path)
        lists = {key: msgspec.json.decode(raw[key]) for key in (*LISTS, "data_subtype") if key in raw}
        found = msgspec.convert(lists, _File)
    keys = {f"{each}[].{key}" for each in LISTS for one in lists.get(each, ()) for key in one}
    answers = [each for each in found.annotations if each.question_id is not None]
    captions = [each for each in found.annotations if each.question_id is None]
    if not (found.questions or answers or any(each.caption for each in captions)):
        raise UserError(
            f"{name} is COCO JSON without captions (it has {', '.join(sorted(keys))}); name the file of captions, or "
            "write boxes and classes into texts"
        )
    images: dict[Any, str] = {image.id: image.file_name for image in found.images}

    def file_name(image: _Id | None) -> str | None:
        is_of_coco = bool(found.data_subtype) and isinstance(image, int) and image not in images
        return f"COCO_{found.data_subtype}_{image:012d}.jpg" if is_of_coco else images.get(image)

    rows: list[dict[str, Any]] = [
        *({"image": each.image or file_name(each.image_id), "question": each.question} for each in found.questions),
        *({"image": file_name(each.image_id), "caption": each.caption} for each in captions),
    ]
    used = {f"{each}[].{key}" for each, kind in LISTS.items() for key in (*kind.__struct_fields__, "id")}
    if answers and all(each.multiple_choice_answer for each in answers):
        used.remove("annotations[].answers")
    unused = [*(key for key in raw if key not in lists), *sorted(keys - used)]
    return Scan(
        len(rows),
        {
            **_texts("rows", rows),
            **_texts("answers", [{"answer": each.answer} for each in answers]),
            "keys": np.array([*(each.question_id for each in found.questions), *[0] * len(captions)], np.int64),
            "answer keys": np.array([each.question_id for each in answers], np.int64),
            "unused": np.frombuffer("".join(f"{key}\0" for key in unused).encode(), np.uint8),
        },
    )


def _texts(name: str, rows: list[dict[str, Any]]) -> dict[str, NDArray[Any]]:
    texts = [json.dumps(row).encode() for row in rows]
    ends = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    return {name: np.frombuffer(b"".join(texts), np.uint8), f"{name} ends": ends}
