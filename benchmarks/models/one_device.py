"""One process on one device against a plain loop over transformers' models that pads.

Both train the same small vision transformer and Llama from the same weights, on the same samples in the same order,
with AdamW in fp32. (a) is `dilatant train` with its defaults; (b) collates a padded batch in a torch DataLoader. Both
decode their images in as many worker processes, and take their steps in turn in one process, so that noise of the
machine and the decoding ahead fall on both. (b) is given its token ids ready-made, and collates `--padded-batch`
samples at a time, whose gradients add up to the same global batch. The losses of the first steps must agree.

Two cases: the charts and questions as they are, and the same with every fourth answer made long, so that lengths differ
twenty-fold.

    python -m benchmarks.models.one_device --data chartqa_mini --json benchmarks/results/one_device.json
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.machine import machine

IMAGE, WIDTH = 128, 256
BARS = {"as they are": 1.0, "lengths differ": 1.2}
AGREEMENT = 1e-3
"""Relative difference of the losses of the first steps: fp32 sums in another order, through updates of AdamW, which
divides by the size of a gradient that may be mostly rounding."""


@dataclass(frozen=True)
class Step:
    """One step of either loop; tokens of the language model, without padding."""

    loss: float
    seconds: float
    samples: int
    tokens: int


def tree(folder: Path, output: Path, settings: argparse.Namespace) -> dict[str, Any]:
    """The config of (a): everything that is not here is a default."""
    return {
        "output_dir": str(output),
        "model": {
            "encoders": {
                "vision": {
                    "kind": "image",
                    "config": {
                        "model_type": "siglip_vision_model",
                        "image_size": IMAGE,
                        "patch_size": 16,
                        "vision_use_head": False,
                        "hidden_size": WIDTH // 2,
                        "intermediate_size": WIDTH * 2,
                        "num_hidden_layers": 4,
                        "num_attention_heads": 4,
                    },
                }
            },
            "language_model": {
                "tokenizer": "bytes",
                "attn_implementation": settings.attention,
                "config": {
                    "model_type": "llama",
                    "hidden_size": WIDTH,
                    "intermediate_size": WIDTH * 11 // 4,
                    "num_hidden_layers": 4,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 2,
                    "max_position_embeddings": 2048,
                },
            },
        },
        "data": {"train": [{"path": str(folder)}], "workers": settings.workers},
        "train": {
            "steps": settings.warm_up + settings.steps,
            "global_batch_size": settings.batch,
            "schedule": {"kind": "constant"},
            "save_steps": None,
            "report_to": [],
            "compile": settings.compile,
        },
    }


def train_dilatant(folder: Path, settings: argparse.Namespace, between: Callable[[], None]) -> list[Step]:
    """Train by Dilatant, with `between` after every step. A step is timed from one to the next, its wait for data and
    its metrics included."""
    from dilatant.comm.launch import local_worker
    from dilatant.config.config import parse_config
    from dilatant.report.metrics import StepMetrics
    from dilatant.training.prepare import prepare
    from dilatant.training.trainer import Trainer

    steps: list[Step] = []
    began = time.perf_counter()

    def observe(metrics: StepMetrics) -> None:
        nonlocal began
        seconds = time.perf_counter() - began
        steps.append(Step(metrics.loss, seconds, metrics.samples, metrics.tokens["language"]))
        between()
        began = time.perf_counter()

    with tempfile.TemporaryDirectory() as output:
        config = parse_config(tree(folder, Path(output), settings), Path(output))
        run = prepare(config)
        trainer = Trainer(config, run.samples, run.model, run.planned, local_worker(), Path(output) / "checkpoints")
        try:
            trainer.run(observe)
        finally:
            trainer.close()
    return steps


class Charts(torch.utils.data.Dataset):
    """Images as encoded bytes, with token ids and labels."""

    def __init__(self, rows: Sequence[dict[str, Any]], texts: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.images = [row["images"][0]["bytes"] for row in rows]
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        from PIL import Image

        image = Image.open(io.BytesIO(self.images[index])).convert("RGB")
        pixels = np.asarray(image.resize((IMAGE, IMAGE), Image.Resampling.BICUBIC), np.float32)
        return torch.from_numpy((pixels / 255 - 0.5) / 0.5).permute(2, 0, 1), *self.texts[index]


def collate(samples: Sequence[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pixels, ids, labels and attention mask of a batch, padded on the right."""
    pixels, ids, labels = zip(*samples, strict=True)
    pad = nn.utils.rnn.pad_sequence
    mask = pad([torch.ones_like(part) for part in ids], batch_first=True)
    return torch.stack(pixels), pad(ids, batch_first=True), pad(labels, True, -100), mask


