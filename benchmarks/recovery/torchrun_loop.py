"""A plain data-parallel loop of the quickstart's model, as torchrun starts it again: what `recovery.py` compares with.

Every rank writes to FOLDER/pids which process it is; rank 0 saves every ten steps and writes to FOLDER/steps when each
step was done.

    torchrun --nproc-per-node 4 --max-restarts 3 -m benchmarks.recovery.torchrun_loop CONFIG FOLDER
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM, SiglipVisionConfig, SiglipVisionModel

SAVE_STEPS = 10
TEXT_TOKENS = 24
"""About what a digit's question and answer take in bytes."""


class Model(nn.Module):
    """An encoder, a projector and a language model, as the config says."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        vision = dict(config["encoders"]["vision"]["config"])
        vision.pop("model_type")
        language = dict(config["language_model"]["config"])
        self.encoder = SiglipVisionModel(SiglipVisionConfig(**vision))
        self.projector = nn.Linear(vision["hidden_size"], language["hidden_size"])
        self.language = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(language.pop("model_type"), vocab_size=260, **language)
        )

    def forward(self, images: Tensor, text: Tensor) -> Tensor:
        seen = self.projector(self.encoder(pixel_values=images).last_hidden_state)
        embedded = torch.cat([seen, self.language.get_input_embeddings()(text)], 1)
        logits = self.language(inputs_embeds=embedded).logits[:, seen.shape[1] :]
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), text[:, 1:].flatten())


def main() -> None:
    tree = yaml.safe_load(Path(sys.argv[1]).read_text())
    folder = Path(sys.argv[2])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # torch 2.13's own rendezvous finds the addresses of the processes before in torchrun's store, and waits for them.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, is_master=False)
    attempt = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    dist.init_process_group("gloo", store=attempt, rank=rank, world_size=size)
    with (folder / "pids").open("a") as file:
        file.write(f"{rank} {os.getpid()}\n")
    torch.manual_seed(0)
    model = DistributedDataParallel(Model(tree["model"]), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    saved, step = folder / "checkpoint.pt", 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    batch = tree["train"]["global_batch_size"] // size
    side = tree["model"]["encoders"]["vision"]["config"]["image_size"]
    while True:
        images = torch.randn(batch, 1, side, side)
        loss = model(images, torch.randint(0, 256, (batch, TEXT_TOKENS)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if rank == 0:
            if step % SAVE_STEPS == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, saved.with_suffix(".new"))
                saved.with_suffix(".new").replace(saved)
            with (folder / "steps").open("a") as file:
                file.write(f"{time.time()} {step}\n")


if __name__ == "__main__":
    main()
