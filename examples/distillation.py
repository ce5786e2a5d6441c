"""Distill a vision-language model into a smaller one, by a loss that knows the teacher's logits on the same samples.

    python examples/distillation.py                       # data, teacher, its logits, student: about three minutes
    python examples/distillation.py --processes 1 --temperature 4 --weight 0.9

The teacher reads handwritten digits (examples/quickstart.yaml is such a run). Its logits at the target tokens of every
training sample are computed once and written into a file, so the student trains on any layout and without the teacher
in memory. The loss finds them by the sample's id and the target's place in it, which a loss of four arguments gets
(docs/python.md). Teacher and student must share tokenizer and chat template. For a large vocabulary, keep the teacher's
likeliest tokens only.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import dilatant
from dilatant.data.media.pixels import as_array
from dilatant.hf.export import load_exported

Logits = dict[str, dict[int, Tensor]]
"""Sample id → index of a target token in the sample → the teacher's logits for it, [vocabulary]."""


class Distillation:
    """The cross entropy of the data, mixed with the divergence from the teacher at a temperature (Hinton et al. 2015).

    file: the teacher's logits. Each process reads them when it first needs them. weight: the divergence's share.
    """

    def __init__(self, file: Path, temperature: float, weight: float) -> None:
        self.file = file
        self.temperature = temperature
        self.weight = weight

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "teacher"}

    @cached_property
    def teacher(self) -> Logits:
        return torch.load(self.file, weights_only=True)

    def __call__(self, logits: Tensor, targets: Tensor, _: Tensor, places: Any) -> Tensor:
        """Return the loss of each position. logits: [positions, vocabulary]; targets: [positions]."""
        at = zip(places.sample_of.tolist(), places.index.tolist(), strict=True)
        theirs = torch.stack([self.teacher[places.samples[sample].id][index] for sample, index in at]).to(logits.device)
        own = (logits.float() / self.temperature).log_softmax(-1)
        wanted = (theirs.float() / self.temperature).log_softmax(-1)
        divergence = functional.kl_div(own, wanted, reduction="none", log_target=True).sum(-1)
        entropy = functional.cross_entropy(logits.float(), targets, reduction="none")
        return (1 - self.weight) * entropy + self.weight * self.temperature**2 * divergence


@torch.no_grad()
def logits_of_teacher(export: Path, data: Path) -> Logits:
    """Return the teacher's logits at the target tokens of every sample of a file."""
    model: Any = load_exported(export).model
    model.eval()
    samples, size = sum(1 for _ in data.open()), 64
    found: Logits = {}
    with dilatant.make_loader(model, [data], size, steps=-(-samples // size), max_length=128, workers=0) as loader:
        for batch in loader:
            for sample in batch.samples:
                media = {
                    unit: {name: torch.as_tensor(as_array(value)) for name, value in inputs.items()}
                    for unit, inputs in sample.media.items()
                }
                logits = model(torch.as_tensor(sample.input_ids)[None], encoder_inputs=media).logits[0]
                targets = (sample.labels[1:] != -100).nonzero()[0]
                found[sample.id] = {int(place) + 1: logits[place].clone() for place in targets}
    return found


def config(folder: Path, data: Path, width: int, layers: int, steps: int, layout: Any) -> dict[str, Any]:
    """Return a run of a model of this width on the digits."""
    size = {
        "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers, "num_attention_heads": 4,
    }  # fmt: skip
    vision = {"model_type": "siglip_vision_model", "image_size": 8, "patch_size": 4, "num_channels": 1, **size}
    return {
        "output_dir": str(folder),
        "seed": 0,
        "model": {
            "encoders": {
                "vision": {"kind": "image", "projector": "linear", "config": {**vision, "vision_use_head": False}}
            },
            "language_model": {
                "tokenizer": "bytes",
                "config": {"model_type": "llama", "num_key_value_heads": 2, "tie_word_embeddings": True, **size},
            },
        },
        "data": {
            "train": [{"path": str(data / "train.jsonl")}],
            "eval": [{"path": str(data / "heldout.jsonl")}],
            "max_length": 128,
        },
        "train": {
            "steps": steps,
            "global_batch_size": 16,
            "row_tokens": 512,
            "optimizer": {"learning_rate": 2.0e-3, "weight_decay": 0.3},
            "schedule": {"kind": "cosine", "warmup_steps": steps // 12},
            "device": "cpu",
        },
        "evaluation": {"max_new_tokens": 4},
        "parallel": layout,
    }


def main(folder: Path, steps: int, processes: int, temperature: float, weight: float) -> dict[str, float]:
    """Train teacher and student. Return their shares of right answers on held-out digits."""
    data, teacher, logits = folder / "data", folder / "teacher", folder / "teacher_logits.pt"
    subprocess.run([sys.executable, Path(__file__).with_name("digits.py"), data], check=True)
    first = dilatant.train(config(teacher, data, 64, 2, steps, "single"), overwrite=True, show="stdout")
    torch.save(logits_of_teacher(teacher / "export", data / "train.jsonl"), logits)
    layout = {"units": {"vision": {}, "language": {"pp": processes - 1}}} if processes > 1 else "single"
    student = config(folder / "student", data, 32, processes - 1 or 1, steps, layout)
    loss = Distillation(logits, temperature, weight)
    second = dilatant.train(student, loss=loss, overwrite=True, show="stdout")
    right = {}
    for name, result in (("teacher", first), ("student", second)):
        if result.evaluation is None:
            raise SystemExit(f"the {name} was stopped before its evaluation")
        right[name] = result.evaluation.figures["exact_match"]
    print(f"right answers: teacher {right['teacher']:.1%}, student {right['student']:.1%}")
    return right


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/distillation"))
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=2.0)
    parser.add_argument("--weight", type=float, default=0.5, help="the teacher's share of the loss, from 0 to 1")
    main(**vars(parser.parse_args()))
