"""Weights in the format of torch's distributed checkpoints (DCP): pickled `.metadata`, and tensors in `.distcp` files.

A folder may be a stranger's, so its metadata are read by an unpickler that builds inert records for the few classes of
the format and refuses all others, and its tensors by torch's `weights_only`. Only the parts that a box needs are read.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import pickle
import pickletools
import re
import warnings
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dilatant.config.errors import UserError, as_user_error, type_and_text
from dilatant.config.files.own_files import MOST_TEXT, open_regular
from dilatant.plan.boxes import Box

METADATA = ".metadata"
"""File of a DCP folder that says which file holds which part of which tensor."""
OPTIMIZER_STATE = re.compile(r"(?:[^.]+\.)*?optim\w*\.state\.(.+)\.(\w+)")
"""Key of a tensor of an optimizer's state: name of a parameter, and what is kept for it."""
_SAFETENSORS_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class _Record:
    """Inert stand-in for an object of the format: its arguments or its pickled state, and no code of its own."""

    state: Any = ()

    def __init__(self, *values: Any) -> None:
        self.state = values

    def __setstate__(self, state: Any) -> None:
        self.state = state


_RECORDS = {
    "torch.distributed.checkpoint.metadata": "Metadata MetadataIndex StorageMeta TensorProperties ChunkStorageMetadata "
    "TensorStorageMetadata BytesStorageMetadata _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed._shard.sharded_tensor.metadata": "TensorProperties MEM_FORMAT_ENCODING",  # torch before 2.3
    "torch.serialization": "_get_layout",
    "pathlib": "PosixPath",
    "pathlib._local": "PosixPath",
}
_KNOWN: dict[str, Any] = {
    **{f"{module}.{name}": _Record for module, names in _RECORDS.items() for name in names.split()},
    **{f"torch.{name}": kind for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)},
    "torch.Size": tuple,
}
"""Global name in a pickle → what it becomes here."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in _KNOWN:
            raise pickle.UnpicklingError(f"{module}.{name} is no class of the format")
        return _KNOWN[f"{module}.{name}"]


def _unpickle(content: bytes) -> Any:
    """Return the state of the record in a pickle. Raises an Exception for a pickle that is not of the format."""
    for opcode, argument, _ in pickletools.genops(content):
        # The unpickler would make a table of this length at once.
        if opcode.name in ("PUT", "LONG_BINPUT") and int(argument or 0) > len(content):
            raise pickle.UnpicklingError("it asks for more memory than it can need")
    return _Unpickler(io.BytesIO(content)).load().state


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Stored part `box` of a tensor: an archive of torch in bytes `start` to `end` of a file."""

    box: Box
    file: Path
    start: int
    end: int

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """Read the part. Raises UserError."""
        with as_user_error(f"weights cannot be read from {str(self.file)!r}: {self.box.name!r}"):
            with open_regular(self.file) as stream:
                if os.fstat(stream.fileno()).st_size < self.end:
                    raise ValueError("the file ends before it; fetch the file again")
                content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            archive = io.BytesIO(content[self.start : self.end])
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in zipfile.ZipFile(archive).infolist()):
                raise ValueError("its archive is compressed")
            archive.seek(0)
            try:
                found: Tensor = torch.load(archive, map_location="cpu", weights_only=True)
            except (RuntimeError, pickle.UnpicklingError):
                raise ValueError("it is damaged, or holds more than a tensor") from None
            if (found.dtype, found.shape) != (dtype, shape := self.box.shape):
                raise ValueError(f"it holds {found.dtype} {list(found.shape)} in place of {dtype} {list(shape)}")
            return found


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Tensor of a DCP folder in its parts, with the interface of a slice of safetensors."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[_Chunk, ...]

    def get_dtype(self) -> str:
        """Return the dtype as safetensors names it, "" for a dtype that no weight has."""
        return _SAFETENSORS_NAMES.get(self.dtype, "")

    def get_shape(self) -> tuple[int, ...]:
        return self.shape

    def __getitem__(self, places: tuple[slice, ...]) -> Tensor:
        """Read a box: one slice with start and stop for each dimension. Raises UserError."""
        lengths = [place.stop - place.start for place in places]
        if not all(lengths):
            return torch.empty(lengths, dtype=self.dtype)
        wanted = Box(self.key, self.shape, tuple(((place.start, place.stop),) for place in places))
        found, size = torch.empty(lengths, dtype=self.dtype), 0
        for chunk in self.chunks:
            both = wanted.meet(chunk.box)
            if both is not None:
                found[wanted.place(both)] = chunk.tensor(self.dtype)[chunk.box.place(both)]
                size += both.size
        if size != wanted.size:
            folder = self.chunks[0].file.parent
            raise UserError(f"{str(folder)!r} is damaged: some elements of {self.key!r} are absent or stored twice")
        return found


