"""Export the weights of a checkpoint as Hugging Face files, with a model card."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path
from typing import Literal

import torch

from dilatant.config import Config, UserError
from dilatant.config.files.own_files import read_text
from dilatant.config.printable import printable
from dilatant.data.text.encoding import Encoding
from dilatant.hf.dcp_export import Moments
from dilatant.hf.export import export_model
from dilatant.hf.stored_moments import KINDS
from dilatant.hf.stored_weights import read_pretrained, stored_dtypes
from dilatant.models.adapters.lora import is_adapter
from dilatant.models.build import source_dtypes
from dilatant.models.core.dtype import cast_weights
from dilatant.models.core.materialize import allocate
from dilatant.models.multimodal import MultimodalModel
from dilatant.plan.boxes import Box
from dilatant.planning.layout import TrainingPlan
from dilatant.report.text.search_reasons import layout_text
from dilatant.training.checkpoints.checkpoint import load, stored_shapes
from dilatant.training.checkpoints.files import read_manifest
from dilatant.training.optimizers.master_weights import AVERAGE


def model_card(config: Config, run: Path, step: int, licence: str | None = None) -> str:
    """Return the card of a run's export, with metadata for the hub. Local data and models appear by the last part of
    their paths. licence: an identifier of the hub."""
    from huggingface_hub import ModelCardData

    model, train = config.model, config.train
    sources = dict.fromkeys([model.text.id, *(entry.id for entry in model.encoders.values())])
    names = [source for source in sources if source is not None]
    ids = [name for name in names if not Path(name).exists()]
    data = {entry.id or Path(str(entry.path)).name: entry.weight for entry in config.data.train}
    trained = f"all weights but {', '.join(model.freeze)}" if model.freeze else "all weights"
    if model.lora is not None:
        trained = f"LoRA of rank {model.lora.r} on {', '.join(model.lora.units)}"
    try:
        plan = layout_text(TrainingPlan.from_json(read_text(run / "plan.json")).plan)
    except (OSError, ValueError, UserError):
        plan = "not stored"
    versions = (f"{name} {_version(name)}" for name in ("dilatant", "torch", "transformers"))
    own = train.optimizer.own or ("given in Python" if "optimizer" in config.python else None)
    peak = f"{train.optimizer.learning_rate:g} at its peak" if own is None else f"as set by its optimizer ({own})"
    rows = {
        "from": ", ".join(name if name in ids else Path(name).name for name in names) or "random weights",
        "data": ", ".join(f"{name} (weight {weight:g})" for name, weight in data.items()) or "given in Python",
        "steps": f"{step:,} of {train.global_batch_size:,} samples each",
        "trained": trained,
        "learning rate": f"{peak}, {'given in Python' if 'schedule' in config.python else train.schedule.kind}",
        "plan": plan,
        "versions": ", ".join([*versions, f"Python {platform.python_version()}"]),
        "licence": licence or "not stated; that of the model it comes from holds for its weights",
    }
    card = ModelCardData(
        base_model=ids or None,
        datasets=[entry.id for entry in config.data.train if entry.id is not None] or None,
        library_name="transformers" if model.is_whole else None,
        license=licence,
        tags=["dilatant"],
    )
    cells = {name: " ".join(printable(text).replace("|", "/").split()) for name, text in rows.items()}
    lines = ["---", card.to_yaml(), "---", "", f"# {printable(run.resolve().name)}", "", "| | |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {text} |" for name, text in cells.items()), ""])


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"  # a source tree on PYTHONPATH


def export_checkpoint(
    checkpoint: Path,
    model: MultimodalModel,
    config: Config,
    encoding: Encoding,
    folder: Path,
    run: Path,
    form: Literal["hf", "dcp", "dcp-moments"] = "hf",
    licence: str | None = None,
) -> None:
    """Load `checkpoint` into `model` and export it in the dtypes of its source files, with a model card. See
    `export_model` and `model_card`. form: the weights as safetensors, as a checkpoint of torch, or as one with AdamW's
    moments."""
    if form == "dcp-moments":
        _require_moments(config)
    dtypes = source_dtypes(config.model)
    of_source = stored_dtypes(model, config.model)
    for name, unit in model.units.items():
        cast_weights(unit, dtypes[name])
        for own, parameter in unit.named_logical_parameters():
            kind = torch.float32 if is_adapter(own) else of_source.get(own, parameter.dtype)
            parameter.data = parameter.data.to(kind)
    weights = allocate(model.units, config.seed)
    plain = {name for unit in model.units.values() for name in unit.four_bit}
    load(checkpoint, {"model": {k: w for k, w in weights.items() if k not in plain}}, known=set(weights))
    boxes = {name: Box.of(name, tuple(weights[name].shape)) for name in plain}
    for name, tensor in (read_pretrained(model, config.model, boxes, config.seed) if plain else {}).items():
        weights[name].copy_(tensor)
    for unit in model.units.values():
        frozen = [name for name in unit.frozen - plain if of_source.get(name) == torch.float32]
        finer = {name: Box.of(name, tuple(weights[name].shape)) for name in frozen}
        read = read_pretrained(model, config.model, finer, config.seed) if finer else {}
        for name, tensor in read.items():
            if torch.equal(weights[name], tensor.bfloat16().float()):  # rounded by a bf16 run
                weights[name].copy_(tensor)
    stored = stored_shapes(checkpoint, "optimizer") if config.train.optimizer.ema is not None else {}
    averages = {name: {AVERAGE: tensor} for name, tensor in weights.items() if f"{name}.{AVERAGE}" in stored}
    if averages:
        load(checkpoint, {"model": {}, "optimizer": averages}, known=set(weights))
    card = model_card(config, run, read_manifest(checkpoint).step, licence)
    moments = _moments(checkpoint, config, set(weights)) if form == "dcp-moments" else None
    export_model(model, encoding, folder, run, config.model.id, config.model, form != "hf", card, moments)


def _require_moments(config: Config) -> None:
    optimizer = config.train.optimizer
    for is_wrong, why in (
        (optimizer.own is not None or "optimizer" in config.python, "the run has an optimizer of your own"),
        (optimizer.muon is not None, "Muon has other moments than AdamW"),
        (optimizer.ema is not None, "the export holds averages of the weights ('train.optimizer.ema')"),
        (config.model.lora is not None, "the run trained adapters, which are merged"),
    ):
        if is_wrong:
            raise UserError(f"--format dcp-moments: {why}; use --format dcp")


def _moments(checkpoint: Path, config: Config, weights: set[str]) -> Moments:
    shapes = stored_shapes(checkpoint, "optimizer")
    found = {
        name: {kind: torch.zeros(shapes[f"{name}.{kind}"]) for kind in KINDS}
        for name in weights
        if f"{name}.{KINDS[0]}" in shapes
    }
    load(checkpoint, {"model": {}, "optimizer": found}, known=weights)
    return Moments(found, config.train.optimizer)
