"""Latents that are kept are those of the picture, whole, or they are not there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dilatant.config import UserError
from dilatant.data.errors import MediaError
from dilatant.data.media_units.image_target import Latents
from dilatant.data.sample import Media

SHAPE = (2, 4, 3, 3)


def picture(name: str, content: bytes) -> Media:
    return Media("image", content, name)


def values(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32)


def test_they_are_found_by_what_is_in_the_file_whatever_its_name(tmp_path: Path) -> None:
    latents = Latents(tmp_path, SHAPE)
    key = latents.key_of(picture("a", b"one"))
    latents.keep(key, values(0).transpose(0, 1, 3, 2))  # memory with gaps
    found = latents.load(picture("b", b"one"))
    assert found is not None
    assert np.array_equal(found, values(0).transpose(0, 1, 3, 2)[None])
    assert latents.load(picture("a", b"two")) is None
    assert Latents(tmp_path, (1, 4, 3, 3)).load(picture("a", b"one")) is None
    assert Latents(tmp_path / "other", SHAPE).load(picture("a", b"one")) is None
    with pytest.raises(MediaError, match="does not exist"):
        latents.load(Media("image", tmp_path / "gone.png", "gone"))


def foreign(whole: bytes, other: bytes) -> bytes:
    return other


def cut_off(whole: bytes, other: bytes) -> bytes:
    return whole[: len(whole) // 2]


def damaged(whole: bytes, other: bytes) -> bytes:
    return whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:]


def no_file_of_weights(whole: bytes, other: bytes) -> bytes:
    return b"\xff" * 64


@pytest.mark.parametrize("harm", [foreign, cut_off, damaged, no_file_of_weights])
def test_what_was_harmed_is_not_there_and_the_next_start_looks(
    tmp_path: Path, harm: Callable[[bytes, bytes], bytes]
) -> None:
    latents, one, two = Latents(tmp_path, SHAPE), picture("a", b"one"), picture("b", b"two")
    for number, media in enumerate((one, two)):
        latents.keep(latents.key_of(media), values(number))
    latents.note_whole("data")
    assert latents.is_whole("data")
    assert not latents.is_whole("others")
    files = {file.stem: file for file in tmp_path.rglob("*.safetensors")}
    first, second = (files[latents.key_of(media)] for media in (one, two))
    first.write_bytes(harm(first.read_bytes(), second.read_bytes()))
    assert latents.load(two) is not None
    assert latents.is_whole("data")
    assert latents.load(one) is None
    assert not latents.is_whole("data")
    latents.keep(latents.key_of(one), values(0))
    assert latents.load(one) is not None


def test_an_unwritable_latent_folder_leaves_no_partial_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match=r"set 'data\.cache_dir' to a folder with room"):
        Latents(tmp_path / "file", SHAPE).keep("ab12", values(0))
    assert [*tmp_path.rglob("*")] == [tmp_path / "file"]
