"""An ordinary training loop over several processes: an image encoder beside a language model, reading digits.

    python examples/training_loop.py                                  # starts its own three workers
    torchrun --nproc-per-node 3 examples/training_loop.py             # joins those of torchrun

One process encodes images, two hold halves of the language model. The model learns to say which digit an 8x8 scan
shows; each prompt is the image's 16 placeholders, then a question token, then the answer.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from transformers import LlamaConfig, SiglipVisionConfig

from dilatant import Encoder, MultimodalModel, ParallelSpec, launch, parallelize
from dilatant.comm.launch import Worker
from dilatant.data.sample import EncodedSample
from dilatant.report.gantt import measured_chart
from dilatant.report.pages.perfetto import write_timeline
from dilatant.report.text.gantt_summary import by_lane

QUESTION, IMAGE, TOKENS = 10, 11, 16


def build_model() -> MultimodalModel:
    """On the meta device: every rank gives memory to its own layers only."""
    size: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    vision = SiglipVisionConfig(**size, image_size=8, patch_size=2, num_channels=1, vision_use_head=False)
    language = LlamaConfig(**size, vocab_size=12, num_key_value_heads=4, pad_token_id=0)
    encoder = Encoder(vision, projector="linear", placeholder_id=IMAGE)
    return MultimodalModel({"vision": encoder}, language, device="meta")


def read_digits(held_out: int) -> tuple[list[EncodedSample], list[EncodedSample]]:
    images, digits = load_digits(return_X_y=True)
    samples = []
    for index, (image, digit) in enumerate(zip(images, digits)):
        ids = np.array([IMAGE] * TOKENS + [QUESTION, digit])
        labels = np.full(len(ids), -100)
        labels[-1] = digit
        pixels = (image.reshape(1, 1, 8, 8) / 8 - 1).astype(np.float32)
        samples.append(
            EncodedSample(
                f"digit-{index}",
                ids,
                labels,
                media={"vision": {"pixel_values": pixels}},
                sizes={"vision": TOKENS, "language": len(ids)},
            )
        )
    return samples[held_out:], samples[:held_out]


def batches(samples: list[EncodedSample], size: int, seed: int = 0) -> Iterator[list[EncodedSample]]:
    """The same batches in the same order on every rank."""
    generator = np.random.default_rng(seed)
    while True:
        yield [samples[i] for i in generator.choice(len(samples), size, replace=False)]


def train(worker: Worker, settings: argparse.Namespace) -> float:
    """Runs on every rank; returns the held-out loss."""
    parallel = parallelize(
        build_model(),
        {"vision": ParallelSpec(), "language": ParallelSpec(pp=2)},
        num_microbatches=settings.microbatches,
        worker=worker,
    )
    optimizer = torch.optim.AdamW(parallel.trainable, lr=3e-3)
    training, held_out = read_digits(200)
    loader = batches(training, 64)
    for step in range(1, settings.steps + 1):
        output = parallel.execute(next(loader))
        norm = parallel.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if worker.rank == 0 and step % 20 == 0:
            print(f"step {step:4}  loss {output.loss:.4f}  gradient norm {norm:.3f}", flush=True)
    actions = parallel.measured()
    if worker.rank == 0:
        print(by_lane(measured_chart(actions, parallel.plan), parallel.plan))
        if settings.timeline:
            write_timeline(settings.timeline, actions, parallel.plan, parallel.arrows())
    loss = parallel.execute(held_out).loss
    parallel.close()
    if worker.rank == 0:
        print(f"held-out loss {loss:.4f} (chance: {np.log(10):.4f})")
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--timeline", type=Path, help="where to write the last step for ui.perfetto.dev")
    settings = parser.parse_args()
    launch(train, 3, settings)


if __name__ == "__main__":
    main()
