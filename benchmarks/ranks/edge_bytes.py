"""What travels between the stages of a language model of unlike degrees, against the least that can: each row once in
each direction. Prints JSON; `dimensions.py` reads it.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dilatant.comm.comm import Comm
from dilatant.comm.group import Group
from dilatant.comm.launch import Worker, launch_local
from dilatant.data.sample import EncodedSample
from dilatant.models.multimodal import MultimodalModel
from dilatant.models.row_attention import use_row_attention
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.runtime.runtime import Runtime

DEGREES = ((2, 1), (1, 2), (2, 1))
"""(tp, cp) of the stages."""
RANKS = sum(tp * cp for tp, cp in DEGREES)
WIDTH, LAYERS, TOKENS, SAMPLES = 64, 4, 96, 4


def count_edges(worker: Worker) -> dict[str, Any]:
    """Bytes of one step that this rank sends on edges; on each rank the least of all together, and what whole rows for
    every rank of a stage would take."""
    torch.set_num_threads(1)
    comm = Comm(worker.store, worker.rank, worker.size)
    settings = {
        "model_type": "llama", "vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 4,
    }  # fmt: skip
    model = MultimodalModel({}, settings, seed=0, device="meta")
    use_row_attention(model)
    first, stages = 0, []
    for number, (tp, cp) in enumerate(DEGREES):
        cuts = [(LAYERS + 2) * end // len(DEGREES) for end in (number, number + 1)]
        stages.append(Stage(*cuts, tuple(range(first, first := first + tp * cp)), tp, cp))
    runtime = Runtime(model, Plan((UnitPlan("language", (Replica(tuple(stages)),)),)), comm)
    ids = np.random.default_rng(0).integers(3, 64, TOKENS)
    samples = [
        EncodedSample(f"sample-{n}", ids, ids.copy(), media={}, sizes={"language": TOKENS}) for n in range(SAMPLES)
    ]
    sent = 0
    plain = Group.send

    def counted(group: Group, tensor: Tensor, *given: Any) -> Any:
        nonlocal sent
        sent += tensor.numel() * tensor.element_size() * group.name.startswith("edge/")
        return plain(group, tensor, *given)

    Group.send = counted  # type: ignore[method-assign]
    try:
        runtime.execute(samples)
    finally:
        Group.send = plain  # type: ignore[method-assign]
        runtime.close()
        comm.close()
    rows = SAMPLES * TOKENS * WIDTH * 4
    whole = sum(before + after for (before, _), (after, _) in pairwise(DEGREES))
    return {"sent": sent, "least": 2 * rows * (len(DEGREES) - 1), "whole_rows": rows * whole}


def main() -> None:
    counts = launch_local(count_edges, RANKS)
    print(json.dumps({**counts[0], "sent": sum(count["sent"] for count in counts)}))


if __name__ == "__main__":
    main()
