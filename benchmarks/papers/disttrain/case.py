"""DistTrain's models on its cluster: samples, costs, and the layouts of its baselines."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.papers.datasets import coco_image_sizes
from benchmarks.papers.models import (
    DISTTRAIN_LLM,
    VIT_HUGE,
    PaperUnit,
    Part,
    backward,
    linear_part,
    operations_only,
    seconds,
)
from benchmarks.papers.planner import Case
from dilatant.config.degrees import Degrees
from dilatant.cost.analytic import LayerShape
from dilatant.cost.hardware import Hardware, Link, load_hardware
from dilatant.cost.memory import ParameterBytes
from dilatant.plan import Workload
from dilatant.plan.cluster import cluster_of
from dilatant.plan.rank_mapping import Chain

SEQUENCE, _PATCH = 8192, 16
_UNET_512 = 0.7e12
"""Forward operations of Stable Diffusion 2.1's U-Net on one 512 x 512 image (64 x 64 latents)."""
_IMAGE_SIDE = {"9B": 512, "15B": 512, "72B": 1024}
MEGATRON_STAGES = {"9B": 1, "15B": 2, "72B": 10}  # of the LLM; tp 8, one stage each for the others (8.1)
BATCH = {"9B": 128, "15B": 64, "72B": 40}
GPUS, NODE = 96, 8  # the paper's microbenchmarks use up to 98 GPUs, in nodes of eight
_TENSOR = (1, 2, 4, 8)
_RULES = ParameterBytes(zero="all")


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """8K-token sequences: patches of all images of a sample, the sum of their squares, and images: [samples] each."""

    patches: NDArray[np.float64]
    squares: NDArray[np.float64]
    images: NDArray[np.float64]

    def workload(self) -> Workload:
        """As the units see them: an image is one token of the generator."""
        language = np.full(len(self.images), float(SEQUENCE))
        tokens = {"vision": self.patches, "language": language, "generator": self.images}
        return Workload(tokens, {"vision": self.squares})