class DcpTensors:
    """Tensors of a DCP folder, with the interface of `safetensors.safe_open`. file: its `.metadata`. Raises UserError.

    Keys are those of the model's state dict, which was saved by itself or as `{"model": ...}`. What was saved beside it
    (optimizer state) has the name that DCP gave it.
    """

    def __init__(self, file: Path) -> None:
        try:
            with open_regular(file) as stream:
                content = stream.read(MOST_TEXT + 1)
            if len(content) > MOST_TEXT:
                raise ValueError(f"it is longer than {MOST_TEXT >> 20} MiB")
            tensors = list(_stored_tensors(_unpickle(content), file.parent))
            self._tensors = dict(tensors)
            if len(self._tensors) < len(tensors):
                raise ValueError("it holds two models; save one of them alone")
        except Exception as error:
            where = f"{str(file)!r} is not read as the metadata of a checkpoint of torch"
            raise UserError(f"{where}: {type_and_text(error)}") from None

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_slice(self, key: str) -> StoredTensor:
        return self._tensors[key]

    def get_tensor(self, key: str) -> Tensor:
        return self._tensors[key][tuple(slice(0, length) for length in self._tensors[key].shape)]


def _stored_tensors(metadata: Mapping[str, Any], folder: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Yield key → tensor for the tensors of a checkpoint. Raises an Exception if its values do not fit together."""
    stored: dict[str, dict[Any, Mapping[str, Any]]] = defaultdict(dict)
    for place, info in metadata["storage_data"].items():
        stored[place.state["fqn"]][place.state.get("offset")] = info.state
    paths = metadata.get("planner_data") or {}
    for name, entry in metadata["state_dict_metadata"].items():
        if "chunks" not in entry.state:
            continue  # a number or an object, such as a step or a learning rate
        shape, dtype = tuple(map(index, entry.state["size"])), entry.state["properties"].state[0]
        *outer, inner = paths.get(name) or (name,)
        most, chunks = 0, list[_Chunk]()
        for chunk in entry.state["chunks"]:
            begin, size = (tuple(map(index, chunk.state[key])) for key in ("offsets", "sizes"))
            if not all(size):
                continue
            box = Box(name, shape, tuple(((at, at + n),) for at, n in zip(begin, size, strict=True)))
            info = stored[name][begin]
            file, start, length = info["relative_path"], info["offset"], info["length"]
            if info.get("transform_descriptors"):
                raise ValueError(f"{file!r} is compressed; save the checkpoint without extensions")
            if Path(file).name != file or file in ("", "..") or min(start, length) < 0:
                raise ValueError(f"{file!r} is no file beside it")
            chunks.append(_Chunk(box, folder / file, start, start + length))
            most += length
        if len(shape) > 32 or math.prod(map(abs, shape)) * dtype.itemsize > most:
            raise ValueError(f"{name!r} is longer than its parts")
        key = inner if not outer or outer[-1] == "model" else name
        yield str(key), StoredTensor(name, dtype, shape, tuple(chunks))


def is_dcp(folder: str | Path) -> bool:
    """Return True for a folder whose weights are a checkpoint of torch (DCP). Raises UserError if it also holds
    safetensors, as one of the two would be ignored."""
    place = Path(folder)
    is_there = (place / METADATA).is_file()
    if is_there and (beside := next(place.glob("*.safetensors"), None)):
        raise UserError(
            f"{str(place)!r} holds weights twice: {beside.name!r}, and a checkpoint of torch ({METADATA}); move one of "
            "them into another folder"
        )
    return is_there


def write_dcp(folder: Path, state: Mapping[str, Any]) -> None:
    """Write tensors, or nested mappings of them, as a DCP folder. Raises UserError."""
    from torch.distributed import checkpoint  # takes long to import

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch remarks that a single process writes
            checkpoint.save(dict(state), checkpoint_id=folder, no_dist=True)
    except checkpoint.CheckpointException as error:
        (cause, _), *_ = error.failures.values()
        raise UserError(f"{str(folder)!r} could not be written: {type_and_text(cause)}") from None
