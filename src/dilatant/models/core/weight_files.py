"""Files of weights in the safetensors format: opened, checked, and named with a remedy if they are damaged."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from dilatant.config.errors import UserError, as_user_error, one_line
from dilatant.config.files.own_files import FETCH_LFS, LFS_POINTER

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def open_safetensors(file: Path) -> Any:
    """Open a file for reading by key. Raises UserError."""
    if not file.is_file():
        raise UserError(f"weights cannot be read from {str(file)!r}: there is no such file; download it again")
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        with file.open("rb") as stream:
            if stream.read(len(LFS_POINTER)) == LFS_POINTER:
                raise UserError(f"{str(file)!r} {FETCH_LFS}") from None
        raise UserError(f"{str(file)!r} is damaged or incomplete, download it again ({one_line(error)})") from None


def read_index(index: Path) -> dict[str, str]:
    """Return stored key → name of its file, from an index of shards. Raises UserError."""
    try:
        shards = json.loads(index.read_bytes())["weight_map"]
        if not all(isinstance(name, str) for name in shards.values()):
            raise TypeError
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise UserError(f"{str(index)!r} does not say which file has which weight; fetch it again") from None
    return shards


@contextmanager
def named_if_damaged(what: str, source: str) -> Iterator[None]:
    """Raise errors inside the context as a UserError of `what` and the error's text. If a file in the folder `source`
    is damaged, which transformers does not name, the error names that file instead."""
    with as_user_error(what):
        try:
            yield
        except Exception:
            index = Path(source) / INDEX
            for name in sorted(set(read_index(index).values())) if index.is_file() else [SINGLE]:
                if index.is_file() or (Path(source) / name).exists():
                    with open_safetensors(Path(source) / name):
                        pass
            raise


def require_finite(tensors: Iterable[tuple[str, Tensor]], place: str) -> None:
    """Raise UserError for the first tensor with NaN or infinity; quantized ones are passed over, and single numbers may
    be infinite (bounds). place: beginning of the error, with the file, folder or id."""
    for key, tensor in tensors:
        is_checked = tensor.is_floating_point() and tensor.dtype.itemsize > 1 and tensor.numel() > 0
        # Both ends are NaN if one element is; this takes a tenth of the time of isfinite, and no copy.
        ends = tensor.detach().aminmax() if is_checked else ()
        if any(math.isnan(end) if tensor.numel() == 1 else not math.isfinite(end) for end in ends):
            raise UserError(
                f"{place}: {key!r} holds NaN or infinity (as {tensor.dtype}), so every loss would; download it again, "
                "or export it again from a sound checkpoint"
            )


def unlike_tie(place: str, key: str, other: str) -> UserError:
    """Return the error for two stored weights that are unlike, although the config ties them. place: its beginning."""
    return UserError(
        f"{place}: config.json ties {key!r} to {other!r}, but the files hold unlike weights for them; write "
        f"tie_word_embeddings: false there (also in its text_config) to train both, or remove {key!r} from the files"
    )
