"""`data:` in the YAML file: where samples come from and how they become tokens."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from dilatant.config.base import Section

Column = Literal[
    "question",
    "answer",
    "input",
    "system",
    "history",
    "options",
    "tools",
    "images",
    "audios",
    "videos",
    "messages",
    "conversations",
    "texts",
]


class DataSource(Section):
    """One data set of a blend."""

    path: str | None = None
    """A file or folder (Parquet, JSON, JSONL, WebDataset tar, Arrow; also a pattern), relative to the YAML file."""
    id: str | None = None
    """A data set on the Hugging Face hub."""
    subset: str | None = None
    """The configuration of a data set on the hub, where it has several."""
    split: str | None = None
    """The split of a data set on the hub, or of a folder whose files or folders are named by splits. Default: `train`;
    a folder of several splits under `data.eval` needs the name of one."""
    media_dir: str | None = None
    """The folder that relative paths of media start from, relative to the YAML file. Default: the folder of the file
    that names them."""
    format: Literal["auto", "parquet", "jsonl", "llava", "webdataset", "arrow", "hub"] = "auto"
    """`auto` looks into the file."""
    weight: float = Field(1.0, gt=0)
    """Share of this source in the blend, relative to the other weights."""
    limit: int | None = Field(None, gt=0)
    """Use only the first samples."""
    name: str | None = Field(None, min_length=1)
    """What figures of this data set go by. Default: the last part of its path or id."""
    prompt: str | None = None
    """The question to ask where a sample has media and an answer but no question (captions, labels)."""
    columns: dict[Column, str] = Field(default_factory=dict)
    """Where your columns have other names: `{question: prompt_text, answer: category}`."""
    streaming: bool = False
    """Read a data set on the hub as it comes, without downloading all of it first."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.id is None):
            raise ValueError("give either 'path' (local files) or 'id' (a data set on the hub)")
        if self.streaming and self.id is None:
            raise ValueError("'streaming' is for data sets on the hub; local files are read by index")
        return self


class DataConfig(Section):
    train: tuple[DataSource, ...] = Field(min_length=1)
    eval: tuple[DataSource, ...] = ()
    """Held-out data, in the same form."""
    val_size: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Instead of `eval`: hold out samples of each data set of `train`, so many (from 1 on) or such a share of them
    (below 1), chosen by the seed. They are not trained on."""
    max_samples: int | None = Field(None, gt=0)
    """Use only the first samples of each data set of `train`, as `limit` of all of them."""
    chat_template: str = "auto"
    """`auto` (the tokenizer's own, else plain), `plain`, or a file with a Jinja template."""
    template_date: str | None = Field(None, pattern=r"^\d{4}-\d\d-\d\d$")
    """The day that a chat template writes (`strftime_now`), as `YYYY-MM-DD`, at midnight. Default: the day on which the
    run begins, which is kept with the run and its checkpoints."""
    train_on: Literal["assistant", "all"] = "assistant"
    """Which tokens carry loss."""
    max_length: int = Field(2048, gt=0)
    """Most tokens of one sample, media included. A longer sample is an error found by `dilatant data lint`."""
    truncation: Literal["error", "right"] = "error"
    """What becomes of longer samples to train on: `error` is as `on_error` says; `right` cuts off what is behind
    `max_length`, and an image or clip that lies across it whole. Held-out samples are never cut."""
    on_error: Literal["error", "skip"] = "error"
    """A corrupt sample stops the run and is named, or is skipped and counted."""
    workers: int | None = Field(None, ge=0)
    """Processes of each machine that decode and tokenize, for all its ranks together. Default: the cores that its ranks
    leave, at least one and at most eight a rank. 0 works in the training processes."""
    memory: int = Field(512, gt=0)
    """Most MiB of each rank for samples that are being made or lie ready: how far is read ahead."""
    decode_seconds: float = Field(60.0, ge=1, allow_inf_nan=False)
    """Longest that decoding a sample may take; one that takes longer, twice, is a corrupt sample."""
    preprocess: Literal["local", "ray"] = "local"
    """Who decodes: `local`, processes of each rank's machine; `ray`, those of a Ray cluster, whose machines see the
    data under the same paths. `workers` are then the most for all ranks together."""
    ray_address: str | None = None
    """HOST:PORT of a Ray cluster with token authentication, or `local`, one of the first rank's machine for the run.
    Default: `RAY_ADDRESS`, else `local`."""
    cache_dir: str | None = None
    """Where the index of records and sizes is kept. Default: the user's cache (`DILATANT_CACHE`, or
    `~/.cache/dilatant`)."""

    @model_validator(mode="after")
    def _one_way_to_hold_out(self) -> Self:
        if self.val_size is None:
            return self
        if self.eval:
            raise ValueError(
                "'eval' names held-out data and 'val_size' takes some of 'train'; give one of them"
            )
        if self.val_size > 1 and self.val_size != int(self.val_size):
            raise ValueError(
                f"'val_size' is a share below 1 or a whole number of samples (given: {self.val_size:g})"
            )
        if any(source.streaming for source in self.train):
            raise ValueError(
                "'val_size' needs data that are read by index; do not stream them, or name 'eval'"
            )
        return self

    @property
    def holds_out(self) -> bool:
        """Whether anything is there to be judged by."""
        return bool(self.eval) or self.val_size is not None