class Padded(nn.Module):
    """An encoder, a projector and a language model, as one writes them down."""

    def __init__(self, encoder: nn.Module, projector: nn.Module, language: Any, image_id: int) -> None:
        super().__init__()
        self.encoder, self.projector, self.language = encoder, projector, language
        self.image_id = image_id

    def forward(self, pixels: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        rows = self.projector(self.encoder(pixel_values=pixels).last_hidden_state).flatten(0, 1)
        places = ids == self.image_id
        hidden = self.language.get_input_embeddings()(ids.masked_fill(places, 0))
        hidden = hidden.masked_scatter(places[..., None], rows)
        return self.language(inputs_embeds=hidden, attention_mask=mask, use_cache=False).logits


def train_padded(folder: Path, settings: argparse.Namespace) -> Iterator[Step]:
    """Train by the plain loop, from the weights that (a) starts from; yields after every step."""
    from dilatant.config.config import parse_config
    from dilatant.data.text.encode import encode_sample
    from dilatant.planning.assemble import assemble_model, assemble_samples

    config = parse_config(tree(folder, folder, settings), folder)
    samples = assemble_samples(config)
    model = assemble_model(config, samples.tokenizer, samples.encoding)
    vision, language = model["vision"], model.language.model
    language.set_attn_implementation("sdpa")
    plain = Padded(vision.model, vision.projector, language, model.placeholder_ids["vision"]).train()
    encoded = [encode_sample(samples.train[index], samples.encoding) for index in range(len(samples.train))]
    texts = [(torch.from_numpy(sample.input_ids), torch.from_numpy(sample.labels)) for sample in encoded]
    targets = [int((labels[1:] != -100).sum()) for _, labels in texts]
    sampler = samples.train.sampler(config.seed, settings.batch)
    order = sampler.batches(sampler.start())
    steps = [next(order)[0] for _ in range(settings.warm_up + settings.steps)]
    size = settings.padded_batch
    parts = [step[at : at + size] for step in steps for at in range(0, len(step), size)]
    loader = torch.utils.data.DataLoader(
        Charts(read(folder), texts), batch_sampler=parts, collate_fn=collate, num_workers=settings.workers
    )
    chosen = config.train.optimizer
    decays = [p for p in plain.parameters() if p.ndim >= 2]
    others = [p for p in plain.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decays}, {"params": others, "weight_decay": 0.0}],
        lr=chosen.learning_rate,
        betas=chosen.betas,
        eps=chosen.eps,
        weight_decay=chosen.weight_decay,
        fused=True,
    )
    batches = iter(loader)
    for step in steps:
        began = time.perf_counter()
        total = sum(targets[index] for index in step)
        loss = 0.0
        for _ in range(0, len(step), size):
            pixels, ids, labels, mask = next(batches)
            logits = plain(pixels, ids, mask)
            part = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
            (part / total).backward()
            loss += part.item() / total
        nn.utils.clip_grad_norm_(plain.parameters(), config.train.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - began
        yield Step(loss, seconds, len(step), sum(len(texts[index][0]) for index in step))


def read(folder: Path) -> list[dict[str, Any]]:
    """The rows of all Parquet files of a folder, in the order of their names."""
    import pyarrow.parquet as pq

    return [row for path in sorted(folder.glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def cases(data: Path, scratch: Path) -> Iterator[tuple[str, Path]]:
    """A folder with the rows as they are, and one where every fourth has an answer of up to 1,600 letters."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    yield "as they are", data
    rows = read(data)
    letters = " ".join(turn["user"] for row in rows for turn in row["texts"])
    random = np.random.default_rng(0)
    changed = []
    for number, row in enumerate(rows):
        turn = row["texts"][0]
        answer, question = turn["assistant"], turn["user"][:24]
        if number % 4 == 0:
            begin = int(random.integers(0, len(letters) - 1600))
            answer = letters[begin : begin + int(np.exp(random.uniform(np.log(400), np.log(1600))))]
        changed.append({"images": row["images"], "texts": [{"user": question, "assistant": answer}]})
    scratch.mkdir()
    pq.write_table(pa.Table.from_pylist(changed), scratch / "charts.parquet")
    yield "lengths differ", scratch


def compared(name: str, ours: Sequence[Step], others: Sequence[Step], warm_up: int, bar: float) -> dict[str, Any]:
    """Return how much faster `ours` are, pair by pair behind the warm-up, and what both did in a second. Exits where
    the first losses differ, since they must train alike."""
    assert all((a.samples, a.tokens) == (b.samples, b.tokens) for a, b in zip(ours, others, strict=True))
    difference = max(abs(a.loss - b.loss) / abs(b.loss) for a, b in zip(ours[:3], others[:3], strict=True))
    pairs = list(zip(ours, others, strict=True))[warm_up:]
    ratios = [b.seconds / a.seconds for a, b in pairs]
    print(
        f"{name:15} {statistics.median(ratios):.2f}x (median of {len(ratios)} pairs of steps; worst "
        f"{min(ratios):.2f}x, best {max(ratios):.2f}x); bar {bar}x; losses differ by {difference:.1e}",
        flush=True,
    )
    if difference > AGREEMENT:
        raise SystemExit(f"{name}: the losses differ by {difference}, so the ratio means nothing")
    return {
        "ratio": {"median": statistics.median(ratios), "worst": min(ratios), "best": max(ratios), "bar": bar},
        "loss_difference": difference,
    }


def compare(name: str, folder: Path, settings: argparse.Namespace) -> dict[str, Any]:
    """Run both loops in turn on one case; print and return their speeds and ratios."""
    padded: list[Step] = []
    plain = train_padded(folder, settings)
    ours = train_dilatant(folder, settings, lambda: padded.append(next(plain)))
    speeds: dict[str, dict[str, float]] = {}
    for way, steps in (("dilatant", ours[settings.warm_up :]), ("padded", padded[settings.warm_up :])):
        speeds[way] = {
            f"{what}_per_second": statistics.median(getattr(step, what) / step.seconds for step in steps)
            for what in ("samples", "tokens")
        }
        print(
            f"{name:15} {way:9} {speeds[way]['samples_per_second']:8.2f} samples/s "
            f"{speeds[way]['tokens_per_second']:9.0f} tokens/s"
        )
    return {**speeds, **compared(name, ours, padded, settings.warm_up, BARS[name])}


def options(description: str) -> argparse.ArgumentParser:
    """Return the options of a benchmark that trains the model of this file."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of chartqa_mini")
    parser.add_argument("--case", choices=BARS, action="append", help="default: all")
    parser.add_argument("--steps", type=int, default=12, help="of each loop, that are timed after --warm-up")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32, help="samples of an optimizer step")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--attention", help="attn_implementation of Dilatant's model, to compare with its default")
    parser.add_argument("--json", type=Path)
    return parser


def run(settings: argparse.Namespace, compare_case: Callable[[str, Path, argparse.Namespace], dict[str, Any]]) -> None:
    """Compare in every chosen case, and write the results."""
    if not any(settings.data.glob("*.parquet")):
        print(f"skipped: {settings.data} holds no Parquet files of chartqa_mini")
        return
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, folder in cases(settings.data, Path(scratch) / "charts"):
            if settings.case is None or name in settings.case:
                results[name] = compare_case(name, folder, settings)
    if settings.json:
        chosen = {key: value for key, value in vars(settings).items() if key not in ("data", "json")}
        report = {"machine": machine(), "threads": torch.get_num_threads(), "settings": chosen, "cases": results}
        settings.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = options(str(__doc__))
    parser.add_argument("--padded-batch", type=int, default=8, help="samples that the plain loop runs at once")
    parser.add_argument("--compile", choices=("blocks", "none"), default="none", help="train.compile of (a)")
    run(parser.parse_args(), compare)


if __name__ == "__main__":
    main()
