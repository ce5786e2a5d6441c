"""Small models and samples whose pipelines train over Gloo on one machine, for the benchmarks that hold the simulator
against real steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from dilatant.comm.launch import launch_local
from dilatant.config import ClusterConfig, TrainConfig
from dilatant.cost.hardware import Link
from dilatant.cost.model import CostModel
from dilatant.cost.quadratic import Quadratic
from dilatant.data.sample import EncodedSample
from dilatant.models.core.freeze import freeze
from dilatant.models.multimodal import Encoder, MultimodalModel
from dilatant.models.row_attention import use_row_attention
from dilatant.models.sources import parse_config
from dilatant.plan.cluster import Cluster
from dilatant.planning.problem.link_probe import measure_links
from dilatant.planning.problem.planned_hardware import Target, plan_target

VOCABULARY, IMAGE_TOKENS = 512, 64


def small_model(
    hidden: int, layers: int, vision_layers: int = 0, frozen: Sequence[str] = (), on_block_tables: bool = True
) -> MultimodalModel:
    """A Llama-shaped language model, with a SigLIP-shaped encoder where `vision_layers` is not 0, on the meta device.
    `on_block_tables`: a row costs what its samples cost; else it is dense, as transformers' attention is."""
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_attention_heads": 4}
    language = {"model_type": "llama", "vocab_size": VOCABULARY, "num_hidden_layers": layers,
                "num_key_value_heads": 4, "tie_word_embeddings": False, "max_position_embeddings": 4096,
                **sizes}  # fmt: skip
    vision = {"model_type": "siglip_vision_model", "image_size": 128, "patch_size": 16, "vision_use_head": False,
              "num_hidden_layers": vision_layers, **sizes}  # fmt: skip
    encoders = {"vision": Encoder(parse_config(vision, "vision"), "mlp")} if vision_layers else {}
    model = MultimodalModel(encoders, parse_config(language, "language"), device="meta")
    if on_block_tables:
        use_row_attention(model)
    if frozen:
        freeze(model.units, tuple(frozen))
    return model.train()


def small_samples(texts: Sequence[int], images: Sequence[int], seed: int) -> list[EncodedSample]:
    """Random tokens and pixels: so many text tokens and images of each sample."""
    draw = np.random.default_rng(seed)
    samples = []
    for number, (text, count) in enumerate(zip(texts, images, strict=True)):
        ids = np.concatenate([np.full(count * IMAGE_TOKENS, VOCABULARY), draw.integers(3, VOCABULARY, text)])
        ids = ids.astype(np.int64)
        labels = np.where(ids < VOCABULARY, ids, -100)
        labels[0] = -100
        pixels = draw.standard_normal((count, 3, 128, 128)).astype(np.float32)
        samples.append(
            EncodedSample(
                f"s{number}",
                ids,
                labels,
                media={"vision": {"pixel_values": pixels}} if count else {},
                sizes={"language": len(ids)} | ({"vision": count * IMAGE_TOKENS} if count else {}),
            )
        )
    return samples


def unit_tokens(samples: Sequence[EncodedSample], units: Sequence[str]) -> dict[str, np.ndarray]:
    """Tokens of each sample in each unit."""
    return {unit: np.asarray([sample.sizes.get(unit, 0) for sample in samples], dtype=np.float64) for unit in units}


def target_share(samples: Sequence[EncodedSample]) -> float:
    """The part of the language model's tokens that carry loss."""
    targets = sum(int((sample.labels != -100).sum()) for sample in samples)
    return targets / sum(sample.sizes["language"] for sample in samples)


def this_machine(ranks: int) -> tuple[Target, Cluster]:
    """One-thread processes of this machine, joined by the link that two of them measure."""
    links = launch_local(measure_links, 2)[0].inside
    target = replace(plan_target(ClusterConfig(gpus_per_node=ranks), TrainConfig(precision="fp32")), threads=1)
    return target, Cluster(1, ranks, float("inf"), links.link, Link(1e9))


class _Pause(torch.autograd.Function):
    """The identity, whose backward takes so many seconds."""

    @staticmethod
    def forward(context, rows: Tensor, seconds: float) -> Tensor:
        context.seconds = seconds
        return rows.view_as(rows)

    @staticmethod
    def backward(context, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(context.seconds)
        return gradient, None


def pace(model: MultimodalModel, seconds_per_token: float) -> None:
    """Blocks sleep: so long a token in the forward, as long again for each gradient, of the input and of the weights,
    that their backward makes. A sleeping rank needs no core, so that many ranks run on few."""

    def after(block: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        rows = output[0] if isinstance(output, tuple) else output
        seconds = seconds_per_token * (rows.numel() // rows.shape[-1])
        time.sleep(seconds)
        trains = any(weight.requires_grad for weight in block.parameters())
        sent_on = any(isinstance(one, Tensor) and one.requires_grad for one in inputs)
        paused = _Pause.apply(rows, seconds * (trains + sent_on)) if rows.requires_grad else rows
        return (paused, *output[1:]) if isinstance(output, tuple) else paused

    for unit in model.units.values():
        for block in unit.blocks:
            block.register_forward_hook(after)


def paced(costs: CostModel, blocks: Sequence[str], seconds_per_token: float) -> CostModel:
    """The costs with what `pace` adds to the layer types `blocks`."""
    more = Quadratic(0.0, seconds_per_token, 0.0)

    def slower(cost):
        return replace(
            cost,
            forward=cost.forward + more,
            input_gradient=cost.input_gradient + more,
            weight_gradient=cost.weight_gradient + more,
            first_trainable=cost.first_trainable + more,
            recompute=cost.recompute + more,
        )

    return replace(
        costs,
        layers={
            kind: {degree: slower(cost) if kind in blocks else cost for degree, cost in own.items()}
            for kind, own in costs.layers.items()
        },
    )
