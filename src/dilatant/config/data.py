"""The `data:` section of the YAML file: data sets and their conversion to tokens."""

from __future__ import annotations

from datetime import date
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from dilatant.config.base import AnyPath, DataPath, PathRule, Section

Column = Literal[
    "question",
    "answer",
    "chosen",
    "rejected",
    "kto_tag",
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
_SINGULAR = {"image": "images", "audio": "audios", "video": "videos", "conversation": "conversations"}


class DataSource(Section):
    """One data set of a blend."""

    path: DataPath | None = None
    """A file or folder (Parquet, JSON, JSONL, CSV, TSV, WebDataset tar, Energon, MDS, Arrow, COCO captions, VQA; also a
    pattern), a folder of media with a text beside each, or an address such as `s3://bucket/folder`."""
    id: str | None = None
    """A data set on the Hugging Face hub."""
    subset: str | None = None
    """The configuration of a data set on the hub that has several."""
    split: str | None = None
    """The split of a data set on the hub, or of a folder whose files or folders are named after splits. Default:
    `train`; required for a folder of several splits under `data.eval`."""
    media_dir: DataPath | None = None
    """The base folder of relative media paths. Default: the folder of the file that names the media."""
    format: Literal["auto", "parquet", "jsonl", "csv", "llava", "coco", "vqa", "webdataset", "energon", "mds", "arrow",
                    "hub"] = "auto"  # fmt: skip
    """The file format; `auto` detects it from the file."""
    weight: float = Field(1.0, gt=0)
    """Share of this source in the blend, relative to the other weights, whatever its size: small sources repeat."""
    limit: int | None = Field(None, gt=0)
    """Number of samples to use, from the first on."""
    name: str | None = Field(None, min_length=1)
    """Name of this data set in statistics. Default: the last part of its path or id."""
    prompt: str | None = None
    """The question of a sample that has media and an answer but no question (captions, labels)."""
    columns: dict[Column, str] = Field(default_factory=dict)
    """The names of your columns: `{question: prompt_text, answer: category}`."""
    streaming: bool = False
    """Read a data set on the hub as a stream, without downloading all of it first."""

    @field_validator("columns", mode="before")
    @classmethod
    def _as_read(cls, columns: Any) -> Any:
        """Take the singular of a column's name, too."""
        if not isinstance(columns, dict):
            return columns
        named = {_SINGULAR.get(name, name): own for name, own in columns.items()}
        if len(named) < len(columns):
            raise ValueError(f"one column is named twice: {', '.join(map(str, columns))}")
        return named

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.id is None):
            raise ValueError("give either 'path' (local files) or 'id' (a data set on the hub)")
        if self.streaming and self.id is None:
            raise ValueError("'streaming' is for data sets on the hub; local files are read by index")
        return self


class DataConfig(Section):
    train: tuple[DataSource, ...] = ()
    """Data sets to train on (required, unless `dilatant.train` gets one in Python)."""
    eval: tuple[DataSource, ...] = ()
    """Held-out data, in the same form."""
    val_size: float | None = Field(None, gt=0)
    """Instead of `eval`: hold out samples of each data set of `train`, either a number (1 or more) or a share (below
    1), chosen by the seed. Held-out samples are not trained on."""
    max_samples: int | None = Field(None, gt=0)
    """Number of samples to use of each data set of `train`, like a `limit` for all of them."""
    chat_template: Annotated[str, PathRule(("", "auto", "bytes", "plain"), is_id=True)] = "auto"
    """`auto` (the tokenizer's template, else `plain`), `plain`, or a file with a Jinja template."""
    system: str | None = Field(None, min_length=1)
    """System text of conversations that have a question and no system text of their own. An export does not hold it."""
    template_date: str | None = Field(None, pattern=r"^\d{4}-\d\d-\d\d$")
    """The date that a chat template prints (`strftime_now`), as `YYYY-MM-DD`, at midnight. Default: the day on which
    the run starts, which is stored with the run and its checkpoints."""
    train_on: Literal["assistant", "all"] = "assistant"
    """The tokens for which the loss is computed."""
    max_length: int = Field(2048, gt=0)
    """Maximum tokens of one sample, media included. `dilatant data lint` reports longer samples as errors."""
    truncation: Literal["error", "right"] = "error"
    """Treatment of longer training samples: `error` applies `on_error`; `right` cuts off all tokens after `max_length`,
    and the whole of an image or clip that crosses that limit. Held-out samples are never cut."""
    on_error: Literal["error", "skip"] = "error"
    """A corrupt sample stops the run with an error that names it (`error`), or is skipped and counted (`skip`)."""
    workers: int | None = Field(None, ge=0)
    """Worker processes per machine that decode and tokenize, shared by its ranks. Default: the cores that the ranks
    leave free, at least one and at most eight per rank. 0: decode in the training processes."""
    memory: int = Field(512, gt=0)
    """Maximum MiB per rank for samples that are being prepared or are ready; this bounds the prefetch."""
    decode_seconds: float = Field(60.0, ge=1)
    """Time limit for decoding a sample; after two timeouts (with `ray` three) the sample is treated as corrupt."""
    preprocess: Literal["local", "ray"] = "local"
    """`local` decodes in processes of each rank's machine; `ray` in those of a Ray cluster, whose machines must see the
    data under the same paths. With `ray`, `workers` is the total for all ranks."""
    ray_address: str | None = None
    """HOST:PORT of a Ray cluster with token authentication, or `local` for one that the first rank starts on its
    machine for this run. Default: `RAY_ADDRESS`, else `local`."""
    cache_dir: AnyPath | None = None
    """The folder for the index of records and sizes. Default: the user's cache (`DILATANT_CACHE`, or
    `~/.cache/dilatant`)."""

    @field_validator("template_date", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        """Take the date that YAML makes of a text without quotation marks."""
        return value.isoformat() if isinstance(value, date) else value

    @model_validator(mode="after")
    def _one_way_to_hold_out(self) -> Self:
        if self.val_size is None:
            return self
        if self.eval:
            raise ValueError("'eval' names held-out data and 'val_size' takes some of 'train'; give one of them")
        if self.val_size > 1 and self.val_size != int(self.val_size):
            raise ValueError(f"'val_size' is a share below 1 or a whole number of samples (given: {self.val_size:g})")
        if any(source.streaming for source in self.train):
            raise ValueError("'val_size' needs data that are read by index; do not stream them, or name 'eval'")
        return self
