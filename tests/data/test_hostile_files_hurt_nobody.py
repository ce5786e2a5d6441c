"""Damaged, odd and malicious data: each sample is named by lint and by training, or left out; the rest is used."""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
import warnings
from dataclasses import replace

import numpy as np
import pytest
import soundfile
from PIL import Image

from cases.data_builders import image_bytes, small_encoding, wav_bytes, write_lines, write_tar
from dilatant.config import DataSource, UserError
from dilatant.data.errors import SampleError
from dilatant.data.index.lint import lint
from dilatant.data.index.sizes import blend_sizes, measure
from dilatant.data.media.media_header import media_size
from dilatant.data.media.sound_file import decode_audio
from dilatant.data.order.blend import open_blend
from dilatant.data.parallel_map import map_ranges, piece_bounds
from dilatant.data.readers.reader import open_source
from dilatant.data.sample import Media, Sample, Turn
from dilatant.data.text.encode import encode_prompt
from harness.loader import Loader

ENCODING = replace(small_encoding(), max_length=1000)
GOOD = '{"question": "q", "answer": "fine"}'


def asked(kind, path):
    return json.dumps({"question": "q", "answer": "a", kind: path})


def wav_at_rate(rate):
    data = bytearray(wav_bytes())
    data[24:28] = rate.to_bytes(4, "little")
    return bytes(data)


def flac_of_many_samples():
    data = bytearray(wav_bytes(form="FLAC"))
    data[21] |= 0x0F
    data[22:26] = b"\xff" * 4  # the 36 bits of the header that count samples
    return bytes(data)


def float_wav(*odd):
    wave = np.zeros(1600, np.float32)
    wave[100 : 100 + len(odd)] = odd
    buffer = io.BytesIO()
    soundfile.write(buffer, wave, 16000, "FLOAT", format="WAV")
    return buffer.getvalue()


def saved(image, form):
    buffer = io.BytesIO()
    image.save(buffer, form)
    return buffer.getvalue()


FILES = {
    "claims.flac": flac_of_many_samples(),
    "slow.wav": wav_at_rate(1),
    "fast.wav": wav_at_rate(2**31 - 1),
    "nan.wav": float_wav(np.nan),
    "inf.wav": float_wav(np.inf, -np.inf),
    "line.png": saved(Image.new("L", (1, 60000)), "PNG"),
    "fractions.tif": saved(Image.fromarray(np.random.default_rng(0).random((8, 8), np.float32)), "TIFF"),
}
BAD = [
    (asked("audio", "claims.flac"), r"promises 68,719,476,735 samples in"),
    (asked("audio", "slow.wav"), r"has 1 samples a second"),
    (asked("audio", "fast.wav"), r"has 2,147,483,647 samples a second"),
    (asked("audio", "nan.wav"), r"no numbers"),
    (asked("audio", "inf.wav"), r"no numbers"),
    (asked("image", "line.png"), r"1 x 60000 pixels, a side more than 200 times"),
    (asked("image", "fractions.tif"), r"fractions"),
    (asked("image", "pipe"), r"no regular file"),
    (asked("image", "/dev/zero"), r"no regular file"),
    (asked("image", "."), r"cannot be opened|no regular file"),
    (asked("image", "nul\0.png"), r"cannot be opened"),
    (asked("image", "half\ud800.png"), r"cannot be opened"),
    (asked("image", "[/red].png"), r"does not exist"),
    ('{"question": "q \\ud800", "answer": "a"}', r"U\+D800, half a character"),
    ('{"question": "q", "answer": "a \\udfff"}', r"U\+DFFF, half a character"),
    ('{"question": "q", "answer": ' + "9" * 5000 + "}", r"not valid JSON"),
    ('{"question": "q", "answer": NaN}', r"'answer' is nan"),
    ('{"question": 1e400, "answer": "a"}', r"'question' is inf"),
    ('{"question": "q", "answer": "a", "more": ' + "[" * 100_000 + "]" * 100_000 + "}", r"nests too deep"),
    ('{"messages": "' + "[" * 100_000 + '"}', r"nests too deep"),
    ('{"texts": [{"user": "q", "assistant": null}]}', r"'assistant' is empty"),
    ('{"messages": [{"role": "' + "x" * 100_000 + '", "content": "a"}]}', r"has the role"),
]
DEEP = (r"no numbers",)
"""What only decoding finds."""


