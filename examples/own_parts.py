"""Train with parts of your own in Python: a data set, a loss, an optimizer, a schedule, a callback and a metric.

    python examples/own_parts.py                 # two processes; the digits are read from scikit-learn
    python examples/own_parts.py --processes 1

Parts are ordinary objects. They may be defined in a notebook, too; docs/python.md says what each has to be.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits

import dilatant


class Digits:
    """A map-style data set, in the manner of torch's: scans of digits, with the digit as the answer."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self.scans, self.digits = load_digits(return_X_y=True)
        self.numbers = list(numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = self.numbers[index]
        scan = (self.scans[number].reshape(8, 8) * (255 / 16)).astype(np.uint8)
        return {"image": Image.fromarray(scan), "question": "Which digit is this?", "answer": str(self.digits[number])}


@dilatant.loss(count="tokens")
def focal(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The focal loss of each position: what is learned already counts less (Lin et al. 2017)."""
    likely = logits.float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    return -(1 - likely.exp()).square() * likely


def momentum(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def warm_up(step: int) -> float:
    return min(1.0, (step + 1) / 20)


class StopWhenRight:
    """Ends the run when enough held-out answers are right."""

    def __init__(self, share: float) -> None:
        self.share = share

    def on_evaluation(self, run: Any, evaluation: Any) -> None:
        right = evaluation.figures["exact_match"]
        run.log({"still_wrong": 1 - right})
        if right >= self.share:
            run.stop()


def digits_only(expected: Sequence[str], written: Sequence[str]) -> float:
    return sum(answer.strip().isdigit() for answer in written) / len(written)


SIZE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
VISION = {"model_type": "siglip_vision_model", "image_size": 8, "patch_size": 4, "num_channels": 1, **SIZE}
LANGUAGE = {"model_type": "llama", "num_key_value_heads": 2, "tie_word_embeddings": True, **SIZE}


def main(processes: int, steps: int, folder: Path) -> Any:
    layout = {"units": {"vision": {}, "language": {"pp": processes - 1}}} if processes > 1 else "single"
    numbers = range(len(load_digits().target))
    result = dilatant.train(
        {  # what a YAML file holds
            "output_dir": str(folder),
            "model": {
                "encoders": {
                    "vision": {"kind": "image", "projector": "linear", "config": {**VISION, "vision_use_head": False}}
                },
                "language_model": {"tokenizer": "bytes", "config": LANGUAGE},
            },
            "data": {"max_length": 128},
            "train": {"steps": steps, "global_batch_size": 32, "device": "cpu"},
            "evaluation": {"steps": max(1, steps // 4), "limit": 64, "max_new_tokens": 4},
            "parallel": layout,
        },
        train_data=Digits(number for number in numbers if number % 5),
        eval_data=Digits(numbers[::5]),
        loss=focal,
        optimizer=momentum,
        schedule=warm_up,
        callbacks=[StopWhenRight(0.9)],
        metrics=[digits_only],
        overwrite=True,
        show="stdout",
    )
    figures = None if result.evaluation is None else dict(result.evaluation.figures)
    print(f"{result.step} steps, {figures}")
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--folder", type=Path, default=Path("runs/own_parts"))
    settings = parser.parse_args()
    main(settings.processes, settings.steps, settings.folder)
