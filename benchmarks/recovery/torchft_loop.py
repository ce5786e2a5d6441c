"""One replica of a fault-tolerant loop of the quickstart's model, written as torchft's own example, with its defaults.

It writes to FOLDER/steps when each committed step was done, by how many. `recovery.py` starts it where torchft is
installed, one process for each replica, with the address of a lighthouse in TORCHFT_LIGHTHOUSE.

    python -m benchmarks.recovery.torchft_loop CONFIG FOLDER REPLICA
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import nn

from benchmarks.recovery.torchrun_loop import TEXT_TOKENS, Model


def main() -> None:
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    tree = yaml.safe_load(Path(sys.argv[1]).read_text())
    folder, replica = Path(sys.argv[2]), int(sys.argv[3])
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    # Of the replica's own ranks, of which there is one.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
    _store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    torch.manual_seed(0)
    inner: nn.Module = Model(tree["model"])
    adamw = torch.optim.AdamW(inner.parameters(), 2e-3)

    def state() -> dict[str, Any]:
        return {"model": inner.state_dict(), "optimizer": adamw.state_dict()}

    def load(given: dict[str, Any]) -> None:
        inner.load_state_dict(given["model"])
        adamw.load_state_dict(given["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=state,
        replica_id=f"replica{replica}-",
    )
    model, optimizer = DistributedDataParallel(manager, inner), Optimizer(manager, adamw)
    side = tree["model"]["encoders"]["vision"]["config"]["image_size"]
    while True:
        batch = max(1, tree["train"]["global_batch_size"] // 4)
        optimizer.zero_grad()
        loss = model(torch.randn(batch, 1, side, side), torch.randint(0, 256, (batch, TEXT_TOKENS)))
        loss.backward()
        before = manager.current_step()
        optimizer.step()
        if manager.current_step() > before:
            with (folder / "steps").open("a") as file:
                file.write(f"{time.time()} {manager.num_participants()} {replica}\n")


if __name__ == "__main__":
    main()