@pytest.fixture
def folder(tmp_path):
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


@pytest.fixture
def blend(folder):
    (folder / "x.jsonl").write_text("\n".join([GOOD, *(line for line, _ in BAD), GOOD]))
    return open_blend([DataSource(path=str(folder / "x.jsonl"))])


@pytest.mark.parametrize("deep", [True, False])
def test_lint_names_every_bad_sample_and_no_other(blend, deep):
    problems = lint(blend, ENCODING, deep=deep)
    expected = [at for at, (_, pattern) in enumerate(BAD, 1) if deep or pattern not in DEEP]
    assert [problem.index for problem in problems] == expected
    for problem in problems:
        assert problem.sample == f"x.jsonl:{problem.index + 1}"
        assert re.search(BAD[problem.index - 1][1], problem.problem), problem
        assert problem.remedy
        assert len(str(problem)) < 800
        assert str(problem).isprintable()


@pytest.mark.parametrize("workers", [0, 1])
def test_training_leaves_them_out_where_it_may(blend, workers):
    sampler = replace(blend.sampler(0, len(blend)), shuffle=False)
    with Loader(blend, ENCODING, sampler, steps=1, workers=workers, on_error="skip") as loader:
        (batch,) = loader
    assert [sample.id for sample in batch.samples] == ["x.jsonl:1", f"x.jsonl:{len(blend)}"]
    for problem, (_, pattern) in zip(batch.problems, BAD, strict=True):
        assert re.search(pattern, problem)


def test_their_sizes_are_reported_as_unknown(blend):
    index = measure(blend.readers[0], ENCODING)
    expected = [at for at, (_, pattern) in enumerate(BAD, 1) if pattern not in DEEP]
    assert list(index.problems) == expected


def test_a_json_array_with_bad_records_is_read_around_them(folder):
    lines = [line for line, _ in BAD if "[[[" not in line]
    records = [GOOD, '{"question": "q", "answer": "a", "score": NaN}', *lines, GOOD]
    (folder / "x.json").write_text("\ufeff[" + ",\r\n ".join(records) + "]\n", encoding="utf-8")
    blend = open_blend([DataSource(path=str(folder / "x.json"))])
    assert [problem.index for problem in lint(blend, ENCODING)] == list(range(2, 2 + len(lines)))


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ('[{"text": "a"}, {"text": ', "in record 2"),
        ('[{"text": "a"}', "is cut off"),
        ('[{"text": "a"},', "in record 2"),
        ('[{"text": "a"} {"text": "b"}]', "is cut off"),
        ('[{"text": "a"}]\n[{"text": "b"}]', "goes on after its JSON array"),
        ('[{"text": ' + "[" * 100_000 + "]" * 100_000 + "}]", "nests too deep in record 1"),
    ],
)
def test_a_json_array_that_is_none_is_refused_with_the_record(tmp_path, text, pattern):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match=pattern):
        open_source(DataSource(path=str(tmp_path / "x.json")))


def test_pipes_are_no_data_files(tmp_path):
    os.mkfifo(tmp_path / "x.jsonl")
    with pytest.raises(UserError, match="no regular file"):
        open_source(DataSource(path=str(tmp_path / "x.jsonl")))


