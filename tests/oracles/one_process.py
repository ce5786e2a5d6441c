"""The step of one process, written as plainly as possible: samples one by one through the Hugging Face models.

Shares no code with the runtime, nor with the stages, merging and loss of the model room.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter, load_balancing_loss_func
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextTopKRouter

ROUTERS = (MixtralTopKRouter, Qwen2MoeTopKRouter, Qwen3MoeTopKRouter, Qwen3NextTopKRouter)


def losses_of_batch(
    language_model: Any,
    encoders: Mapping[str, tuple[Any, Any, int]],
    placeholder_ids: Mapping[str, int],
    samples: Sequence[Any],
    seen_in: Callable[[Any], Any] | None = None,
    generators: Mapping[str, tuple[Any, Any, int, int]] | None = None,
    begin: Callable[[int], Any] = lambda number: None,
    queries: Mapping[int, Tensor] | None = None,
    loss: str = "",
) -> dict[str, Tensor]:
    """The global batch's losses: "language", the sum over all target tokens divided by their number, for every
    generator the sum over all its items divided by their number, and "language.router" where experts are chosen: each
    sample's in each block as transformers has it, weighted with the sample's tokens.

    encoders: name → (Hugging Face encoder, projector, leading tokens to leave out). samples: each with `input_ids`,
    `labels` (not shifted) and `media` (name → input name → array with one row an item). seen_in: sample → which token
    sees which, bool [tokens, tokens]; default: those before it. generators: name → (connector, module, token at whose
    places it takes hidden states, places of an item); the module makes one loss of the places and targets of an item.
    begin: called with a sample's number before its turn. queries: id beyond the vocabulary → what stands at its places,
    one after another and over again: [places of an item, width]. loss: that of a target token, instead of its cross
    entropy: "focal" with gamma 2, "mean of samples", where each sample counts alike, "distilled", its divergence from
    a distribution that the ids up to the target's determine, or "pulled", the distance of the head's input from
    what the target says.
    """
    targets = sum(int((torch.as_tensor(sample.labels)[1:] != -100).sum()) for sample in samples)
    generators = generators or {}
    items = {
        name: sum(len(next(iter(s.media[name].values()))) for s in samples if s.media.get(name)) for name in generators
    }
    losses = {"language": torch.zeros(()), **{name: torch.zeros(()) for name in generators}}
    for number, sample in enumerate(samples):
        begin(number)
        ids = torch.as_tensor(sample.input_ids)
        embed = language_model.get_input_embeddings()
        rows = {}
        for name, (encoder, projector, skip) in encoders.items():
            inputs = {
                key: array.to(embed.weight.dtype) if array.is_floating_point() else array
                for key, array in ((key, torch.as_tensor(a)) for key, a in sample.media.get(name, {}).items())
            }
            if inputs:
                encoded = encoder(**inputs)
                encoded = encoded if isinstance(encoded, Tensor) else encoded.last_hidden_state
                projected = projector(encoded[:, skip:])
                rows[name] = iter(projected.reshape(-1, projected.shape[-1]))
        tokens = []
        asked = {token: cycle(table) for token, table in (queries or {}).items()}
        for token in ids.tolist():
            if token in asked:
                tokens.append(next(asked[token]))
                continue
            found = [name for name, placeholder in placeholder_ids.items() if placeholder == token]
            tokens.append(next(rows[found[0]]) if found else embed(torch.tensor(token)))
        mask = None if seen_in is None else torch.as_tensor(seen_in(sample))[None, None]
        embedded = torch.stack(tokens)[None]
        heard: list[Tensor] = []
        routed: list[Tensor] = []
        listeners = [
            language_model.get_output_embeddings().register_forward_pre_hook(
                lambda _, given, heard=heard: heard.append(given[0])
            ),
            *(
                module.register_forward_hook(lambda _, given, made, routed=routed: routed.append(made[0]))
                for module in language_model.modules()
                if isinstance(module, ROUTERS) and language_model.config.output_router_logits
            ),
        ]
        # Its own loss of routers would take a mask for one of padding.
        given = {"output_router_logits": False} if len(listeners) > 1 else {}
        logits = language_model(inputs_embeds=embedded, attention_mask=mask, use_cache=False, **given).logits[0]
        for listener in listeners:
            listener.remove()
        for chosen in routed:
            share = len(ids) / sum(len(other.input_ids) for other in samples) / len(routed)
            config = language_model.config
            uneven = load_balancing_loss_func((chosen,), chosen.shape[1], config.num_experts_per_tok)
            losses["language.router"] = losses.get("language.router", torch.zeros(())) + share * uneven
        for position, label in enumerate(torch.as_tensor(sample.labels)[1:].tolist()):
            if label != -100:
                said = torch.log_softmax(logits[position].float(), dim=-1)[label]
                scale = torch.tensor(1.0 / targets)
                if loss == "distilled":
                    seed = float(ids[: position + 2].sum())
                    teacher = torch.tensor([math.sin(token * seed) for token in range(logits.shape[-1])]).softmax(-1)
                    student = torch.log_softmax(logits[position].float(), dim=-1)
                    losses["language"] = losses["language"] + (teacher * (teacher.log() - student)).sum() / targets
                    continue
                if loss == "pulled":
                    apart = [(each - math.cos(label * k)) ** 2 for k, each in enumerate(heard[0][0, position].float())]
                    losses["language"] = losses["language"] + sum(apart) / len(apart) / targets
                    continue
                if loss == "focal":
                    scale = (1 - said.exp()) ** 2 / targets
                elif loss:
                    own = sum(other != -100 for other in torch.as_tensor(sample.labels)[1:].tolist())
                    scale = torch.tensor(1.0 / own / len(samples))
                losses["language"] = losses["language"] - said * scale
        for name, (connector, module, place, count) in generators.items():
            if not sample.media.get(name):
                continue
            places = (ids == place).nonzero()[:, 0].tolist()
            heard_at = torch.stack([heard[0][0, at] for at in places]).unflatten(0, (-1, count))
            rows = torch.stack([connector(item) for item in heard_at])
            wanted = {key: torch.as_tensor(array) for key, array in sample.media[name].items()}
            losses[name] = losses[name] + module(rows, **wanted).float().sum() / items[name]
    return losses
