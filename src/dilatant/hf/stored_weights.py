"""Weights from safetensors files, or from checkpoints of torch (DCP): a rank opens the files of its units and reads its
own tensors, nothing else.

Checkpoints that transformers converts while it loads them (renamed or merged weights) cannot be read by name.
Transformers reads their units whole, and what this rank does not hold is dropped.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils.hub import cached_file

from dilatant.config import Config, ModelConfig
from dilatant.config.errors import UserError
from dilatant.config.model import EncoderConfig
from dilatant.hf.adapter_files import ADAPTER_FILE, adapted_models, adapter_keys
from dilatant.hf.dcp_files import METADATA, OPTIMIZER_STATE, DcpTensors, is_dcp
from dilatant.models.adapters.lora import MAGNITUDE, adapted_key, is_adapter, magnitude_of, plain_key, tied_keys
from dilatant.models.core.materialize import seeded
from dilatant.models.core.unit import Unit
from dilatant.models.core.weight_files import INDEX, SINGLE, open_safetensors, read_index, require_finite, unlike_tie
from dilatant.models.encoders.projector import misfit, stored_projector
from dilatant.models.experts.expert_lora import from_peft, is_of_experts
from dilatant.models.families.pretrained import load_pretrained_weights, stored_keys
from dilatant.models.generators.denoiser_source import source_of_entry
from dilatant.models.generators.denoisers import pretrained_weights
from dilatant.models.multimodal import MultimodalModel
from dilatant.models.sources import load_encoder, load_language_model
from dilatant.plan.boxes import Box
from dilatant.runtime.state.holders import slice_of

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_WEIGHTS = (".safetensors", ".bin", ".distcp")
"""Suffixes of files with weights; adapters have them, too."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Weights in files. files: stored key → file. keys: name of a weight → its stored key, for the weights that the
    files hold by name."""

    files: Mapping[str, Path]
    keys: Mapping[str, str]

    @classmethod
    def of_unit(cls, unit: Unit, part: str, files: Mapping[str, Path]) -> Layout:
        """Find the weights of one module of a unit. Stored keys may have a prefix that the unit's keys lack, or the
        reverse, as in the files of a larger model."""
        key_of = {weight.name: plain_key(weight.key) for weight in unit.weights if weight.part == part}
        stored = _by_model_key(key_of.values(), files)
        return cls(files, {name: stored[key] for name, key in key_of.items() if key in stored})

    @classmethod
    def of_vlm(cls, model: MultimodalModel, files: Mapping[str, Path]) -> Layout:
        """Find the weights of a pretrained VLM, without generators."""
        whole = model.whole
        assert whole is not None
        stored = stored_keys(whole.composite(), files) if files else {}
        pairs = ((weight.name, whole.key_of(unit, weight)) for unit, weight in model.weights_of_whole())
        return cls(files, {name: stored[key] for name, key in pairs if key in stored})

    def tensors(self, names: Iterable[str], held: Mapping[str, Box] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Read weights by name, those that are stored, file by file; only their boxes in `held`, if given. Raises
        UserError."""
        for file, of_file in self._by_file(names).items():
            with open_tensors(file) as tensors:
                for name in of_file:
                    yield name, _read(tensors, self.keys[name], None if held is None else held[name])

    def read(self, held: Mapping[str, Box]) -> dict[str, Tensor]:
        """Read the boxes of all stored weights in `held`. Raises UserError, also for a quantized one, whose scales are
        apart, and for one with NaN or infinity."""
        found = dict(self.tensors(held, held))
        for name, tensor in found.items():
            key = self.keys[name]
            if tensor.dtype.itemsize == 1 and tensor.dtype != torch.bool:
                raise UserError(
                    f"{str(self.files[key])!r}: {key!r} is quantized ({tensor.dtype}); name the model with its weights "
                    "in bf16 or fp32"
                )
            require_finite([(key, tensor)], repr(str(self.files[key])))
        return found

    def dtypes(self) -> dict[str, torch.dtype]:
        """Return the floating dtype of each stored weight."""
        found: dict[str, torch.dtype] = {}
        for file, names in self._by_file(self.keys).items():
            with open_tensors(file) as tensors:
                kinds = {name: tensors.get_slice(self.keys[name]).get_dtype() for name in names}
            found |= {name: _DTYPES[kind] for name, kind in kinds.items() if kind in _DTYPES}
        return found

    def _by_file(self, names: Iterable[str]) -> dict[Path, list[str]]:
        by_file: dict[Path, list[str]] = defaultdict(list)
        for name in names:
            if name in self.keys:
                by_file[self.files[self.keys[name]]].append(name)
        return by_file

    def check_ties(self, tied: Mapping[str, str], held: Mapping[str, Box], source: str | None = None) -> None:
        """Raise UserError if the files hold two different tensors for one weight. tied: further name → first name.
        source: named in the error; by default the files' folder."""
        for name, first in tied.items():
            key, other = self.keys.get(name), self.keys.get(first)
            if key is None or other is None or key == other or first not in held:
                continue
            with open_tensors(self.files[key]) as one, open_tensors(self.files[other]) as two:
                if not torch.equal(_read(one, key, held[first]).float(), _read(two, other, held[first]).float()):
                    raise unlike_tie(repr(str(source or self.files[key].parent)), key, other)