@pytest.mark.parametrize("kept", [0.95, 0.6, 0.2])
def test_a_sound_that_ends_early_is_refused_wherever_it_ends(kept):
    noise = np.random.default_rng(0).standard_normal(16000) * 0.1
    for form in ("FLAC", "OGG", "MP3", "WAV", "AIFF"):
        buffer = io.BytesIO()
        soundfile.write(buffer, noise, 16000, format=form)
        whole = Media("audio", buffer.getvalue(), "x")
        cut = Media("audio", buffer.getvalue()[: int(kept * len(buffer.getvalue()))], "x")
        assert len(decode_audio(whole, 16000)) == round(media_size(whole).seconds * 16000)
        try:
            wave = decode_audio(cut, 16000)
        except UserError:
            continue
        # Ogg has no header that tells how long it is, and an MP3 one that often is of another file: what is there is
        # the sound.
        assert form in ("OGG", "MP3")
        assert len(wave) == round(media_size(cut).seconds * 16000)


def test_a_sound_is_decoded_in_pieces_and_long_ones_are_refused(monkeypatch):
    from dilatant.data.media import sound_file

    whole = decode_audio(Media("audio", wav_bytes(0.5, channels=2), "x"), 16000)
    monkeypatch.setattr(sound_file, "BLOCK_SAMPLES", 100)
    assert (decode_audio(Media("audio", wav_bytes(0.5, channels=2), "x"), 16000) == whole).all()
    monkeypatch.setattr(sound_file, "MAX_HOURS", 0.4 / 3600)
    with pytest.raises(UserError, match="lasts more than"):
        media_size(Media("audio", wav_bytes(0.5), "x"))


def test_hours_of_silence_in_a_small_file_are_sound_and_no_trick():
    """The densest honest file there is: 20 minutes of silence."""
    buffer = io.BytesIO()
    soundfile.write(buffer, np.zeros(20 * 60 * 8000, np.int16), 8000, format="FLAC")
    assert media_size(Media("audio", buffer.getvalue(), "x")).seconds == 1200


class Greedy:
    """A unit whose processor asks for more memory than there is."""

    def __getattr__(self, name):
        return getattr(ENCODING.units[0], name)

    def process(self, media, size):
        raise MemoryError


def test_a_sample_too_large_for_memory_is_a_sample_error():
    encoding = replace(ENCODING, units=(Greedy(),))
    picture = Media("image", image_bytes(), "x.png")
    sample = Sample("s:1", (Turn("user", (picture,)), Turn("assistant", ("a",))))
    with pytest.raises(SampleError, match=r"^s:1: the processor of 'vision' refuses image 'x.png': there is not"):
        encode_prompt(sample, encoding)


def tar_of(count, end=True):
    buffer = io.BytesIO()
    archive = tarfile.open(fileobj=buffer, mode="w")  # noqa: SIM115 - left open where it shall have no end
    for number in range(count):
        info = tarfile.TarInfo(f"{number:03}.txt")
        info.size = 700
        archive.addfile(info, io.BytesIO(b"a" * 700))
    if end:
        archive.close()
    return bytearray(buffer.getvalue())


MEMBER = 512 + 1024
"""Bytes of a member of `tar_of`: its header, and its data in whole blocks."""


def flipped(data, at):
    data[at] ^= 1
    return data


@pytest.mark.parametrize(
    "data",
    [
        tar_of(9)[: 5 * MEMBER],  # cut between two members
        tar_of(9)[: 5 * MEMBER + 100],  # cut in a header
        tar_of(9)[: 5 * MEMBER + 600],  # cut in the data
        flipped(tar_of(9), 5 * MEMBER + 3),  # a bit in a header
        tar_of(9)[: 5 * MEMBER] + bytes(512) + tar_of(9)[5 * MEMBER + 512 :],  # a header of zeros
        tar_of(9, end=False),
        tar_of(3) + tar_of(3),  # the second would never be read
    ],
)
def test_a_tar_is_read_to_its_end_or_refused(tmp_path, data):
    (tmp_path / "x.tar").write_bytes(data)
    with pytest.raises(UserError, match=r"^x.tar (is cut off|is damaged|cannot be read)"):
        open_source(DataSource(path=str(tmp_path / "x.tar")))


def test_a_tar_may_end_in_any_number_of_zeros(tmp_path):
    write_tar(tmp_path / "x.tar", {"a.txt": b"a"})
    whole = (tmp_path / "x.tar").read_bytes()
    for data in (whole, whole[:2048], whole + bytes(3 << 20)):
        (tmp_path / "x.tar").write_bytes(data)
        assert len(open_source(DataSource(path=str(tmp_path / "x.tar")))) == 1


