"""Held-out accuracy: does the model write exactly the answer?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dilatant.config import UserError
from dilatant.data.encode import EncodedPrompt, Encoding, encode_prompt
from dilatant.data.loader import Dataset
from dilatant.models.multimodal import MultimodalModel


@dataclass(frozen=True, slots=True)
class Verdict:
    """One held-out sample: what was expected, and what the model wrote."""

    sample: str
    expected: str
    written: str

    @property
    def is_right(self) -> bool:
        return self.expected.strip() == self.written.strip()


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Exact match over held-out samples. `skipped`: samples that could not be read."""

    verdicts: tuple[Verdict, ...]
    skipped: tuple[str, ...]

    @property
    def exact_match(self) -> float:
        """Share of samples answered exactly, in [0, 1]."""
        return sum(verdict.is_right for verdict in self.verdicts) / max(1, len(self.verdicts))

    def to_record(self, examples: int = 8) -> dict[str, Any]:
        """What eval.json holds: the figure, and some wrong answers to look at."""
        wrong = [verdict for verdict in self.verdicts if not verdict.is_right]
        return {
            "exact_match": self.exact_match,
            "samples": len(self.verdicts),
            "skipped": list(self.skipped),
            "wrong_examples": [
                {"sample": verdict.sample, "expected": verdict.expected, "written": verdict.written}
                for verdict in wrong[:examples]
            ],
        }


def evaluate(
    model: MultimodalModel,
    tokenizer: Any,
    samples: Dataset,
    encoding: Encoding,
    *,
    device: torch.device,
    batch_size: int,
    max_new_tokens: int,
    limit: int | None = None,
    skip_errors: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Greedy answers to the last question of every sample, compared with the answer there.

    Raises UserError for a sample that cannot be read, unless `skip_errors`.
    """
    total = min(len(samples), limit or len(samples))
    verdicts: list[Verdict] = []
    skipped: list[str] = []
    for start in range(0, total, batch_size):
        prompts = list(
            _prompts(samples, encoding, range(start, min(total, start + batch_size)), skip_errors, skipped)
        )
        if prompts:
            answers = generate_answers(model, tokenizer, prompts, device, max_new_tokens)
            verdicts += [
                Verdict(prompt.sample.id, prompt.answer, answer) for prompt, answer in zip(prompts, answers)
            ]
        progress(min(total, start + batch_size), total)
    return Evaluation(tuple(verdicts), tuple(skipped))


def generate_answers(
    model: MultimodalModel,
    tokenizer: Any,
    prompts: Sequence[EncodedPrompt],
    device: torch.device,
    max_new_tokens: int,
    **generation: Any,
) -> list[str]:
    """What the model writes after each prompt; greedy unless `generation` says otherwise."""
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    longest = max(len(prompt.sample.input_ids) for prompt in prompts)
    input_ids = torch.full((len(prompts), longest), pad or 0)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        ids = torch.as_tensor(prompt.sample.input_ids)
        input_ids[row, longest - len(ids) :] = ids
        attention_mask[row, longest - len(ids) :] = 1
    written = model.generate(
        input_ids.to(device),
        encoder_inputs=_encoder_inputs(prompts, device),
        attention_mask=attention_mask.to(device),
        max_new_tokens=max_new_tokens,
        pad_token_id=pad,
        eos_token_id=tokenizer.eos_token_id,
        **{"do_sample": False, **generation},
    )
    return tokenizer.batch_decode(written, skip_special_tokens=True)


def _prompts(
    samples: Dataset, encoding: Encoding, indices: range, skip_errors: bool, skipped: list[str]
) -> Iterator[EncodedPrompt]:
    for index in indices:
        try:
            yield encode_prompt(samples[index], encoding)
        except UserError as error:
            if not skip_errors:
                raise
            skipped.append(str(error))


def _encoder_inputs(
    prompts: Sequence[EncodedPrompt], device: torch.device
) -> dict[str, dict[str, torch.Tensor]]:
    collected: dict[str, dict[str, list[np.ndarray]]] = {}
    for prompt in prompts:
        for unit, inputs in prompt.sample.media.items():
            for name, array in inputs.items():
                collected.setdefault(unit, {}).setdefault(name, []).append(array)
    return {
        unit: {name: torch.as_tensor(np.concatenate(arrays)).to(device) for name, arrays in inputs.items()}
        for unit, inputs in collected.items()
    }