def first_weights(model: MultimodalModel, config: Config, held: Mapping[str, Box], zeros: bool) -> dict[str, Tensor]:
    """Return the initial values of the boxes that a rank holds: pretrained, or `zeros` to be filled in. Raises
    UserError."""
    if not zeros:
        return read_pretrained(model, config.model, held, config.seed) if held else {}
    four_bit = {name for unit in model.units.values() for name in unit.four_bit}  # not part of the state
    weights = {name: torch.zeros(box.shape) for name, box in held.items() if name not in four_bit}
    read = {name: box for name, box in held.items() if name in four_bit}
    return weights | (read_pretrained(model, config.model, read, config.seed) if read else {})


def read_pretrained(
    model: MultimodalModel, config: ModelConfig, held: Mapping[str, Box], seed: int
) -> dict[str, Tensor]:
    """Read the boxes in `held` (logical name → box) of weights that come from the config's pretrained ids; others are
    left out.

    Pass the result to `Runtime(weights=...)`, for a model whose units are all on the meta device. Raises UserError.
    """
    requested, held = held, _with_whole_rows(held)
    if config.is_whole:
        whole = {} if config.id is None else read_pretrained_vlm(model, config.id, held)
        own = _with_magnitudes(whole, requested)
        return own | _read_generators(model, config, held) | read_adapters(model, config, held)
    sources = {name: (entry.id, entry.trust_remote_code) for name, entry in config.encoders.items()}
    language = model.graph.anchor
    sources[language] = (config.text.id, config.text.trust_remote_code)
    weights: dict[str, Tensor] = {}
    for name, (source, own_code) in sources.items():
        unit = model.units[name]
        if name in config.encoders:
            weights |= _read_projector(unit, name, config.encoders[name], held)
        wanted = {
            weight.name: held[weight.name]
            for weight in unit.weights
            if weight.part == "model" and weight.name in held and not is_adapter(weight.name)
        }
        if source is None or own_code or not wanted:
            continue
        files = pretrained_files(source)
        found = read_unit(unit, "model", wanted, files) if files is not None else {}
        if found.keys() != wanted.keys():
            load = load_language_model if name == language else load_encoder
            with seeded(seed, name):
                whole = load(source, f"model {name!r}", dtype=torch.float32).state_dict()
            found = {
                w.name: slice_of(whole[plain_key(w.key)], wanted[w.name])
                for w in unit.weights
                if w.part == "model" and w.name in wanted
            }
        weights |= found
    weights = _with_magnitudes(weights, requested)
    return weights | _read_generators(model, config, held) | read_adapters(model, config, held)


def sources_of(model: MultimodalModel, config: ModelConfig) -> dict[str, tuple[str, str | None]]:
    """Return the sources of weights that transformers knows: the config's key → unit, and id or folder, if any."""
    sources = {f"model.encoders.{name}": (name, entry.id) for name, entry in config.encoders.items()}
    place = "model.id" if config.is_whole else "model.language_model"
    return sources | {place: (model.graph.anchor, config.text.id)}


def check_sources(model: MultimodalModel, config: ModelConfig) -> None:
    """Check that folders among the sources of a model hold weights. Of checkpoints of torch (DCP), warn of tensors that
    are not read, and raise UserError for weights that one lacks; transformers, which begins some at random, does not
    read this format."""
    for where, (name, source) in sources_of(model, config).items():
        if source is None:
            continue
        folder = Path(source)
        if folder.is_dir() and not any(file.suffix in _WEIGHTS for file in folder.iterdir()):
            raise UserError(
                f"{where}: {source!r} holds no weights ({', '.join(_WEIGHTS)}); fetch the model again, or give its "
                "'config' to begin with random ones"
            )
        if not is_dcp(source):
            continue
        files = pretrained_files(source) or {}
        if model.whole is not None:
            composite = model.whole.composite()
            wanted, found = {key: key for key in composite.state_dict()}, stored_keys(composite, files)
            tied = tied_keys(composite)
        else:
            unit = model.units[name]
            found, tied = dict(Layout.of_unit(unit, "model", files).keys), unit.tied
            own = [weight for weight in unit.weights if weight.part == "model" and not is_adapter(weight.name)]
            wanted = {weight.name: plain_key(weight.key) for weight in own}
        lacking = [wanted[name] for name in wanted if name not in found and name not in tied]
        others = sorted(key for key in files.keys() - found.values() if not OPTIMIZER_STATE.fullmatch(key))
        if lacking:
            raise UserError(
                f"{where}: {source!r} lacks {len(lacking)} weights of its model, such as {lacking[0]!r}, and holds "
                f"{others[:1]}; a checkpoint of torch needs the keys of the Hugging Face model's state_dict()"
            )
        if others:
            warnings.warn(
                f"{where}: {source!r} holds {len(others)} tensors that are not read, such as {others[0]!r}",
                stacklevel=2,
            )


