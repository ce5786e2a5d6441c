"""Records with a chosen and a rejected answer are read in every form, and become two sequences with one prompt."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cases.data_builders import IMAGE_ID, image_bytes, small_encoding
from dilatant.config import UserError
from dilatant.config.data import DataSource
from dilatant.data.errors import SampleError
from dilatant.data.order.blend import open_blend
from dilatant.data.readers.reader import HeldOutSplit, Reader, open_source
from dilatant.data.readers.record_fields import FileRecord
from dilatant.data.readers.records import parse_record
from dilatant.data.sample import EncodedSample, Sample, Turn
from dilatant.data.text.encode import encode_prompt, encode_sample, find_problems, measure_sample
from dilatant.data.workers.pool_wire import Encoded, lay_out, pack_arrays, unpack_sample

ASKED = [{"role": "user", "content": "q"}]
BETTER, WORSE = {"role": "assistant", "content": "good"}, {"role": "assistant", "content": "bad"}
TALK = [*ASKED, {"role": "assistant", "content": "once"}, {"role": "user", "content": "more"}]
SEEN = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "q"}]}]
DRAWN = {"role": "assistant", "content": [{"type": "text", "text": "see"}, {"type": "image"}, {"type": "image"}]}
PICTURES = ["a.png", "b.png", "c.png"]
ROLES = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def sample_of(named: dict[str, str] | None = None, **fields: Any) -> Sample:
    return parse_record(FileRecord("x:1", Path("media"), fields), None, named)


def texts(turns: tuple[Turn, ...]) -> list[str]:
    return ["".join(part if isinstance(part, str) else "<medium>" for part in turn.content) for turn in turns]


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({"prompt": "q", "chosen": "good", "rejected": "bad"}, ["q"]),
        ({"question": "q", "image": "a.png", "chosen": "good", "rejected": "bad"}, ["q"]),
        ({"instruction": "q", "input": "x", "chosen": "good", "rejected": "bad"}, ["q\nx"]),
        ({"prompt": "q", "chosen": "good", "rejected": "bad", "system": "s"}, ["s", "q"]),
        ({"prompt": ASKED, "chosen": [BETTER], "rejected": [WORSE]}, ["q"]),
        ({"prompt": ASKED, "chosen": {"role": ["assistant"], "content": ["good"]}, "rejected": [WORSE]}, ["q"]),
        ({"chosen": [*ASKED, BETTER], "rejected": [*ASKED, WORSE]}, ["q"]),
        ({"prompt": "q", "messages": [*ASKED, BETTER], "chosen": [*ASKED, BETTER], "rejected": [*ASKED, WORSE]}, ["q"]),
        ({"chosen": [*TALK, BETTER], "rejected": [*TALK, WORSE]}, ["q", "once", "more"]),
        ({"chosen": "Say it: good", "rejected": "Say it: bad"}, ["Say it:"]),
        (
            {"conversations": [{"from": "human", "value": "q"}], "chosen": {"from": "gpt", "value": "good"},
             "rejected": {"from": "gpt", "value": "bad"}},
            ["q"],
        ),
        ({"messages": [*TALK, BETTER], "rejected_response": "bad"}, ["q", "once", "more"]),
        ({"chosen": json.dumps([*ASKED, BETTER]), "rejected": str([*ASKED, WORSE])}, ["q"]),
        ({"prompt": "q", "chosen": str([BETTER]), "rejected": json.dumps([WORSE])}, ["q"]),
        ({"messages": [*ASKED, BETTER], "rejected_messages": [*ASKED, WORSE]}, ["q"]),
    ],
)  # fmt: skip
def test_every_form_of_a_pair_is_understood(fields: dict[str, Any], asked: list[str]) -> None:
    sample = sample_of(**fields)
    assert texts(sample.turns) == [*asked, "good"]
    assert texts(sample.rejected) == [*asked, "bad"]
    carries = [turn.carries_loss for turn in sample.turns if turn.role == "assistant"]
    assert carries == [False] * (len(carries) - 1) + [True]
    assert [media.name for media in sample.unplaced] == (["a.png"] if "image" in fields else [])


def test_columns_of_a_pair_may_be_named() -> None:
    sample = sample_of({"chosen": "best", "rejected": "worst"}, question="q", best="good", worst="bad", other=1)
    assert (texts(sample.turns), texts(sample.rejected)) == (["q", "good"], ["q", "bad"])
    assert sample.unused == ("other",)
    assert sample_of({"answer": "chosen"}, question="q", chosen="good", rejected="bad").rejected == ()


def test_pictures_of_typed_content_are_those_of_both_answers() -> None:
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "q"}]}]
    sample = sample_of(chosen=[*asked, BETTER], rejected=[*asked, WORSE], images=["a.png"])
    assert sample.turns[0] == sample.rejected[0]
    assert texts(sample.turns) == ["<medium>q", "good"]


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"prompt": "q", "chosen": "good"}, "no rejected one"),
        ({"prompt": "q", "rejected": "bad"}, "no chosen one"),
        ({"prompt": "q", "chosen": "good", "rejected": "good"}, "are equal"),
        ({"chosen": "good", "rejected": "bad"}, "no prompt in common"),
        ({"chosen": [*ASKED, BETTER], "rejected": [*TALK[2:], WORSE]}, "no prompt in common"),
        ({"chosen": [*ASKED, BETTER], "rejected": ASKED}, "rejected conversation does not end with an answer"),
        ({"question": "p", "chosen": [*ASKED, BETTER], "rejected": [*ASKED, WORSE]}, "another one beside it"),
        ({"messages": TALK[1:], "chosen": [*ASKED, BETTER], "rejected": [*ASKED, WORSE]}, "another one beside it"),
        ({"prompt": "q", "chosen": [{"role": "assistant", "content": [{"type": "image", "image": "a.png"}]}],
          "rejected": "bad"}, "chosen answer holds media"),
        ({"prompt": SEEN, "chosen": [DRAWN], "rejected": [WORSE], "images": PICTURES}, "chosen answer holds media"),
        ({"prompt": SEEN, "chosen": [BETTER], "rejected": [DRAWN], "images": PICTURES}, "rejected answer holds media"),
        ({"prompt": SEEN, "chosen": [BETTER], "rejected": [WORSE], "images": PICTURES}, "fewer images than the record"),
        ({"prompt": SEEN, "chosen": [BETTER], "rejected": [WORSE], "images": []}, "more images than the record"),
        ({"prompt": TALK, "chosen": [*ASKED, BETTER], "rejected": [*ASKED, WORSE]}, "another one beside it"),
        ({"prompt": SEEN, "chosen": [{**BETTER, "role": "user"}], "rejected": [WORSE], "images": ["a.png"]},
         "another one beside it"),
        ({"prompt": "q", "chosen": "good", "rejected": {"score": 1}}, "has the role None"),
    ],
)  # fmt: skip
def test_a_record_that_is_no_pair_is_refused(fields: dict[str, Any], pattern: str) -> None:
    with pytest.raises(UserError, match=pattern) as caught:
        sample_of(**fields)
    assert len(str(caught.value)) < 400


def encoded_pair(shares: bool, template: str = "auto", talk: list[Any] = ASKED) -> tuple[EncodedSample, list[Any]]:
    """Return a pair with two pictures, and both of its conversations encoded as samples of their own."""
    pictures = [{"bytes": image_bytes(seed=seed)} for seed in range(2)]
    fields = {"images": pictures, "chosen": [*talk, BETTER], "rejected": [*talk, WORSE]}
    sample = sample_of(**fields)
    settings = {"template": template, "pairs": True, "shares_prompt": shares}
    encoding, plain = small_encoding(**settings), small_encoding(template=template)
    encoded = encode_sample(sample, encoding)
    sizes = measure_sample(sample, encoding)
    assert dict(sizes.tokens) == dict(encoded.sizes)
    assert (sizes.target_tokens, sizes.content) == (encoded.target_tokens, encoded.content_digest)
    assert not find_problems(sample, encoding, deep=True)
    alone = [encode_sample(Sample("x:1", turns, sample.unplaced), plain) for turns in (sample.turns, sample.rejected)]
    return encoded, alone


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("talk", [ASKED, TALK], ids=["question", "talk"])
def test_the_answers_of_a_pair_are_what_two_samples_would_be(shares: bool, talk: list[Any], tmp_path: Path) -> None:
    template = tmp_path / "roles.jinja"
    template.write_text(ROLES, encoding="utf-8")
    encoded, alone = encoded_pair(shares, str(template), talk)
    for sequence, sample in zip(encoded.sequences(), alone, strict=True):
        assert sequence.input_ids.tolist() == sample.input_ids.tolist()
        assert sequence.labels.tolist() == sample.labels.tolist()
    prompt = int(np.flatnonzero(alone[0].labels != -100)[0])
    assert encoded.shared_tokens == (prompt - 1 if shares else 0)
    assert int((encoded.input_ids == IMAGE_ID).sum()) == (8 if shares else 16)
    assert len(encoded.media["vision"]["pixel_values"]) == (2 if shares else 4)
    assert encoded.sizes["vision"] == (8 if shares else 16)


def test_a_pair_reaches_a_rank_as_it_was_encoded() -> None:
    encoded, _ = encoded_pair(True)
    places, arrays, nbytes = lay_out(encoded)
    answer = Encoded(1, encoded.id, dict(encoded.sizes), places, nbytes)
    received = unpack_sample(answer, 3, memoryview(pack_arrays(answer, arrays)))
    assert (received.branch, received.content_digest) == (encoded.branch, encoded.content_digest)


def test_preferences_are_learned_only_where_they_are_asked_for() -> None:
    pair = sample_of(prompt="q", chosen="good", rejected="bad")
    with pytest.raises(
        UserError, match=r"holds preferences, .*'train.preferences' learns from; set that, or name the answer"
    ):
        encode_sample(pair, small_encoding())
    with pytest.raises(UserError, match="has no rejected answer"):
        encode_sample(sample_of(prompt="q", completion="good"), small_encoding(pairs=True))
    own = Sample("x:1", (), encoded=EncodedSample("x", np.arange(3), np.arange(3)))
    with pytest.raises(UserError, match="pairs are read from records alone"):
        encode_sample(own, small_encoding(pairs=True))
    prompt = encode_prompt(pair, small_encoding())
    assert prompt.answer == "good"


@pytest.mark.parametrize(
    ("fields", "desired"),
    [
        ({"prompt": "q", "completion": "good", "label": True}, True),
        ({"prompt": ASKED, "completion": [WORSE], "label": False}, False),
        ({"messages": [*ASKED, WORSE], "kto_tag": False}, False),
        ({"instruction": "q", "output": "bad", "kto_tag": "False"}, False),  # as CSV has it
        ({"prompt": "q", "completion": "bad", "label": "FALSE"}, False),  # as spreadsheets write it
        ({"prompt": "q", "completion": "good", "label": True, "kto_tag": "true"}, True),
        ({"prompt": "q", "completion": "good", "label": "yes"}, None),
        ({"prompt": "q", "completion": "good", "label": 1}, None),
        ({"prompt": "q", "completion": "good"}, None),
        ({"question": "q", "label": True}, None),  # an answer itself
    ],
)
def test_the_mark_of_an_answer_is_read(fields: dict[str, Any], desired: bool | None) -> None:
    sample = sample_of(**fields)
    assert sample.desired is desired
    is_ignored = desired is None and len(fields) == 3
    assert sample.unused == (("label",) if is_ignored else ())


def test_the_column_of_marks_may_be_named() -> None:
    sample = sample_of({"kto_tag": "liked"}, prompt="q", completion="bad", liked=False)
    assert (sample.desired, sample.unused) == (False, ())


def marked(folder: Path, *records: dict[str, Any]) -> Reader:
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "marked.jsonl").write_text(lines, encoding="utf-8")
    return replace(open_source(DataSource(path=str(folder / "marked.jsonl"))), contrasts=True)


def test_a_marked_answer_stands_beside_that_of_the_record_before(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(image_bytes())
    reader = marked(
        tmp_path,
        {"image": "a.png", "prompt": "one", "completion": "1", "label": True},
        {"messages": [*TALK, BETTER], "kto_tag": False},
        {"prompt": "three", "completion": "3", "label": True},
    )
    assert [texts(sample.turns)[-1] for sample in map(reader.__getitem__, range(3))] == ["1", "good", "3"]
    assert [texts(sample.rejected) for sample in map(reader.__getitem__, range(3))] == [
        ["one", "3"],
        ["q", "once", "more", "1"],
        ["three", "good"],
    ]
    assert [turn.carries_loss for turn in reader[1].turns if turn.role == "assistant"] == [False, True]
    encoding = small_encoding(pairs=True, marks=True)
    sizes = [measure_sample(reader[number], encoding) for number in range(3)]
    assert [each.is_desired for each in sizes] == [True, False, True]
    encoded = encode_sample(reader[0], encoding)
    first = reader[0]
    conversations = [Sample("x", turns, first.unplaced) for turns in (first.turns, first.rejected)]
    alone = [encode_sample(each, small_encoding()) for each in conversations]
    for sequence, sample in zip(encoded.sequences(), alone, strict=True):
        assert sequence.input_ids.tolist() == sample.input_ids.tolist()
    held_out = replace(reader, split=HeldOutSplit(1, 0, held_out=False))
    assert {texts(sample.rejected)[-1] for sample in map(held_out.__getitem__, range(2))} == {
        texts(sample.turns)[-1] for sample in map(held_out.__getitem__, range(2))
    }  # answers that are held out are in no other sample


@pytest.mark.parametrize(
    ("record", "pattern"),
    [
        ({"prompt": "q", "completion": "good"}, r"no mark of its answer.*'label' \(or 'kto_tag'\), true or false"),
        ({"prompt": "q", "completion": "good", "label": "yes"}, "has no mark of its answer"),
        ({"prompt": "q", "chosen": "good", "rejected": "bad"}, "has two answers, and kto learns from single ones"),
        ({"messages": ASKED, "label": True}, "does not end with an answer"),
        (
            {
                "messages": [*ASKED, {"role": "assistant", "content": [{"type": "image", "image": "a.png"}]}],
                "label": True,
            },
            "its answer holds media; give media in the prompt",
        ),
        ({"prompt": "q", "label": True}, "'label' marks an answer, and there is none; give it in 'completion'"),
        ({"prompt": "q", "completion": None, "label": "false"}, "'label' marks an answer, and there is none"),
        ({"prompt": "q", "completion": "a", "label": True, "kto_tag": False}, "in 'label' and otherwise in 'kto_tag'"),
    ],
)
def test_records_without_a_marked_answer_are_refused(record: dict[str, Any], pattern: str, tmp_path: Path) -> None:
    encoding = small_encoding(pairs=True, marks=True)
    other = {"prompt": "p", "completion": "x", "label": False}
    with pytest.raises(UserError, match=pattern) as caught:
        encode_sample(marked(tmp_path, record, other)[0], encoding)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("answer", [None, ""])
def test_a_mark_beside_an_empty_answer_is_no_answer(answer: str | None) -> None:
    with pytest.raises(SampleError, match="'label' marks an answer, and there is none"):
        sample_of(prompt="q", completion=answer, label=True)


def test_an_unreadable_record_takes_no_other_out(tmp_path: Path) -> None:
    good = [{"prompt": f"{n}?", "completion": f"{n}", "label": n % 2 == 0} for n in range(5)]
    bad: list[dict[str, Any]] = [{"prompt": "q", "chosen": "a", "rejected": "b"}, {"messages": ASKED}, {"prompt": "q"}]
    marked(tmp_path, good[0], *bad, good[1], good[2], {"completion": {}}, good[3], bad[2])
    text = (tmp_path / "marked.jsonl").read_text(encoding="utf-8").splitlines()
    (tmp_path / "marked.jsonl").write_text("\n".join([*text[:2], "{broken", *text[2:]]) + "\n", encoding="utf-8")
    reader = replace(open_source(DataSource(path=str(tmp_path / "marked.jsonl"))), contrasts=True)
    others, refused = {}, []
    for number in range(len(reader)):
        try:
            others[number] = texts(reader[number].rejected)
        except SampleError as error:
            refused.append(error.sample)
    assert others == {0: ["0?", "3"], 5: ["1?", "0"], 6: ["2?", "1"], 8: ["3?", "2"]}
    assert refused == [f"marked.jsonl:{line}" for line in (2, 3, 4, 5, 8, 10)]


def test_answers_that_may_be_readable_again_are_waited_for(tmp_path: Path) -> None:
    # On another rank the same file may be there, and both have to compare with the same answer.
    class Shaky(list[Sample]):
        blocks = None

        def read(self, index: int) -> Sample:
            if index == 0:
                raise SampleError("0", "cannot be read", may_pass=True)
            return self[index]

        def name_of(self, index: int) -> str:
            return str(index)

    records = Shaky(sample_of(prompt="q", completion=text, label=True) for text in "abc")
    reader = replace(marked(tmp_path, {}, {}), records=records)
    assert texts(reader[2].rejected) == ["q", "b"]
    with pytest.raises(SampleError, match=r"^0: cannot be read"):
        reader[1]


def test_the_last_readable_answer_says_what_it_lacks(tmp_path: Path) -> None:
    reader = marked(tmp_path, {"prompt": "q"}, {"prompt": "q", "completion": "a", "label": True}, {"prompt": "q"})
    with pytest.raises(SampleError, match=r":2: kto compares .* no other record here has a usable one; correct the"):
        reader[1]


def test_a_source_of_one_marked_answer_is_refused(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": "q", "completion": "x", "label": mark}) + "\n" for mark in (True, False)]
    (tmp_path / "two.jsonl").write_text("".join(lines), encoding="utf-8")
    (tmp_path / "one.jsonl").write_text(lines[0], encoding="utf-8")
    blend = open_blend([DataSource(path=str(tmp_path / name)) for name in ("two.jsonl", "one.jsonl")])
    with pytest.raises(UserError, match=r"'one\.jsonl' has one record here, and kto compares its prompt with another"):
        blend.contrasted()


def test_bad_answers_are_learned_from_by_kto_alone() -> None:
    sample = sample_of(prompt="q", completion="bad", label=False)
    for encode in (encode_sample, encode_prompt, measure_sample):
        with pytest.raises(UserError, match=r"is marked as undesired .* set 'train\.preferences: {method: kto}'"):
            encode(sample, small_encoding())
    pair = sample_of(prompt="q", chosen="good", rejected="bad", label=False)
    with pytest.raises(UserError, match="is marked as undesired"):
        encode_sample(pair, small_encoding(pairs=True))


def test_answers_that_become_the_same_tokens_are_refused(tmp_path: Path) -> None:
    template = tmp_path / "trims.jinja"
    template.write_text(ROLES.replace("m.content }}{{ eos", "m.content | trim }}{{ eos"), encoding="utf-8")
    pair = sample_of(prompt="q", chosen="good", rejected=" good ")
    (problem,) = find_problems(pair, small_encoding(pairs=True, template=str(template)), deep=False)
    assert "become the same tokens" in str(problem)


def test_a_prompt_that_ends_with_a_picture_has_nothing_to_share_behind_it(tmp_path: Path) -> None:
    template = tmp_path / "bare.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}", encoding="utf-8")
    pair = sample_of(images=[{"bytes": image_bytes()}], chosen="good", rejected="bad")
    with pytest.raises(UserError, match=r"set 'train\.preferences\.share_prompt: false'"):
        encode_sample(pair, small_encoding(pairs=True, template=str(template)))
    assert encode_sample(pair, small_encoding(pairs=True, shares_prompt=False, template=str(template))).branch
