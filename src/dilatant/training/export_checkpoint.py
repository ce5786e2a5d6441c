"""Export the weights of a checkpoint as Hugging Face files."""

from __future__ import annotations

from pathlib import Path

import torch

from dilatant.config import Config
from dilatant.data.text.encoding import Encoding
from dilatant.hf.export import export_model
from dilatant.hf.stored_weights import read_pretrained, stored_dtypes
from dilatant.models.adapters.lora import is_adapter
from dilatant.models.build import source_dtypes
from dilatant.models.core.dtype import cast_weights
from dilatant.models.core.materialize import allocate
from dilatant.models.multimodal import MultimodalModel
from dilatant.plan.boxes import Box
from dilatant.training.checkpoints.checkpoint import load, stored_shapes
from dilatant.training.checkpoints.files import read_manifest
from dilatant.training.model_card import model_card
from dilatant.training.optimizers.master_weights import AVERAGE


def export_checkpoint(
    checkpoint: Path,
    model: MultimodalModel,
    config: Config,
    encoding: Encoding,
    folder: Path,
    run: Path,
    dcp: bool = False,
    licence: str | None = None,
) -> None:
    """Load `checkpoint` into `model` and export it in the dtypes of its source files, with a model card. See
    `export_model` and `model_card`."""
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
    export_model(model, encoding, folder, run, config.model.id, config.model, dcp, card)