def samples(shared: Path, model: str, count: int, seed: int = 0) -> Samples:
    """Interleave images (real COCO sizes) and texts until 8,192 tokens are full.

    Text lengths are modelled: exponential around a mean that each sequence draws from a lognormal (median 300 tokens,
    sigma 1), since documents differ in how much they say per image; this skews the number of images as in Fig. 5(c).
    """
    sizes, draw = coco_image_sizes(shared), np.random.default_rng(seed)
    images: list[list[int]] = []
    for _ in range(count):
        used, own, mean = 0, [], draw.lognormal(math.log(300), 1.0)
        while True:
            width, height = sizes[draw.integers(len(sizes))]
            scale = min(1.0, 512 / max(width, height))
            tokens = max(int(width * scale) // _PATCH, 1) * max(int(height * scale) // _PATCH, 1)
            text = int(draw.exponential(mean)) + 1
            if used + text + tokens > SEQUENCE:
                break
            used += text + tokens
            own.append(tokens)
        images.append(own)
    return Samples(
        np.asarray([float(sum(own)) for own in images]),
        np.asarray([float(sum(count * count for count in own)) for own in images]),
        np.asarray([float(len(own)) for own in images]),
    )


def hardware() -> Hardware:
    """The paper's A800: an A100 with NVLink of 300 GB/s both ways, and four ports of 200 Gb/s to a node (8)."""
    nvlink, network = Link(150e9, 8e-6), Link(100e9, 20e-6)
    return replace(load_hardware("A100"), name="A800", inside=nvlink, between=network, ports=4)


def units(model: str, trains: frozenset[str] | None = None) -> tuple[PaperUnit, ...]:
    """Encoder, LLM and generator with their projectors, which always train. `trains`: other units that do (None: all).

    Encoder and generator are replicated over the ranks of a tensor group and share out its images, as in the paper:
    each does its part and nothing is exchanged.
    """

    def kinds(unit: str, own: frozenset[str]) -> frozenset[str] | None:
        return None if trains is None or unit in trains else own

    hidden = DISTTRAIN_LLM[model][0].shape.output_width
    side = _IMAGE_SIDE[model]
    shared = tuple(replace(part, shape=replace(part.shape, collectives=0)) for part in VIT_HUGE)
    products = round(_UNET_512 / 2 * (side / 512) ** 2)
    unet = LayerShape(products, 0, 1_000_000_000, 1e8, 1e8, 2e8, 0, launches=500)
    replicated = tuple((tp, 1) for tp in (1, 8))
    projector = frozenset({"projector"})
    return (
        PaperUnit(
            "vision",
            (*shared, linear_part("projector", 1280, hidden)),
            ("language",),
            kinds("vision", projector),
            replicated,
        ),
        PaperUnit(
            "language",
            DISTTRAIN_LLM[model],
            ("generator",),
            kinds("language", frozenset()),
            tuple((tp, 1) for tp in _TENSOR),
        ),
        PaperUnit(
            "generator",
            (linear_part("projector", 1024, 1024), Part("unet", unet, 1)),
            (),
            kinds("generator", projector),
            replicated,
        ),
    )


def case(shared: Path, model: str, gpus: int, batch: int, trains: frozenset[str] | None = None, seed: int = 0) -> Case:
    """One global batch on the paper's cluster."""
    drawn, device = samples(shared, model, batch, seed), hardware()
    cluster = cluster_of(device, gpus // NODE, NODE)
    return Case(units(model, trains), device, cluster, drawn.workload(), batch, _RULES)


def megatron(one: Case, model: str) -> tuple[float, int, int]:
    """Seconds of a step, GPUs and replicas of the rigid layout of 8.1, the fastest microbatch of 1, 2 or 4."""
    stages = MEGATRON_STAGES[model]
    pipelines = one.cluster.num_devices // (NODE * (stages + 2))
    replicas = max(d for d in range(1, pipelines + 1) if one.batch % d == 0)
    count = {unit.name: sum(part.count for part in unit.parts) for unit in one.units}
    cuts = tuple(count["language"] * stage // stages for stage in range(stages))
    chains = [
        Chain(replicas, Degrees(8), {"vision": (0,)}),
        Chain(replicas, Degrees(8), {"language": cuts}),
        Chain(replicas, Degrees(8), {"generator": (0,)}),
    ]
    plans = one.plans(chains)
    found = [
        one.score(plans, one.batch // (replicas * size), schedule="1f1b").seconds
        for size in (1, 2, 4)
        if one.batch % (replicas * size) == 0
    ]
    return min(found), NODE * (stages + 2) * replicas, replicas


def mfu(one: Case, gpus: int, step: float) -> float:
    """Counted operations of everything that training needs, over the peak of the GPUs."""
    device = operations_only("A100")
    rate = device.flops("bfloat16")
    total = 0.0
    for unit in one.units:
        tokens = one.workload.tokens[unit.name]
        images = np.maximum(one.workload.tokens["generator"], 1.0)
        each = tokens / images if unit.name == "vision" else tokens
        times = images if unit.name == "vision" else 1.0
        forward = seconds(unit.parts, device, each)
        back = backward(unit.parts, device, each) if unit.trains is None else 0.0 * forward
        total += float(((forward + back) * times).sum()) * rate
    return total / (gpus * device.peak_flops["bfloat16"] * step)


def by_operations(one: Case, model: str) -> tuple[float, int]:
    """Seconds and GPUs when GPUs are handed out in proportion to operations: the LLM keeps Megatron's degrees and its
    replicas fill its share; encoder and generator get the GPUs of theirs, in replicas that divide the LLM's."""
    device = operations_only("A100")
    work = []
    for unit in one.units:
        mean = float(one.workload.tokens[unit.name].mean())
        work.append(float(seconds(unit.parts, device, mean) + backward(unit.parts, device, mean)))
    shares = [own / sum(work) for own in work]
    depth = MEGATRON_STAGES[model]
    most = max(int(GPUS * shares[1]) // (NODE * depth), 1)
    replicas = max(d for d in range(1, most + 1) if one.batch % d == 0)
    count = {unit.name: sum(part.count for part in unit.parts) for unit in one.units}
    cuts = tuple(count["language"] * stage // depth for stage in range(depth))

    def alone(name: str, share: float) -> Chain:
        wanted = max(round(GPUS * share), 1)
        if wanted <= replicas:
            return Chain(max(d for d in range(1, wanted + 1) if replicas % d == 0), Degrees(), {name: (0,)})
        tp = 8 if wanted >= 8 * replicas else 1
        return Chain(replicas, Degrees(tp), {name: (0,)})

    chains = [
        alone("vision", shares[0]),
        Chain(replicas, Degrees(8), {"language": cuts}),
        alone("generator", shares[2]),
    ]
    found = [
        one.score(one.plans(chains), one.batch // (replicas * size), schedule="1f1b").seconds
        for size in (1, 2)
        if one.batch % (replicas * size) == 0
    ]
    return min(found), sum(chain.gpus for chain in chains)
