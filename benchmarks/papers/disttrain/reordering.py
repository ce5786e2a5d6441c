"""DistTrain: reordering of samples, and the rest of its case study."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import RESULTS
from benchmarks.papers.disttrain.case import BATCH, GPUS, SEQUENCE, case, hardware
from benchmarks.papers.disttrain.order import disttrain
from benchmarks.papers.models import DISTTRAIN_LLM, backward, seconds
from benchmarks.papers.searches import Mode
from benchmarks.papers.tables import Outcome, PaperTable, in_range, spread, untested
from dilatant.cost.hardware import Link

PREPROCESSING = RESULTS / "preprocessing.json"


def reordering_gain(shared: Path) -> PaperTable:
    """Fig. 18: throughput of DistTrain's and of our order over random order, on DistTrain's layout."""
    rows: list[tuple[Any, ...]] = []
    for model in DISTTRAIN_LLM:
        one = case(shared, model, GPUS, BATCH[model], seed=1)
        found = one.search(Mode.DISTTRAIN, (1,), policy=disttrain)
        assert found is not None
        plan, count = [found.winner.plan], found.winner.num_microbatches
        random = one.score(plan, count, "random", "1f1b").seconds
        theirs = one.score(plan, count, disttrain, "1f1b").seconds
        same = one.score(plan, count, "searched", "1f1b").seconds
        ours = [one.score(plan, count, policy).seconds for policy in ("balanced", "searched")]
        images = one.workload.tokens["generator"]
        rows.append(
            (f"MLLM-{model}", found.winner.replicas, count, float(images.std() / images.mean()),
             random / theirs, random / same, *(random / step for step in ours))
        )  # fmt: skip
    gains, same_family = [row[4] for row in rows], [row[5] for row in rows]
    return PaperTable(
        "DistTrain Fig. 18",
        "throughput relative to random order, on the layout of Fig. 17",
        "predicted as above: 1F1B for random, DistTrain and one of ours; the others of ours choose their schedule too",
        (
            "model",
            "replicas",
            "microbatches",
            "std/mean of images",
            "DistTrain",
            "ours, searched, 1F1B",
            "ours, balanced",
            "ours, searched",
        ),
        tuple(rows),
        (
            in_range("gain of reordering", 1.03, 1.11, (min(gains), max(gains)), "predicted"),
            Outcome(
                "gain is larger with smaller LLMs",
                "grows",
                " , ".join(f"{gain:.2f}" for gain in gains),
                "agrees" if gains == sorted(gains, reverse=True) else "falls short",
                "predicted",
            ),
            Outcome(
                "our order over DistTrain's, both under 1F1B",
                "1.00",
                f"{spread(a / b for a, b in zip(same_family, gains))}",
                "beats"
                if min(a / b for a, b in zip(same_family, gains)) > 1.005
                else "agrees"
                if min(a / b for a, b in zip(same_family, gains)) > 0.99
                else "falls short",
                "predicted",
                "the search optimises the simulator that scores both",
            ),
        ),
    )


def tensor_overlap() -> PaperTable:
    """Fig. 22: what hiding all communication of tensor parallelism could save of the LLM's time."""
    device = hardware()
    free = replace(device, inside=Link(np.inf))
    rows: list[tuple[Any, ...]] = []
    for tp in (4, 8):
        for model, parts in DISTTRAIN_LLM.items():
            one, hidden = (
                float(seconds(parts, own, SEQUENCE, tp=tp) + backward(parts, own, SEQUENCE, tp))
                for own in (device, free)
            )
            rows.append((tp, f"MLLM-{model}", one / hidden))
    four, eight = ([row[2] for row in rows if row[0] == tp] for tp in (4, 8))
    return PaperTable(
        "DistTrain Fig. 22",
        "seconds of the LLM with its tensor-parallel communication exposed over all of it hidden",
        "predicted: shipped analytic costs, an upper bound of what overlap can gain; StepCCL itself is not here",
        ("tp", "model", "exposed / hidden"),
        tuple(rows),
        (
            in_range(
                "gain of overlap at tp 4",
                1.10,
                1.17,
                (min(four), max(four)),
                "predicted",
                slack=0.05,
                note="ours is a bound from above",
            ),
            in_range(
                "gain of overlap at tp 8",
                1.15,
                1.17,
                (min(eight), max(eight)),
                "predicted",
                slack=0.05,
                note="ours is a bound from above",
            ),
        ),
    )


def preprocessing() -> PaperTable:
    """Fig. 21: how long a step waits for its data, decoded by the trainer itself and by producers; from the results of
    `benchmarks/samples/preprocessing.py`, where it was run."""
    title = "preprocessing on the training nodes against nodes of its own"
    claim = "preprocessing of a step, with and without nodes of its own"
    if not PREPROCESSING.is_file():
        note = "bars are not in the text; our loading is in benchmarks/samples/data_loading.py"
        outcome = untested(claim, "seconds to milliseconds", note)
        return PaperTable("DistTrain Fig. 21", title, "carried over from the paper", (), (), (outcome,))
    rows: list[tuple[Any, ...]] = []
    for row in json.loads(PREPROCESSING.read_text())["rows"]:
        waits = {name: 1e3 * row["compute_seconds"] * share / (1 - share) for name, share in row["stall"].items()}
        rows.append((row["images"], row["pixels"], waits["trainer"], waits.get("ray", waits["pool"])))
    own, away = max(row[2] for row in rows), max(row[3] for row in rows)
    agrees = away < 0.1 * own and away < 100
    outcome = Outcome(
        claim,
        "seconds to milliseconds",
        f"{own:,.0f} ms to {away:,.1f} ms at most",
        "agrees" if agrees else "falls short",
        "measured",
        "two samples a step on one core that decodes; the paper's bars are not in the text",
    )
    return PaperTable(
        "DistTrain Fig. 21",
        title,
        "measured on this machine by benchmarks/samples/preprocessing.py",
        ("images", "pixels", "trainer decodes, ms", "producers decode, ms"),
        tuple(rows),
        (outcome,),
    )