def stored_dtypes(model: MultimodalModel, config: ModelConfig) -> dict[str, torch.dtype]:
    """Return logical name → floating dtype of the weights that the files of pretrained ids hold by name. The dtype may
    differ from weight to weight (fp32 norms in a bf16 model)."""
    if config.is_whole:
        files = pretrained_files(config.id) if config.id is not None else None
        layouts = [Layout.of_vlm(model, files or {})]
    else:
        sources = {name: entry.id for name, entry in config.encoders.items()}
        sources[model.graph.anchor] = config.text.id
        layouts = [
            Layout.of_unit(model.units[name], "model", (pretrained_files(source) or {}) if source else {})
            for name, source in sources.items()
        ]
    first = {name: first for unit in model.units.values() for name, first in unit.tied.items()}
    return {first.get(name, name): dtype for each in layouts for name, dtype in each.dtypes().items()}


def _read_projector(unit: Unit, name: str, entry: EncoderConfig, held: Mapping[str, Box]) -> dict[str, Tensor]:
    file = stored_projector(name, entry)
    if file is None or misfit(file, unit.get_submodule("projector")) is not None:  # a misfit was reported
        return {}
    return read_unit(unit, "projector", held, _keys(file))


def _with_whole_rows(held: Mapping[str, Box]) -> dict[str, Box]:
    """Return `held` with all columns of the weights that DoRA magnitudes are computed from."""
    names = [adapted_key(name) for name in held if MAGNITUDE in name]
    wider = {
        name: Box(name, box.whole, (box.intervals[0], *Box.of(name, box.whole).intervals[1:]))
        for name in names
        if (box := held.get(name)) is not None
    }
    return {**held, **wider}


def _with_magnitudes(weights: dict[str, Tensor], held: Mapping[str, Box]) -> dict[str, Tensor]:
    """Return `weights`, those read with all columns cut to their boxes in `held`, with initial DoRA magnitudes."""
    found: dict[str, Tensor] = {}
    for name in [name for name in held if MAGNITUDE in name and adapted_key(name) in weights]:
        whole, box = weights[adapted_key(name)], held[adapted_key(name)]
        found[name] = magnitude_of(whole)
        columns = Box("columns", tuple(whole.shape), (Box.of("", whole.shape).intervals[0], box.intervals[1]))
        found[adapted_key(name)] = slice_of(whole, columns)
    return weights | found


def _read_generators(model: MultimodalModel, config: ModelConfig, held: Mapping[str, Box]) -> dict[str, Tensor]:
    """Read the generators' weights in `held`; diffusers reads a net whole, whatever part of it is held here."""
    weights: dict[str, Tensor] = {}
    for name, entry in config.generators.items():
        where = f"model.generators.{name}"
        of_model = [weight for weight in model.units[name].weights if weight.part == "model"]
        wanted = [weight for weight in of_model if weight.name in held]
        source = source_of_entry(entry, where)
        if wanted and source.has_weights:
            stored = pretrained_weights(source, where)
            weights |= {w.name: slice_of(stored[w.key], held[w.name]) for w in wanted if w.key in stored}
    return weights


def read_pretrained_vlm(model: MultimodalModel, source: str, held: Mapping[str, Box]) -> dict[str, Tensor]:
    """Read the boxes in `held` of a pretrained VLM's own weights from a folder or id. Raises UserError."""
    whole = model.whole
    assert whole is not None
    key_of = {
        weight.name: whole.key_of(unit, weight)
        for unit, weight in model.weights_of_whole()
        if weight.name in held and not is_adapter(weight.name)
    }
    wanted = {name: held[name] for name in key_of}
    layout = Layout.of_vlm(model, pretrained_files(source) or {})
    tied = {name: first for unit in model.units.values() for name, first in unit.tied.items()}
    layout.check_ties(tied, wanted, source)
    weights = layout.read(wanted)
    if len(weights) < len(wanted):
        everything = load_pretrained_weights(whole, source)
        weights |= {n: slice_of(everything[key], held[n]) for n, key in key_of.items() if n not in weights}
    return weights


