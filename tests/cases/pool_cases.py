"""Samples that fail in ways which a test of the pool chooses, and requests for them."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from cases.data_builders import image_bytes, small_encoding, wav_bytes
from dilatant.data.errors import SampleError
from dilatant.data.media.pixels import as_array
from dilatant.data.sample import Media, Sample, Turn
from dilatant.data.text.encoding import TOKENS
from dilatant.data.workers.pool import SampleRequest

ENCODING = small_encoding()
ALL = frozenset({TOKENS, "vision", "audio"})
PLENTY = 1 << 24
IMAGE = image_bytes()
SOUND = wav_bytes(0.25)


@dataclass(frozen=True)
class Numbered:
    """Samples that contain their number. seconds: time to read one. hangs, ends, corrupt: numbers of samples that hang
    in C code, kill their process, are refused. log: records all reads, of which the first `fails` are I/O errors."""

    seconds: float = 0.0
    hangs: frozenset[int] = frozenset()
    ends: frozenset[int] = frozenset()
    corrupt: frozenset[int] = frozenset()
    log: Path | None = None
    fails: int = 0
    length: int = 10_000

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{index}\n")
            if len(self.log.read_text().split()) <= self.fails:
                raise OSError(5, "Input/output error")
        time.sleep(self.seconds)
        if index in self.hangs:
            ctypes.PyDLL(None).sleep(1000)  # holds the interpreter, as a decoder may
        if index in self.ends:
            os.kill(os.getpid(), signal.SIGKILL)
        if index in self.corrupt:
            raise SampleError(f"file:{index}", "is corrupt", "mend it")
        items: list[str | Media] = [Media("image", IMAGE, "a"), Media("audio", SOUND, "b")]
        return Sample(f"file:{index}", (Turn("user", (*items[: index % 3], "q")), Turn("assistant", (str(index),))))


def requests(numbers: range | list[int], **settings: object) -> list[SampleRequest]:
    """Return requests for these samples; each draw number is the sample number plus 100."""
    return [SampleRequest(number + 100, number, ALL, **settings) for number in numbers]  # type: ignore[arg-type]


def contents(sample: object) -> object:
    return (
        sample.id, sample.draw, sample.input_ids.tolist(), sample.labels.tolist(), dict(sample.sizes),
        {unit: {name: (type(value), value.shape, as_array(value).tobytes()) for name, value in inputs.items()}
         for unit, inputs in sample.media.items()},
    )  # fmt: skip


def is_alive(pid: int) -> bool:
    """Return True if the process exists and is not a zombie."""
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
