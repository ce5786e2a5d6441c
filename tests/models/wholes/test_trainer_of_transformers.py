"""transformers' Trainer takes a model of parts as it takes its own."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from cases.tiny_models import images, tokens, vision_language


def sample(number: int) -> dict[str, torch.Tensor]:
    """Of unlike numbers of targets."""
    ids = torch.cat([torch.full((1, 16), 64), tokens(1, 9, seed=number)], dim=1)
    labels = ids.masked_fill(ids == 64, -100)
    labels[:, 16 : 18 + number] = -100
    return {"input_ids": ids, "labels": labels, "pixel_values": images(1, seed=number)}


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, object]:
    together = {key: torch.cat([one[key] for one in samples]) for key in samples[0]}
    return {"encoder_inputs": {"vision": {"pixel_values": together.pop("pixel_values")}}, **together}


class Samples(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return sample(number)


def test_transformers_trainer_steps_on_the_mean_of_all_targets(tmp_path: Path) -> None:
    model, plain = vision_language().train(), vision_language().train()
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=0.5, optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.0, weight_decay=0.0,
        remove_unused_columns=False, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=Samples(), data_collator=collate).train()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    plain(**collate([sample(number) for number in range(4)])).loss.backward()
    optimizer.step()
    before = dict(vision_language().named_parameters())
    moved = 0.0
    for (name, own), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        # fp32: two sums in the place of one
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6, msg=name)
        moved = max(moved, (own - before[name]).abs().max().item())
    assert moved > 1e-3
