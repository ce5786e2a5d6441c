"""How long a training step waits for its data, by who decodes them: DistTrain's figure 21.

    python -m benchmarks.samples.preprocessing [--rounds 3] [--workers 1] [--ray] [--json FILE]

A sample has 1, 4 or 10 JPEG photos of 512 or 1,024 pixels (smoothed noise) and a question; a step takes two samples.
The trainer computes for as long as its producers need for a step, divided by `--load` (0.8 of what they can do): their
cores suffice, and what is left of the wait is the way of the data. Computing is a GPU at work, which leaves the
processor alone (a sleep). Contenders, in turns in the same run: the trainer itself decodes; torch's DataLoader, as many
steps ahead; the machine's pool; with --ray, producers on a local Ray cluster (pip install "dilatant[ray]"). The latter
two behind the trainer's own feed.

Printed is the share of a step that is waited, the least of all rounds; the first steps, with which processes start, do
not count. "needs" are the processors that the pool's workers were at work on for a step, by the clock: above
`--workers` they did not suffice, since other programs had them. "plan" is what `dilatant plan` would ask for at this
pace. Everything is measured.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.machine import machine
from dilatant.comm.ray_cluster import LOCAL, Connection
from dilatant.data.index.sizes import SizesIndex
from dilatant.data.media_units.image_unit import ImageUnit, PixelProcessor
from dilatant.data.order.sampler import SamplerState
from dilatant.data.sample import EncodedSample, Media, Sample, Turn
from dilatant.data.text.chat import chat_tokenizer
from dilatant.data.text.encode import encode_sample
from dilatant.data.text.encoding import TOKENS, Encoding
from dilatant.data.text.tokenizer import byte_tokenizer
from dilatant.data.workers.ordered_map import keep_freed_memory
from dilatant.data.workers.pool import InlineSource, SampleRequest, SampleSource
from dilatant.data.workers.pool_owner import PoolOwner
from dilatant.data.workers.pool_source import PoolSource
from dilatant.data.workers.ray_source import RaySource
from dilatant.planning.measuring.decode_costs import DecodeCost
from dilatant.training.feeding.feed import StepPrefetcher
from dilatant.training.feeding.step_data import LOOK_AHEAD, IndexedData, StepSamples

PARTS = frozenset({TOKENS, "vision"})
BATCH = 2
FIRST = 3
"""Steps that do not count."""
BUDGET_BYTES = 256 << 20
CASES = [(images, pixels) for pixels in (512, 1024) for images in (1, 4, 10)]


@dataclass(frozen=True)
class Photos:
    """Samples of `images` photos each, out of a few that differ; as much of a blend as a feed asks."""

    files: tuple[bytes, ...]
    images: int
    length: int

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self.length,)

    def source_of(self, index: int) -> int:
        return 0

    def name(self, index: int) -> str:
        return f"photos:{index}"

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        if index >= self.length:
            raise IndexError
        shown = [
            Media("image", self.files[(index + number) % len(self.files)], f"{index}.{number}")
            for number in range(self.images)
        ]
        return Sample(self.name(index), (Turn("user", (*shown, "What?")), Turn("assistant", ("Noise.",))))


class Encoded:
    """The same, encoded, for torch's DataLoader."""

    def __init__(self, photos: Photos, encoding: Encoding) -> None:
        self.photos, self.encoding = photos, encoding

    def __len__(self) -> int:
        return len(self.photos)

    def __getitem__(self, index: int) -> Any:
        return encode_sample(self.photos[index], self.encoding)


