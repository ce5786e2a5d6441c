"""Checkpoints of torch (DCP) as users of FSDP write them, and models that start from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from transformers import AutoModelForCausalLM

from cases.engine_case import TEXT
from dilatant.config import ModelConfig
from dilatant.data.text.tokenizer import load_tokenizer
from dilatant.models.build import build_model
from dilatant.models.multimodal import MultimodalModel
from dilatant.models.sources import parse_config
from dilatant.plan.boxes import Box


class Halves(DefaultSavePlanner):
    """Saves every tensor in two parts, as two ranks of FSDP do."""

    def create_local_plan(self) -> SavePlan:
        plan, items = super().create_local_plan(), []
        for item in plan.items:
            size = item.tensor_data.size if item.type == WriteItemType.TENSOR else ()
            if not size or size[0] < 2:
                items.append(item)
                continue
            half = size[0] // 2
            for first, rows in ((0, half), (half, size[0] - half)):
                begin = torch.Size([first, *[0] * (len(size) - 1)])
                chunk = ChunkStorageMetadata(begin, torch.Size([rows, *size[1:]]))
                data = replace(item.tensor_data, chunk=chunk)
                place = MetadataIndex(item.index.fqn, begin)
                items.append(WriteItem(place, WriteItemType.SHARD, tensor_data=data))
        self.plan = replace(plan, items=items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.type != WriteItemType.SHARD:
            return super().resolve_data(write_item)
        chunk = write_item.tensor_data.chunk
        tensor = self.state_dict[write_item.index.fqn].detach()
        return tensor[chunk.offsets[0] : chunk.offsets[0] + chunk.sizes[0]]


def save(folder: Path, state: dict[str, Any], **options: Any) -> None:
    writer = checkpoint.FileSystemWriter(folder, **options)
    checkpoint.save(state, storage_writer=writer, planner=Halves(), no_dist=True)


def language(folder: Path) -> Any:
    """A language model as a user of FSDP has it: with config and tokenizer, and no weights yet."""
    torch.manual_seed(2)
    config = parse_config({"model_type": "llama", **TEXT, "vocab_size": 300, "num_hidden_layers": 2}, "language")
    model = AutoModelForCausalLM.from_config(config)
    model.config.save_pretrained(folder)
    load_tokenizer("bytes").save_pretrained(str(folder))
    return model


def source(folder: Path, whole: bool = False) -> tuple[MultimodalModel, ModelConfig, dict[str, Box]]:
    tree = {"id": str(folder)} if whole else {"language_model": {"id": str(folder)}}
    config = ModelConfig.model_validate(tree)
    model = build_model(config, hollow=config.units, tokenizer=load_tokenizer(str(folder)))
    weights = {name: w for unit in model.units.values() for name, w in unit.named_logical_parameters()}
    return model, config, {name: Box.of(name, tuple(weight.shape)) for name, weight in weights.items()}
