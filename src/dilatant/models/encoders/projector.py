"""Projectors: modules that map an encoder's width to the language model's, new or continued from stored weights (in an
export or a separate file)."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from dilatant.config.errors import UserError
from dilatant.config.files.exports import PROJECTOR_FOLDER, is_export_of_parts
from dilatant.config.model import EncoderConfig
from dilatant.models.core.weight_files import open_safetensors

_KINDS = {
    frozenset[str](): "identity",
    frozenset(("weight", "bias")): "linear",
    frozenset(("0.weight", "0.bias", "2.weight", "2.bias")): "mlp",
}
"""Keys of a projector's file → its kind."""


def build_projector(kind: str, width: int, hidden_size: int, where: str = "projector") -> nn.Module:
    """Build a projector from `width` to `hidden_size`: [..., width] → [..., hidden_size].

    "linear" is one layer; "mlp" is linear, GELU, linear with the language model's width inside (LLaVA-1.5's form);
    "identity" needs equal widths. Raises UserError.
    """
    if kind == "linear":
        return nn.Linear(width, hidden_size)
    if kind == "mlp":
        return nn.Sequential(nn.Linear(width, hidden_size), nn.GELU(), nn.Linear(hidden_size, hidden_size))
    if kind == "identity":
        if width != hidden_size:
            raise UserError(
                f"{where}: projector 'identity' needs equal widths, but the encoder gives {width} and the language "
                f"model takes {hidden_size}; use 'linear' or 'mlp'"
            )
        return nn.Identity()
    raise UserError(f"{where}: projector {kind!r} is not known; use 'linear', 'mlp', 'identity' or an nn.Module")


def stored_projector(name: str, entry: EncoderConfig) -> Path | None:
    """Return the file of stored weights for the projector of encoder `name`. It is the file that `projector` names, or
    the projector file in the export that contains the encoder; None without either. Raises UserError."""
    if not entry.goes_on:
        place = Path(entry.id or "")
        if entry.id is None or not is_export_of_parts(place.parent):
            return None
        beside = place.parent / PROJECTOR_FOLDER / f"{place.name}.safetensors"
        return beside if beside.is_file() else None
    file = Path(str(entry.projector))
    if file.is_dir():
        place = Path(entry.id or "")
        file = file / PROJECTOR_FOLDER / f"{place.name if place.parent == file else name}.safetensors"
    if not file.is_file():
        raise UserError(f"model.encoders.{name}.projector: there is no file {str(file)!r}")
    return file


def kind_of_projector(name: str, entry: EncoderConfig) -> str:
    """Return the kind of projector of encoder `name`. Raises UserError."""
    if entry.projector is not None and not entry.goes_on:
        return entry.projector
    file = stored_projector(name, entry)
    kind = None if file is None else _KINDS.get(frozenset(_shapes(file)))
    if kind is None and entry.goes_on:
        raise UserError(f"model.encoders.{name}.projector: {str(file)!r} holds no linear, mlp or identity projector")
    return kind or "mlp"


def misfit(file: Path, projector: nn.Module) -> str | None:
    """Return the reason why the weights in `file` do not fit `projector`; None if they fit. Raises UserError."""
    needed = {key: list(tensor.shape) for key, tensor in projector.state_dict().items()}
    stored = _shapes(file)
    if stored.keys() != needed.keys():
        return f"it is of kind {_KINDS.get(frozenset(stored), 'unknown')}"
    wrong = [key for key in needed if needed[key] != stored[key]]
    return f"its {wrong[0]} is {stored[wrong[0]]} and {needed[wrong[0]]} is needed" if wrong else None


def _shapes(file: Path) -> dict[str, list[int]]:
    with open_safetensors(file) as tensors:
        return {key: tensors.get_slice(key).get_shape() for key in tensors.keys()}  # noqa: SIM118
