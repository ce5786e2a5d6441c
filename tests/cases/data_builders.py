"""Small media, files and encodings for the tests of the data room."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from dilatant.data.media_units.audio_unit import AudioUnit, LogMelProcessor
from dilatant.data.media_units.image_unit import ImageUnit, PixelProcessor
from dilatant.data.text.chat import chat_tokenizer
from dilatant.data.text.encoding import Encoding
from dilatant.data.text.tokenizer import byte_tokenizer

IMAGE_ID, AUDIO_ID = 300, 301


def shared(relative: str, unchecked: str) -> Path:
    """A file of the shared test data, or a skip that says what is not checked without it."""
    default = Path(__file__).resolve().parents[2].parent / "shared"
    path = Path(os.environ.get("DILATANT_SHARED", default)) / relative
    if not path.exists():
        pytest.skip(f"no {path}: {unchecked} is not checked")
    return path


def image_bytes(width: int = 8, height: int = 8, form: str = "PNG", seed: int = 0, mode: str = "RGB") -> bytes:
    """Noise, so that a cut file is really missing something."""
    channels = len(Image.new(mode, (1, 1)).getbands())
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)
    image = Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels, mode)
    buffer = io.BytesIO()
    image.save(buffer, form)
    return buffer.getvalue()


def wav_bytes(seconds: float = 0.5, rate: int = 16000, channels: int = 1, form: str = "WAV") -> bytes:
    time = np.arange(round(seconds * rate)) / rate
    wave = 0.3 * np.sin(2 * np.pi * 440 * time)
    buffer = io.BytesIO()
    soundfile.write(buffer, np.stack([wave] * channels, axis=1), rate, format=form)
    return buffer.getvalue()


def write_lines(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def small_encoding(**settings: Any) -> Encoding:
    """Bytes as tokens; 4 tokens for an image; 5 in the encoder and 3 merged for 0.1 s of sound."""
    template = settings.pop("template", "auto")
    units = settings.pop(
        "units",
        (
            ImageUnit("vision", IMAGE_ID, 4, PixelProcessor(8, 8)),
            AudioUnit("audio", AUDIO_ID, 5, LogMelProcessor(window_frames=10, mel_bins=16), merged_per_window=3),
        ),
    )
    tokenizer = settings.pop("tokenizer", None) or byte_tokenizer()
    return Encoding(chat_tokenizer(tokenizer, template), units, **settings)
