"""AdamW's moments that a checkpoint of torch (DCP) holds beside the weights from which a run starts.

Their keys are those of `torch.distributed.checkpoint.state_dict`: `optimizer.state.<parameter>.exp_avg` of torchtitan,
`optim.state.<parameter>.exp_avg` of users of FSDP, with `exp_avg_sq` and `step`. A parameter's name is matched with a
weight of the model as the key of a stored weight is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from dilatant.config import Config
from dilatant.config.errors import UserError
from dilatant.hf.dcp_files import OPTIMIZER_STATE, is_dcp
from dilatant.hf.stored_weights import Layout, open_tensors, pretrained_files, sources_of
from dilatant.models.multimodal import MultimodalModel
from dilatant.plan.boxes import Box

KINDS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True, slots=True)
class StoredMoments:
    """Moments in files. files: stored key → file. keys: kind of moment → name of a weight → stored key, with the same
    names for each kind. remarks: what is read and what is not, for the user."""

    files: Mapping[str, Path]
    keys: Mapping[str, Mapping[str, str]]
    remarks: tuple[str, ...]

    def read(self, boxes: Mapping[str, Box]) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield each kind with the boxes of its tensors by key, those that are stored. Raises UserError."""
        for kind, names in self.keys.items():
            layout = Layout(self.files, {key: names[box.name] for key, box in boxes.items() if box.name in names})
            found = layout.read(boxes)
            for key, tensor in found.items():
                what = ""
                if kind != "step" and not tensor.is_floating_point():
                    what = f"numbers of {tensor.dtype}"
                elif kind != "exp_avg" and bool((tensor < 0).any()):
                    what = "negative numbers"
                elif not bool(tensor.float().isfinite().all()):
                    what = "numbers beyond the range of fp32"
                if what:
                    stored = layout.keys[key]
                    raise UserError(f"{str(self.files[stored])!r} is damaged: {stored!r} has {what}")
            yield kind, found


def find_moments(model: MultimodalModel, config: Config) -> StoredMoments:
    """Find the moments of the weights that AdamW trains, in all checkpoints of torch from which the run starts. Raises
    UserError for a moment whose shape is not its weight's."""
    files: dict[str, Path] = {}
    keys: dict[str, dict[str, str]] = {kind: {} for kind in KINDS}
    remarks: list[str] = []
    units = model.units.values()
    shapes = {name: tuple(weight.shape) for unit in units for name, weight in unit.named_logical_parameters()}
    trained = {name for unit in units for name in unit.trained_names}
    by_adamw = trained.difference(*(unit.orthogonal for unit in units))
    sources = sources_of(model, config.model) if config.train.optimizer.stored_moments else {}
    for where, (unit_name, source) in sources.items():
        of_source = (pretrained_files(source) or {}) if source is not None and is_dcp(source) else {}
        state: dict[str, dict[str, str]] = defaultdict(dict)
        for key in of_source:
            if (match := OPTIMIZER_STATE.fullmatch(key)) is not None:
                state[match[2]][match[1]] = key
        of_kind = {kind: _keys_of_weights(model, unit_name, state[kind], of_source) for kind in KINDS if kind in state}
        names = by_adamw.intersection(*of_kind.values())
        if (why := _unread(config, state, names)) is not None:
            remarks.append(f"{where}: the optimizer's state in {source!r} is not read: {why}")
        elif state:
            _require_shapes(of_source, of_kind, {name: shapes[name] for name in names})
            files |= of_source
            for kind, found in of_kind.items():
                keys[kind] |= {name: found[name] for name in names}
            unused = f", without their {', '.join(others)}" if (others := sorted(state.keys() - {*KINDS})) else ""
            remarks.append(
                f"{where}: the run begins with AdamW's moments of {len(names)} weights in {source!r}{unused}, and its "
                "schedule at the first step; 'train.optimizer.stored_moments: false' leaves the moments out"
            )
    if files and (left := sorted(trained - keys["step"].keys())):
        remarks.append(f"{len(left)} weights that the run trains begin without moments, such as {left[0]!r}")
    return StoredMoments(files, keys, tuple(remarks))


def _keys_of_weights(
    model: MultimodalModel, unit_name: str, stored: Mapping[str, str], files: Mapping[str, Path]
) -> dict[str, str]:
    """Map names of weights to stored keys, tied ones by their first name. stored: parameter → stored key."""
    of_parameters = {parameter: files[key] for parameter, key in stored.items()}
    units = [model.units[unit_name]] if model.whole is None else [*model.units.values()]
    tied = {name: first for unit in units for name, first in unit.tied.items()}
    if model.whole is None:
        layout = Layout.of_unit(units[0], "model", of_parameters)
    else:
        layout = Layout.of_vlm(model, of_parameters)
    return {tied.get(name, name): stored[parameter] for name, parameter in layout.keys.items()}


def _unread(config: Config, state: Mapping[str, Mapping[str, str]], names: Set[str]) -> str | None:
    """Return why a stored state is of no use, None if it is read, or if there is none."""
    if not state:
        return None
    if config.train.optimizer.own is not None or "optimizer" in config.python:
        return "the run has an optimizer of your own"
    if not state.keys() >= {*KINDS}:
        return f"it has {', '.join(sorted(state))}, and that of AdamW {', '.join(KINDS)}, as tensors"
    if not names:
        first = min(state["step"].values())
        return f"it has no weight that AdamW trains here, and names as {first!r}; names are those of the parameters"
    return None


def _require_shapes(
    files: Mapping[str, Path], of_kind: Mapping[str, Mapping[str, str]], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise UserError for a moment that has another shape than its weight, and for a count of steps that is no single
    number. of_kind: kind of moment → name of a weight → stored key."""
    of_keys = {
        keys[name]: () if kind == "step" else shape for kind, keys in of_kind.items() for name, shape in shapes.items()
    }
    for file in {files[key] for key in of_keys}:
        with open_tensors(file) as tensors:  # reads the metadata of all tensors
            found = {key: tuple(tensors.get_slice(key).get_shape()) for key in of_keys if files[key] == file}
        for key, shape in found.items():
            if shape != of_keys[key]:
                raise UserError(
                    f"{str(file)!r}: {key!r} is {list(shape)}, where its weight needs {list(of_keys[key])}; set "
                    "train.optimizer.stored_moments: false to begin without moments"
                )