def read_adapters(model: MultimodalModel, config: ModelConfig, held: Mapping[str, Box]) -> dict[str, Tensor]:
    """Read the boxes in `held` of the weights in `model.lora.adapter`. Raises UserError for another model's adapter."""
    weights: dict[str, Tensor] = {}
    lora = config.lora
    if lora is None or lora.adapter is None:
        return weights
    all_adapted = list(adapted_models(model, config))
    for adapted in all_adapted:
        folder = Path(lora.adapter) / adapted.folder
        if len(all_adapted) == 1 and not folder.exists():  # written by peft, which knows no units
            folder = Path(lora.adapter)
        files = _keys(folder / ADAPTER_FILE)
        layout = Layout(files, adapter_keys(adapted, files, lora, folder))
        of_experts = [name for name in layout.keys if is_of_experts(name) and name in held]
        weights |= layout.read({name: box for name, box in held.items() if name not in of_experts})
        for name, tensor in layout.tensors(of_experts):
            weights[name] = slice_of(from_peft(name, tensor, held[name].whole[0]), held[name])
    return weights


def pretrained_files(source: str) -> Mapping[str, Path] | None:
    """Return stored key → file of a pretrained folder or id, downloaded when accessed; None without safetensors and
    without a checkpoint of torch. Raises UserError."""
    if Path(source).is_dir():
        folder = Path(source)
        if is_dcp(folder):
            return _keys(folder / METADATA)
        return tensor_files(folder) if any(folder.glob("*.safetensors")) else None
    options: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False}
    index = cached_file(source, INDEX, **options)
    if index is not None:
        return _LazyShards(source, read_index(Path(index)))
    single = cached_file(source, SINGLE, **options)
    return None if single is None else _keys(Path(single))


class _LazyShards(Mapping[str, Path]):
    """Stored key → its shard, which is downloaded (or found in the cache) on first access."""

    def __init__(self, source: str, shards: Mapping[str, str]) -> None:
        self._source = source
        self._shards = shards

    def __getitem__(self, key: str) -> Path:
        return Path(str(cached_file(self._source, self._shards[key])))

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)


def read_unit(unit: Unit, part: str, held: Mapping[str, Box], files: Mapping[str, Path]) -> dict[str, Tensor]:
    """Read the weights in `held` that belong to one module of a unit and are stored. Raises UserError."""
    layout = Layout.of_unit(unit, part, files)
    layout.check_ties(unit.tied, held)
    return layout.read(held)


def tensor_files(folder: Path) -> dict[str, Path]:
    """Return stored key → file of a model in the Hugging Face layout, in one file or sharded. Raises UserError."""
    index = folder / INDEX
    if index.is_file():
        return {key: folder / file for key, file in read_index(index).items()}
    return _keys(folder / SINGLE)


def _keys(file: Path) -> dict[str, Path]:
    with open_tensors(file) as tensors:
        return dict.fromkeys(tensors.keys(), file)


def _read(tensors: Any, stored: str, box: Box | None) -> Tensor:
    """Read a stored tensor, or just the box if the stored tensor has the weight's full shape."""
    view = tensors.get_slice(stored)
    # Other shapes are refused when they are used.
    if box is None or box.is_whole or tuple(view.get_shape()) != box.whole:
        return tensors.get_tensor(stored)
    whole = Box.of(box.name, box.whole)
    reads = {cell: view[whole.place(cell)] for cell in box.cells()}
    part = next(iter(reads.values())).new_empty(box.shape)
    for cell, read in reads.items():
        part[box.place(cell)] = read
    return part


def open_tensors(file: Path) -> AbstractContextManager[Any]:
    """Open a safetensors file, or a checkpoint of torch by its metadata. Raises UserError."""
    is_metadata = file.name == METADATA and file.is_file()
    return nullcontext(DcpTensors(file)) if is_metadata else open_safetensors(file)


def _by_model_key(keys: Iterable[str], stored: Iterable[str]) -> dict[str, str]:
    """Return model key → stored key: the same, or the only stored key that ends with it or that it ends with."""
    stored = list(stored)
    by_last: dict[str, list[str]] = defaultdict(list)
    for key in stored:
        by_last[key.rsplit(".", 1)[-1]].append(key)
    same, matched = set(stored), {}
    for key in keys:
        others = by_last[key.rsplit(".", 1)[-1]]
        near = (
            [key]
            if key in same
            else [other for other in others if other.endswith("." + key) or key.endswith("." + other)]
        )
        if len(near) == 1:
            matched[key] = near[0]
    return matched
