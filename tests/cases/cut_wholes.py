"""Tiny whole models as units, and their loss by the very stages that are trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cases.tiny_wholes import reference, whole_config
from cases.whole_samples import samples_of, transformers_loss
from dilatant.config.model import LoraConfig
from dilatant.data.sample import EncodedSample
from dilatant.models.adapters.lora import is_adapter
from dilatant.models.core.stage import StepData, stage_tensors
from dilatant.models.families.pretrained import PretrainedModel
from dilatant.models.multimodal import MultimodalModel
from dilatant.models.row_attention import choose_attention

TOLERANCE = 4e-5
"""Relative to the largest number of a gradient, in fp32: other kernels and another order of sums; Gemma 4, whose norms
stand inside norms, takes half of it. A wrong position, mask or row changes gradients by parts of their size."""
LOSS_TOLERANCE = 1e-5


def opened(family: str, weights: Mapping[str, torch.Tensor] | None = None, **options: Any) -> MultimodalModel:
    """The units of a tiny model, with `weights` by transformers' keys."""
    model = MultimodalModel({}, PretrainedModel.of(whole_config(family), "model", **options), seed=0)
    with torch.no_grad():
        for unit in model.units.values():
            tensors = stage_tensors(unit)
            for weight in unit.weights if weights is not None else ():
                key = model.whole.key_of(unit, weight)
                if key in weights:
                    tensors[weight.canonical].copy_(weights[key])
    choose_attention(model)
    return model.train()


def losses_of(model: MultimodalModel, samples: list[EncodedSample], cut: bool) -> torch.Tensor:
    """The loss of all samples in one microbatch, of whole units or of a stage for every layer."""
    data = StepData.of(samples, model.graph.losses, device=next(model.parameters()).device)
    numbers = tuple(range(len(samples)))
    inbound: dict[str, torch.Tensor] = {}
    for name, unit in model.units.items():
        count = len(unit.layers)
        spans = [(at, at + 1) for at in range(count)] if cut else [(0, count)]
        given = dict(inbound)
        for first, end in spans:
            output = unit.stage(first, end).run(data, numbers, given)
            given = {name: output.rows_for(name)}
        if output.rows_for("language") is not None:  # else no sample has any of its media
            inbound[name] = output.rows_for("language")
    return output.losses["language"]


@dataclass(frozen=True)
class Differences:
    """Of packed samples in our units from each alone in transformers, both relative; `weight` has the largest."""

    loss: float
    gradient: float
    weight: str


def differences(family: str, cut: bool, lora: LoraConfig | None = None) -> Differences:
    """With adapters, these alone are compared, against peft's on the plain model."""
    plain = reference(family)
    weights = {key: tensor.clone() for key, tensor in plain.state_dict().items()}
    ours = opened(family, weights, lora=lora)
    if lora is None:
        theirs, wanted = plain, dict(plain.named_parameters())
    else:
        theirs = adapted_alike(plain, ours, lora)
        prefix = "base_model.model."
        wanted = {
            name.removeprefix(prefix).replace(".default", ""): parameter
            for name, parameter in theirs.named_parameters()
            if parameter.requires_grad
        }
    samples = samples_of(ours)
    targets = sum(sample.target_tokens for sample in samples)
    expected = sum(transformers_loss(theirs, family, sample) for sample in samples) / targets
    loss = losses_of(ours, samples, cut)
    expected.backward()
    loss.backward()
    worst, name = 0.0, ""
    seen = set()
    for unit in ours.units.values():
        parameters = dict(unit.named_logical_parameters())
        for weight in unit.weights:
            key = ours.whole.key_of(unit, weight)
            parameter = parameters.get(weight.name)
            if parameter is None or not parameter.requires_grad:
                continue
            seen.add(key)
            own, true = parameter.grad, wanted[key].grad
            if "k_proj.bias" in key or ".k_proj.lora" in key:  # whose true gradient is 0, or nearly
                continue
            if own is None or true is None or not true.any():
                assert own is None or not own.any(), weight.name
                assert true is None or not true.any(), weight.name
                continue
            difference = float((own - true).abs().max() / true.abs().max())
            if key.endswith(
                (".A_log", ".dt_bias")
            ):  # sums that nearly cancel, which the family makes in fp32 whatever the dtype
                assert difference <= 20 * TOLERANCE, weight.name
                continue
            worst, name = max((worst, name), (difference, weight.name))
    left = {key for key, each in wanted.items() if each.grad is not None and each.grad.any()} - seen
    assert not left, f"no unit has what trains in transformers: {left}"
    return Differences(abs(loss.item() / expected.item() - 1), worst, name)


def adapted_alike(plain: Any, ours: MultimodalModel, lora: LoraConfig) -> Any:
    """peft's model on the plain one, with adapters that have begun to change things, and `ours` with the same."""
    import peft

    keys = {
        ours.whole.key_of(unit, weight): (unit, weight)
        for unit in ours.units.values()
        for weight in unit.weights
        if is_adapter(weight.name)
    }
    names = sorted({key.rpartition(".lora_")[0] for key in keys})
    torch.manual_seed(0)
    settings = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.lora_alpha,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        target_modules=names,
        init_lora_weights=False,
    )
    theirs = peft.get_peft_model(plain, settings).train()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "magnitude" in name:
                parameter.mul_(torch.rand(parameter.shape) + 0.5)
    adapters = {
        key.removeprefix("base_model.model.").replace("magnitude_vector", "magnitude_vector.weight"): tensor
        for key, tensor in peft.get_peft_model_state_dict(theirs).items()
    }
    assert adapters.keys() == keys.keys()
    with torch.no_grad():
        for key, (unit, weight) in keys.items():
            stage_tensors(unit)[weight.name].copy_(adapters[key])
    return theirs
