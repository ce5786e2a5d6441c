"""Fine-tune a small vision-language model on one device, with Dilatant and with transformers' Trainer.

Both train all weights of the same LLaVA (random, saved once in the hub's layout), or adapters (`--lora`; (b) takes
peft's), in fp32, bf16 or FP8 (there (b) is in bf16), on the same samples in the same order, with AdamW. (a) is
`dilatant train` with its defaults; (b) is `Trainer` with the model's own class, in each of these ways:

    padded     samples as they come, `--padded-batch` at a time, padded to the longest
    by length  the samples of a step sorted by length first, as with its `group_by_length`
    packed     all of them in one row, separated by their positions, as by its padding-free collators

Both decode images in equally many worker processes, and they take steps alternately in one process, so that noise of
the machine affects both. Losses of the first steps must agree.

    python -m benchmarks.models.one_device_trainer --data chartqa_mini --json benchmarks/results/one_device_trainer.json

Each finished comparison is added to the file. Those that it has, of the same machine and settings, are not repeated, so
the six can be measured in several runs (`--case`, `--way`), and a stopped run can go on (`--again`: repeat all).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from benchmarks.machine import machine
from benchmarks.models.one_device import AGREEMENT as FP32_AGREEMENT
from benchmarks.models.one_device import BARS, Step, cases
from dilatant.config.memory_modes import Recompute

BAR = 1.3
"""Required speed-up over `padded`; over the other ways it is 1."""
WAYS = ("padded", "by length", "packed")
RANK, ALPHA = 16, 32
LANGUAGE_LAYERS = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
"""Modules that --lora adapts in (b); they are those that `model.lora` adapts."""
AGREEMENT = {"fp32": FP32_AGREEMENT, "bf16": 2e-2, "fp8": 5e-2}
"""bf16 has 8 bits: one rounding of a logit changes a loss by parts of 2**-8, and the two round in different places
(weights in bf16 with fp32 masters here, fp32 weights under autocast there). In FP8, whose numbers have 4 bits, logits
are off by a few parts of 2**-5 independently, and a loss is their mean; the Trainer stays in bf16."""


@dataclass(frozen=True)
class Size:
    """Widths of the LLaVA that is trained; a head of `1b` has 128 numbers, one of the others 64 or 32."""

    image: int
    patch: int
    vision: int
    vision_layers: int
    text: int
    text_layers: int
    feed_forward: int
    heads: tuple[int, int]


SIZES = {
    "tiny": Size(32, 16, 64, 2, 64, 2, 128, (2, 1)),
    "small": Size(128, 16, 128, 4, 256, 4, 704, (4, 2)),
    # The width of SigLIP so400m and of Qwen2.5-1.5B, about half as deep: two copies train in 80 GB.
    "1b": Size(336, 14, 1152, 12, 1536, 14, 8960, (12, 2)),
}


def save_model(folder: Path, size: Size) -> None:
    """Save a random LLaVA with a tokenizer of bytes; an image is (image / patch)² tokens."""
    from transformers import AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from dilatant.data.text.tokenizer import load_tokenizer

    settings = {
        "vision_config": {"model_type": "siglip_vision_model", "image_size": size.image, "patch_size": size.patch,
                          "hidden_size": size.vision, "intermediate_size": 4 * size.vision, "vision_use_head": False,
                          "num_hidden_layers": size.vision_layers, "num_attention_heads": max(4, size.vision // 72)},
        "text_config": {"model_type": "llama", "vocab_size": 300, "hidden_size": size.text,
                        "intermediate_size": size.feed_forward, "num_hidden_layers": size.text_layers,
                        "num_attention_heads": size.heads[0], "num_key_value_heads": size.heads[1],
                        "max_position_embeddings": 4096},
        "image_token_id": 299,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    }  # fmt: skip
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(CONFIG_MAPPING["llava"](**settings)).save_pretrained(folder)
    load_tokenizer("bytes").save_pretrained(str(folder))
    processor = {"image_processor_type": "SiglipImageProcessor", "size": {"height": size.image, "width": size.image},
                 "image_mean": [0.5] * 3, "image_std": [0.5] * 3}  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def tree(model: Path, data: Path, output: Path, settings: argparse.Namespace) -> dict[str, Any]:
    """Return the config of (a); all other settings are defaults."""
    adapters = {"lora": {"r": RANK, "lora_alpha": ALPHA}} if settings.lora else {}
    return {
        "output_dir": str(output),
        "model": {"id": str(model), **adapters},
        "data": {"train": [{"path": str(data)}], "workers": settings.workers},
        "train": {
            "steps": settings.warm_up + settings.steps,
            "global_batch_size": settings.batch,
            "schedule": {"kind": "constant"},
            "save_steps": None,
            "report_to": [],
            "precision": settings.precision,
            "compile": settings.compile,
            "recompute": settings.recompute,
            **({"optimizer": {"muon": {"weights": ["language"]}}} if settings.muon else {}),
        },
    }


def add_ways_to_train(parser: argparse.ArgumentParser) -> None:
    """Add the options of `tree` that choose how the model trains."""
    parser.add_argument("--lora", action="store_true", help="train adapters of the language model alone")
    parser.add_argument("--compile", choices=("blocks", "none"), default="none", help="train.compile of Dilatant")
    parser.add_argument("--recompute", choices=get_args(Recompute), default="none", help="train.recompute of Dilatant")
    parser.add_argument("--muon", action="store_true", help="Dilatant updates matrices by Muon")


class Turns:
    """Two loops in one process, of which one takes a step at a time while the other waits."""

    def __init__(self) -> None:
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._ended = False

    def give(self) -> None:
        """Let the other loop take a step, and wait for it."""
        if not self._ended:
            self._go.release()
            self._done.acquire()

    def take(self) -> None:
        """Wait for a turn; the other loop calls this before each step but the first, for which `begin` waits."""
        self._done.release()
        self._go.acquire()

    def begin(self) -> None:
        self._go.acquire()

    def leave(self) -> None:
        """Let the other loop end, if it waits for a turn after its last step."""
        self._go.release()

    def end(self) -> None:
        self._ended = True
        self._done.release()


class Rows(torch.utils.data.Dataset):
    """Data set of the Trainer, whose workers decode the samples."""

    def __init__(self, samples: Any, encoding: Any, order: Sequence[int]) -> None:
        self._samples, self._encoding, self._order = samples, encoding, order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> dict[str, Any]:
        from dilatant.data.media.pixels import as_array
        from dilatant.data.text.encode import encode_sample

        sample = encode_sample(self._samples[self._order[index]], self._encoding)
        return {
            "input_ids": torch.from_numpy(sample.input_ids),
            "labels": torch.from_numpy(sample.labels),
            "pixel_values": torch.as_tensor(as_array(sample.media["vision"]["pixel_values"])),
        }


def pad(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Collate rows into a batch, padded on the right."""
    sequence = nn.utils.rnn.pad_sequence
    ids = [row["input_ids"] for row in rows]
    return {
        "input_ids": sequence(ids, batch_first=True),
        "labels": sequence([row["labels"] for row in rows], True, -100),
        "attention_mask": sequence([torch.ones_like(one) for one in ids], batch_first=True),
        "pixel_values": torch.cat([row["pixel_values"] for row in rows]),
    }