def photos_of(pixels: int) -> tuple[bytes, ...]:
    random = np.random.default_rng(0)
    files = []
    for _ in range(4):
        coarse = Image.fromarray(random.integers(0, 256, (pixels // 8, pixels // 8, 3), np.uint8))
        buffer = io.BytesIO()
        coarse.resize((pixels, pixels), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
        files.append(buffer.getvalue())
    return tuple(files)


def seconds_a_sample(photos: Photos, encoding: Encoding) -> float:
    """Of one processor, the mean of a few."""
    encode_sample(photos[0], encoding)
    before = time.thread_time()
    for index in range(4):
        encode_sample(photos[index], encoding)
    return (time.thread_time() - before) / 4


def waited(batches: Iterator[list[EncodedSample]], compute_seconds: float, steps: int) -> tuple[float, float]:
    """Of the steps that count, the share that is waited, and the processors that were at work on their samples."""
    total = waits = made = 0.0
    for step in range(steps):
        began = time.perf_counter()
        batch = next(batches)
        took = time.perf_counter() - began
        time.sleep(compute_seconds)
        if step >= FIRST:
            waits += took
            total += time.perf_counter() - began
            made += sum(sample.made_seconds for sample in batch)
    return waits / total, made / (compute_seconds * (steps - FIRST))


def taken_at_once(source: SampleSource, steps: int) -> Iterator[list[Any]]:
    """By a trainer that does nothing ahead."""
    for step in range(steps):
        draws = range(step * BATCH, (step + 1) * BATCH)
        source.ask([SampleRequest(draw, draw, PARTS) for draw in draws])
        yield [source.take("train", draw) for draw in draws]


def fed(photos: Photos, encoding: Encoding, source: SampleSource, steps: int) -> Iterator[list[EncodedSample]]:
    """As the trainer is."""
    one = encode_sample(photos[0], encoding)
    sizes = np.array([[one.sizes[unit] for unit in encoding.unit_names]] * len(photos))
    content = np.full(len(photos), one.content_digest)
    index = SizesIndex(encoding.unit_names, sizes, np.ones(len(photos), np.int64), content)
    draws = (StepSamples(k, np.arange(k * BATCH, (k + 1) * BATCH), k * BATCH, SamplerState()) for k in range(steps))
    data = IndexedData("train", photos, index, {})  # type: ignore[arg-type]
    with StepPrefetcher(
        data, draws, source, lambda heads, step: len(heads), lambda n: dict.fromkeys(range(n), PARTS)
    ) as feed:
        for step in feed:
            yield [*step.batch.samples]


@contextmanager
def in_trainer(photos: Photos, encoding: Encoding, workers: int, steps: int) -> Iterator[Iterator[Any]]:
    yield taken_at_once(InlineSource({"train": photos}, encoding), steps)


def as_they_are(samples: list[Any]) -> list[Any]:
    return samples


@contextmanager
def in_torch(photos: Photos, encoding: Encoding, workers: int, steps: int) -> Iterator[Iterator[Any]]:
    from torch.utils.data import DataLoader

    loader = DataLoader(
        Encoded(photos, encoding), BATCH, num_workers=workers, collate_fn=as_they_are, prefetch_factor=LOOK_AHEAD,
        multiprocessing_context="forkserver",
    )  # fmt: skip
    yield iter(loader)


@contextmanager
def in_pool(photos: Photos, encoding: Encoding, workers: int, steps: int) -> Iterator[Iterator[Any]]:
    owner = PoolOwner({"train": photos}, encoding, workers)
    source = PoolSource(owner.address, BUDGET_BYTES)
    with closing(fed(photos, encoding, source, steps)) as batches:
        yield batches
    source.close()
    owner.close()


@contextmanager
def in_ray(photos: Photos, encoding: Encoding, workers: int, steps: int) -> Iterator[Iterator[Any]]:
    source = RaySource({"train": photos}, encoding, BUDGET_BYTES, workers)
    with closing(fed(photos, encoding, source, steps)) as batches:
        yield batches
    source.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="of computing that counts, 8 steps at least")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--load", type=float, default=0.8)
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    contenders: dict[str, Callable[..., Any]] = {"trainer": in_trainer, "torch": in_torch, "pool": in_pool}
    connection = None
    if given.ray:
        connection = Connection(LOCAL, cpus=given.workers)
        contenders["ray"] = in_ray
    encoding = Encoding(
        chat_tokenizer(byte_tokenizer()), (ImageUnit("vision", 259, 729, PixelProcessor(384, 384)),),
        max_length=16384,
    )  # fmt: skip
    keep_freed_memory()
    print(f"{'images':>6} {'pixels':>6} {'decode':>9} {'step':>9}  " + " ".join(f"{name:>8}" for name in contenders)
          + f" {'needs':>6} {'plan':>5}")  # fmt: skip
    rows = []
    for images, pixels in CASES:
        files = photos_of(pixels)
        cost = DecodeCost(seconds_a_sample(Photos(files, images, 4), encoding), 4)
        compute = cost.seconds * BATCH / (given.workers * given.load)
        steps = FIRST + max(8, math.ceil(given.seconds / compute))
        photos = Photos(files, images, steps * BATCH)
        rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        for _ in range(given.rounds):
            for name, contender in contenders.items():
                with contender(photos, encoding, given.workers, steps) as batches:
                    rounds[name].append(waited(batches, compute, steps))
        stalls = {name: min(of_name)[0] for name, of_name in rounds.items()}
        needs = min(rounds["pool"])[1]
        rows.append(
            {"images": images, "pixels": pixels, "decode_seconds": cost.seconds, "compute_seconds": compute,
             "steps": steps - FIRST, "stall": stalls, "rounds": rounds, "needs": needs,
             "suffice": needs <= given.workers, "processors": cost.processors(BATCH / compute)}
        )  # fmt: skip
        cells = " ".join(f"{stall:>8.1%}" for stall in stalls.values())
        print(
            f"{images:>6} {pixels:>6} {cost.seconds * 1e3:>6.1f} ms {compute * 1e3:>6.0f} ms  {cells} {needs:>6.2f} "
            f"{rows[-1]['processors']:>5}",
            flush=True,
        )
        if given.json is not None:
            found = {"machine": machine(), "workers": given.workers, "rows": rows}
            given.json.write_text(json.dumps(found, indent=2))
    if connection is not None:
        connection.close()


if __name__ == "__main__":
    main()
