"""A vision-language-action policy: an action head behind the language model says how a robot arm moves.

    python examples/robot_policy.py                                   # starts its own three workers
    torchrun --nproc-per-node 3 examples/robot_policy.py
    python examples/robot_policy.py --begin runs/robot --steps 100    # goes on with the policy that was saved

A camera on the arm sees a ball; an instruction says whether to reach the ball or to leave it. The language model first
answers with the side on which the ball lies, then stands at `CHUNK` places whose last hidden states a generator
of one's own takes: it regresses a chunk of continuous actions, as OpenVLA-OFT does (Kim et al. 2025). The encoder, the
language model and the head each have a process, and both losses train all of them. Actions are targets that no file
reader knows, so samples are made in Python. From YAML a head draws a chunk as a picture: `dilatant init robot-actions`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, SiglipVisionConfig

from dilatant import EncodedSample, Encoder, Generator, MultimodalModel, ParallelSpec, Worker, launch, parallelize

PIXELS, PATCH, WIDTH = 16, 4, 64
PATCHES = (PIXELS // PATCH) ** 2
CHUNK = 4
"""Actions that the policy says at once, each a step in x and y."""
POLICY = "policy.safetensors"
"""File of the weights in a run's folder."""
REACH, LEAVE, LEFT, RIGHT, IMAGE, ACTION, VOCABULARY = 1, 2, 3, 4, 5, 6, 8


class ActionHead(nn.Module):
    """Regression of actions from the language model's rows at their places, by the mean absolute error."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, 2)

    def predict(self, rows: Tensor) -> Tensor:
        """Return actions [items, CHUNK, 2]. rows: [items, CHUNK, WIDTH]."""
        return self.outer(nn.functional.gelu(self.inner(rows)))

    def forward(self, rows: Tensor, actions: Tensor) -> Tensor:
        """Return the loss of each item: [items]."""
        return (self.predict(rows) - actions).abs().mean(dim=(1, 2))


def build_model() -> MultimodalModel:
    """On the meta device: every rank gives memory to its own layers only."""
    size: dict[str, Any] = {
        "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4,
    }  # fmt: skip
    vision = SiglipVisionConfig(**size, image_size=PIXELS, patch_size=PATCH, num_channels=1, vision_use_head=False)
    language = LlamaConfig(**size, vocab_size=VOCABULARY, num_key_value_heads=4, pad_token_id=0, initializer_range=0.1)
    with torch.device("meta"):
        head = ActionHead()
    return MultimodalModel(
        {"vision": Encoder(vision, projector="linear", placeholder_id=IMAGE)},
        language,
        generators={"action": Generator(head, token_id=ACTION, width=WIDTH, tokens_per_item=CHUNK)},
        device="meta",
    )


def scenes(count: int, seed: int) -> list[EncodedSample]:
    """Return samples of random scenes, each with the actions of an expert."""
    random = np.random.default_rng(seed)
    samples = []
    for number in range(count):
        row, column = random.integers(0, PIXELS - 1, 2)
        pixels = np.zeros((1, 1, PIXELS, PIXELS), np.float32)
        pixels[..., row : row + 2, column : column + 2] = 3
        way = (2 * np.array([row, column], np.float32) - (PIXELS - 2)) / (PIXELS - 2)  # from the centre, -1 to 1
        instruction = int(random.choice([REACH, LEAVE]))
        steps = (way if instruction == REACH else -way) * np.linspace(1, 0.25, CHUNK, dtype=np.float32)[:, None]
        side = RIGHT if way[1] > 0 else LEFT
        ids = np.array([IMAGE] * PATCHES + [instruction, side] + [ACTION] * CHUNK)
        media: dict[str, dict[str, np.ndarray]] = {
            "vision": {"pixel_values": pixels},
            "action": {"actions": steps[None]},  # one item
        }
        sizes = {"vision": PATCHES, "language": len(ids), "action": CHUNK}
        samples.append(EncodedSample(f"scene-{seed}-{number}", ids, np.where(ids == side, ids, -100), media, sizes))
    return samples


def train(worker: Worker, settings: argparse.Namespace) -> tuple[float, float]:
    """Runs on every rank; returns the mean absolute error of held-out actions before and after training."""
    specs = {name: ParallelSpec() for name in ("vision", "language", "action")}
    parallel = parallelize(build_model(), specs, num_microbatches=settings.microbatches, worker=worker, seed=0)
    if settings.begin is not None:
        parallel.load_state_dict(load_file(settings.begin / POLICY))
    optimizer = torch.optim.AdamW(parallel.trainable, lr=2e-3)
    held_out = scenes(256, seed=1_000_000)
    before = parallel.execute(held_out).losses["action"]
    optimizer.zero_grad()
    for step in range(settings.steps):
        result = parallel.execute(scenes(64, seed=step))  # the same on every rank
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if worker.rank == 0 and step % 20 == 0:
            print(
                f"step {step:4}  {', '.join(f'{name} {loss:.4f}' for name, loss in result.losses.items())}", flush=True
            )
    after = parallel.execute(held_out).losses["action"]
    state = parallel.state_dict()  # whole weights on rank 0, by the keys of the models of transformers and of the head
    parallel.close()
    if worker.rank == 0:
        settings.folder.mkdir(parents=True, exist_ok=True)
        save_file(state, settings.folder / POLICY)
        print(f"held-out error of an action: {before:.4f} before training, {after:.4f} after it")
        print(f"the policy is in {settings.folder / POLICY}")
    return before, after


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("runs/robot"), help="where the policy goes")
    parser.add_argument("--begin", type=Path, help="a folder with a policy to go on with")
    launch(train, 3, parser.parse_args())