def pack(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Collate rows into one packed row; a sample begins where positions begin again."""
    for row in rows:
        row["labels"][0] = -100
    return {
        "input_ids": torch.cat([row["input_ids"] for row in rows])[None],
        "labels": torch.cat([row["labels"] for row in rows])[None],
        "position_ids": torch.cat([torch.arange(len(row["input_ids"])) for row in rows])[None],
        "pixel_values": torch.cat([row["pixel_values"] for row in rows]),
    }


def order_of(way: str, samples: Any, sizes: Any, settings: argparse.Namespace, seed: int) -> list[int]:
    """Return the samples of all steps in the order of (a); for "by length", in each step by length."""
    sampler = samples.sampler(seed, settings.batch)
    batches = sampler.batches(sampler.start())
    steps = [next(batches)[0] for _ in range(settings.warm_up + settings.steps)]
    lengths = sizes.of("language")
    if way == "by length":
        steps = [sorted(step, key=lambda index: int(lengths[index])) for step in steps]
    return [index for step in steps for index in step]


def train_with_trainer(
    model: Path, rows: Rows, way: str, settings: argparse.Namespace, turns: Turns, steps: list[Step]
) -> None:
    """Train with the Trainer, one step per turn."""
    from transformers import AutoModelForImageTextToText, Trainer, TrainerCallback, TrainingArguments

    class Timed(TrainerCallback):
        began = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 0:
                self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seconds = time.perf_counter() - self.began
            steps.append(Step(float("nan"), seconds, settings.batch, 0))
            if len(steps) < settings.warm_up + settings.steps:
                turns.take()
            self.began = time.perf_counter()  # its wait for data counts, as ours does

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "loss" in logs:
                losses.append(float(logs["loss"]))

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(rows)

    losses: list[float] = []
    size = settings.padded_batch
    with tempfile.TemporaryDirectory() as output:
        arguments = TrainingArguments(
            output_dir=output, max_steps=settings.warm_up + settings.steps, per_device_train_batch_size=size,
            gradient_accumulation_steps=settings.batch // size, learning_rate=1e-4, lr_scheduler_type="constant",
            adam_beta2=0.95, weight_decay=0.01, max_grad_norm=1.0, logging_steps=1, save_strategy="no", report_to=[],
            dataloader_num_workers=settings.workers, disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
            remove_unused_columns=False, bf16=settings.precision != "fp32",
        )  # fmt: skip
        turns.begin()
        try:
            theirs = AutoModelForImageTextToText.from_pretrained(model)
            # With a cache transformers does not search a row for its samples.
            theirs.config.use_cache = theirs.config.text_config.use_cache = False
            if settings.lora:
                import peft

                theirs = peft.get_peft_model(
                    theirs, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=LANGUAGE_LAYERS)
                )
            InOrder(
                model=theirs,
                args=arguments,
                train_dataset=rows,
                data_collator=pack if way == "packed" else pad,
                callbacks=[Timed()],
            ).train()
        finally:
            turns.end()
    steps[:] = [Step(loss, s.seconds, s.samples, s.tokens) for loss, s in zip(losses, steps)]


def train_dilatant(
    config: Any, run: Any, output: Path, settings: argparse.Namespace, between: Callable[[], None]
) -> list[Step]:
    """Train with Dilatant, and call `between` after every step."""
    from dilatant.comm.launch import local_worker
    from dilatant.report.metrics import StepMetrics
    from dilatant.training.trainer import Trainer

    steps: list[Step] = []
    began = time.perf_counter()

    def observe(metrics: StepMetrics) -> None:
        nonlocal began
        seconds = time.perf_counter() - began
        steps.append(Step(metrics.loss, seconds, metrics.samples, metrics.tokens["language"]))
        between()
        began = time.perf_counter()

    trainer = Trainer(config, run.samples, run.model, run.planned, local_worker(), output / "checkpoints")
    try:
        trainer.run(observe)
    finally:
        trainer.close()
    return steps


def compare(
    name: str, way: str, model: Path, data: Path, scratch: Path, settings: argparse.Namespace
) -> dict[str, Any]:
    """Run both alternately on one case; print and return their speeds and the ratio."""
    from dilatant.config.config import parse_config
    from dilatant.training.prepare import prepare

    output = scratch / f"{name} {way}"
    output.mkdir()
    config = parse_config(tree(model, data, output, settings), output)
    run = prepare(config)
    samples = run.samples
    order = order_of(way, samples.train, samples.train_sizes, settings, config.seed)
    rows = Rows(samples.train, samples.encoding, order)
    turns, theirs = Turns(), []
    other = threading.Thread(target=train_with_trainer, args=(model, rows, way, settings, turns, theirs))
    other.start()
    ours = train_dilatant(config, run, output, settings, turns.give)
    other.join()
    if len(theirs) < len(ours):
        raise SystemExit(f"{name}, {way}: the Trainer took {len(theirs)} of {len(ours)} steps")
    # Adapters begin with other random numbers, and Muon has another update, which the second step sees.
    compared = 1 if settings.lora or settings.muon else 2
    differences = [abs(a.loss - b.loss) / abs(b.loss) for a, b in zip(ours[:compared], theirs[:compared])]
    timed = list(zip(ours, theirs))[settings.warm_up :]
    ratios = [b.seconds / a.seconds for a, b in timed]
    speeds = [statistics.median(s.samples / s.seconds for s in side) for side in zip(*timed)]
    bar = BAR if way == "padded" else 1.0
    print(
        f"{name:15} {way:10} dilatant {speeds[0]:7.2f} samples/s, Trainer {speeds[1]:7.2f}: "
        f"{statistics.median(ratios):.2f}x (median of {len(ratios)} pairs; {min(ratios):.2f} to {max(ratios):.2f}); "
        f"bar {bar}x; losses differ by {max(differences):.1e}",
        flush=True,
    )
    if max(differences) > AGREEMENT[settings.precision]:
        raise SystemExit(f"{name}, {way}: the losses differ, so the ratio means nothing: {differences}")
    return {
        "dilatant_samples_per_second": speeds[0],
        "trainer_samples_per_second": speeds[1],
        "ratio": {"median": statistics.median(ratios), "worst": min(ratios), "best": max(ratios), "bar": bar},
        "loss_difference": max(differences),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of chartqa_mini")
    parser.add_argument("--case", choices=BARS, action="append", help="default: both")
    parser.add_argument("--way", choices=WAYS, action="append", help="default: all")
    parser.add_argument("--steps", type=int, default=5, help="of each loop, that are timed after --warm-up")
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32, help="samples of an optimizer step")
    parser.add_argument("--padded-batch", type=int, default=8, help="samples that the Trainer runs at once")
    parser.add_argument("--size", choices=SIZES, default="small", help="of the model; 1b needs a GPU of 80 GB")
    parser.add_argument("--precision", choices=AGREEMENT, default="fp32")
    add_ways_to_train(parser)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--again", action="store_true", help="also what the file has already")
    settings = parser.parse_args()
    settings.data = settings.data.resolve()
    if not any(settings.data.glob("*.parquet")):
        print(f"skipped: {settings.data} holds no Parquet files of chartqa_mini")
        return
    report = report_of(settings)
    results = report["cases"]
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        save_model(scratch / "model", SIZES[settings.size])
        for name, data in cases(settings.data, scratch / "charts"):
            for way in WAYS:
                if name not in (settings.case or BARS) or way not in (settings.way or WAYS):
                    continue
                if way in results.get(name, {}) and not settings.again:
                    print(f"{name:15} {way:10} is in {settings.json} already")
                    continue
                found = compare(name, way, scratch / "model", data, scratch, settings)
                results.setdefault(name, {})[way] = found
                if settings.json:
                    settings.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def report_of(settings: argparse.Namespace) -> dict[str, Any]:
    """Return the file's report if it is of this machine and these settings, otherwise one without cases."""
    apart = ("data", "json", "case", "way", "again")
    report = {
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "settings": {key: value for key, value in vars(settings).items() if key not in apart},
        "cases": {},
    }
    if settings.json and settings.json.is_file():
        before = json.loads(settings.json.read_text(encoding="utf-8"))
        if all(before.get(key) == report[key] for key in report if key != "cases"):
            return before
    return report


if __name__ == "__main__":
    main()