TEXT = "{{ messages[0]['content'] }}"


@pytest.mark.parametrize(
    ("template", "pattern"),
    [
        ("{% for a in range(90000) %}{% for b in range(99999) %}{% endfor %}{% endfor %}" + TEXT, "takes more"),
        ("{{ 9 ** (9 ** 9) }}" + TEXT, "a value of more than"),
        ("{% set n = 3 %}{{ n ** (9 ** 9) }}" + TEXT, "a value of more than"),
        ("{{ 'a' * 3000000000 }}" + TEXT, "a value of more than"),
        ("{% set n = 3000000000 %}{{ 'a' * n }}" + TEXT, "a value of more than"),
        ("{{ '%03000000000d' % 1 }}" + TEXT, "takes more than 1024 MiB"),
        ("{{ 'a' * 2000000 }}" + TEXT, "makes more than"),
        ("{{ 1 / 0 }}" + TEXT, "does not write the text"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}" + TEXT, "does not write the text"),
    ],
)
def test_a_template_that_never_ends_or_fails_is_refused(tmp_path, template, pattern):
    (tmp_path / "x.jinja").write_text(template)
    with pytest.raises(UserError, match=pattern):
        small_encoding(template=str(tmp_path / "x.jinja"))


def test_a_template_failure_is_a_sample_error(tmp_path):
    (tmp_path / "x.jinja").write_text(
        "{% for m in messages %}{{ m['content'] }}{{ 1 / (m['content'] != 'z') }}{% endfor %}"
    )
    encoding = replace(small_encoding(template=str(tmp_path / "x.jinja"), units=()), train_on="all")
    path = write_lines(tmp_path / "x.jsonl", [{"text": "a"}, {"text": "z"}])
    (problem,) = lint(open_blend([DataSource(path=str(path))]), encoding)
    assert problem.sample == "x.jsonl:2"
    assert "division" in problem.problem


def test_held_out_samples_need_a_question(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", [{"question": "q", "answer": "a"}, {"text": "alone"}])
    blend = open_blend([DataSource(path=str(path))])
    assert lint(blend, ENCODING) == ()
    judged = replace(ENCODING, held_out=True)
    (problem,) = lint(blend, judged)
    assert problem.sample == "x.jsonl:2"
    assert blend_sizes(blend, judged).refused(None) == {1: str(problem)}
    assert blend_sizes(blend, ENCODING).refused(None) == {}
    with pytest.raises(SampleError, match=re.escape(problem.problem)):
        encode_prompt(blend[1], ENCODING)


def test_what_a_message_quotes_is_short_and_safe_to_print():
    error = SampleError("x\x1b[2J.jsonl:1", "holds \ud800 and\n" + "y" * 10_000, "remove it")
    assert str(error).isprintable()
    assert len(str(error)) < 600
    assert "\\x1b" in error.sample
    str(error).encode("utf-8")


def _warns(piece):
    warnings.warn("this image may be a bomb", RuntimeWarning, stacklevel=1)


def test_what_libraries_warn_of_in_workers_is_not_shown(capfd):
    assert len(list(map_ranges(_warns, piece_bounds(20, 1), 20, str, 1))) == 20
    assert capfd.readouterr().err == ""


def test_names_that_no_file_can_have_are_the_users_errors(tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    pattern = "{" + ",".join([*"012", *["0"] * 200]) + "}.jsonl"  # as a name, longer than any file system allows
    assert len(open_source(DataSource(path=str(tmp_path / pattern)))) == 3
    with pytest.raises(UserError, match="File name too long"):
        open_source(DataSource(path=str(tmp_path / ("x" * 300 + ".jsonl"))))
    with pytest.raises(UserError, match=r"'~nobody-has-this-name/x.jsonl' names no path"):
        open_source(DataSource(path="~nobody-has-this-name/x.jsonl"))
