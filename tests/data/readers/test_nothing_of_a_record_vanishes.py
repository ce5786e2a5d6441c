"""Every column and key of a record is used, refused in a line that says what it is, or known as unused."""

from __future__ import annotations

import datetime
import decimal
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cases.data_builders import image_bytes, small_encoding, write_lines
from dilatant.config import DataSource, UserError
from dilatant.data.index.lint import unused_by_source, unused_lines
from dilatant.data.index.sizes import blend_sizes
from dilatant.data.media.clip import clip_size, decode_clip
from dilatant.data.order.blend import open_blend
from dilatant.data.readers.reader import open_source
from dilatant.data.readers.record_fields import FileRecord
from dilatant.data.readers.records import parse_record
from dilatant.data.sample import Frames, Media
from dilatant.data.text.encode import encode_prompt, encode_sample

QUESTION, ANSWER = "Which?", "seven"
CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
ROLES = (
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}<{{ m.reasoning_content }}>{% endif %}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def sample_of(named=None, **fields):
    return parse_record(FileRecord("x:1", Path("media"), fields), None, named)


def texts(sample):
    return [
        (turn.role, "".join(part if isinstance(part, str) else f"<{part.name}>" for part in turn.content))
        for turn in sample.turns
    ]


def learned(sample, template=None, **settings):
    encoding = small_encoding(units=(), **({"template": template} if template else {}), **settings)
    encoded = encode_sample(sample, encoding)
    return bytes(int(token) for token in encoded.labels if 0 <= token < 256).decode()


def refused(pattern, **fields):
    with pytest.raises(UserError, match=pattern) as caught:
        sample_of(**fields)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"instruction": "Sum up:", "input": "long text", "output": "short"},
            [("user", "Sum up:\nlong text"), ("assistant", "short")],
        ),
        ({"instruction": "Go.", "input": "", "output": "ok"}, [("user", "Go."), ("assistant", "ok")]),
        ({"input": "q", "output": "a"}, [("user", "q"), ("assistant", "a")]),
        (
            {"query": "3?", "response": "c", "history": [["1?", "a"], ["2?", "b"]], "system": "Count."},
            [("system", "Count."), ("user", "1?"), ("assistant", "a"), ("user", "2?"), ("assistant", "b"),
             ("user", "3?"), ("assistant", "c")],
        ),
        ({"query": "3?", "response": "c", "history": CHAT},
         [("user", "q"), ("assistant", "a"), ("user", "3?"), ("assistant", "c")]),
        ({"question": "q", "answer": "a", "context": "Once.", "hint": ""}, [("user", "Once.\nq"), ("assistant", "a")]),
        ({"conversations": {"from": ["human", "gpt"], "value": ["q", "a"]}}, [("user", "q"), ("assistant", "a")]),
        ({"messages": CHAT, "prompt": "q"}, [("user", "q"), ("assistant", "a")]),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_text", "text": "q"}]},
                          {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]}]},
            [("user", "q"), ("assistant", "a")],
        ),
        ({"messages": [{"role": "user", "parts": [{"text": "q"}]}, {"role": "model", "parts": [{"text": "a"}]}]},
         [("user", "q"), ("assistant", "a")]),
        ({"prompt": "q", "completion": "a", "label": True}, [("user", "q"), ("assistant", "a")]),
        ({"problem": "q", "solution": "a"}, [("user", "q"), ("assistant", "a")]),
        ({"messages": str(CHAT)}, [("user", "q"), ("assistant", "a")]),
        ({"prompt": json.dumps(CHAT[:1]), "completion": str(CHAT[1:])}, [("user", "q"), ("assistant", "a")]),
        (
            {"images": ["a.png"],
             "messages": [{"role": "user", "content": [{"type": "image", "image": "", "text": ""}]}, CHAT[1]]},
            [("user", "<a.png>"), ("assistant", "a")],
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {
                "type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}]}, CHAT[1]]},
            [("user", "<image 1>"), ("assistant", "a")],
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "base64": "iVBORw0KGgo="}]}, CHAT[1]]},
            [("user", "<image 1>"), ("assistant", "a")],
        ),
        ({"audio": "a.wav", "transcription": "a"}, [("user", ""), ("assistant", "a")]),
        (
            {"images": ["a.png", "b.png"], "question": "<|image_2|> or <|image_1|>?", "answer": "a"},
            [("user", "<b.png> or <a.png>?"), ("assistant", "a")],
        ),
    ],
)  # fmt: skip
def test_columns_of_the_field_become_the_conversation(fields, expected):
    sample = sample_of(**fields)
    assert texts(sample) == expected
    assert sample.unused == ()


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ({"options": ["cat", "dog"], "answer": 1}, "B"),
        ({"choices": ["cat", "dog"], "answer": "0"}, "A"),
        ({"options": "['cat', 'dog']", "answer": "B"}, "B"),
        ({"options": {"A": "cat", "B": "dog", "C": None}, "answer": "B"}, "B"),
        ({"choices": {"text": ["cat", "dog"], "label": ["A", "B"]}, "answerKey": "A"}, "A"),
        ({"A": "cat", "B": "dog", "C": None, "answer": "A"}, "A"),
        ({"options": ["cat", "dog"], "answer": "dog"}, "dog"),
        ({"options": ["cat", "dog"], "answer": 1.0}, "B"),
    ],
)
def test_choices_follow_the_question_and_answers_are_letters(fields, answer):
    sample = sample_of(question=QUESTION, **fields)
    assert texts(sample) == [("user", f"{QUESTION}\nA. cat\nB. dog"), ("assistant", answer)]
    assert sample.unused == ()


def test_numbered_image_columns_fill_their_places_in_the_text():
    sample = sample_of(
        question="Is <image 2> red?", options="['<image 1>', 'no']", answer="B",
        image_1="a.png", image_2="b.png", image_3="c.png", image_4=None,
    )  # fmt: skip
    assert texts(sample)[0] == ("user", "Is <b.png> red?\nA. <a.png>\nB. no")
    assert [media.name for media in sample.unplaced] == ["c.png"]
    refused("image 4", question="<image 4>", answer="a", image_1="a.png")


def test_numbers_of_markers_are_places_in_a_list_of_images():
    def asked(text, *images):
        sample = sample_of(messages=[{"role": "user", "content": text}, *CHAT[1:]], images=list(images))
        return texts(sample)[0][1], [media.name for media in sample.unplaced]

    assert asked("<image2> or <image_1>?", "a.png", "b.png", "c.png") == ("<b.png> or <a.png>?", ["c.png"])
    for words in ("<image>\nIs <image1> red?", "<image2>"):  # the plain marker counts; there is no second image
        assert asked(words, "a.png") == (words, ["a.png"])
    answer = sample_of(question="q", answer="In <image1>", images=["a.png"])
    assert texts(answer)[1] == ("assistant", "In <image1>")


def test_a_part_of_a_sound_is_not_taken_for_the_whole_file():
    refused("begins 1.5 s into a file", audio_filepath="a.wav", offset=1.5, duration=2, text="a")
    assert sample_of(audio_filepath="a.wav", offset=0.0, text="a").unused == ("offset",)


def test_decoded_media_are_refused_as_such():
    refused("is decoded", question="q", answer="a", audio={"array": [0.0, 0.1], "sampling_rate": 16000})


@pytest.mark.parametrize(
    ("column", "kind"),
    [(name, "image") for name in ("image_path", "img", "image_1", "picture", "image_file", "jpg")]
    + [("video_path", "video"), ("audio_path", "audio"), ("audio_filepath", "audio")],
)
def test_media_in_columns_of_other_names_are_media(column, kind):
    (media,) = sample_of(caption="x", **{column: "a.bin"}).unplaced
    assert (media.kind, media.source) == (kind, Path("media/a.bin"))


@pytest.mark.parametrize(("name", "kind"), [("0.png", "image"), ("0.FLAC", "audio"), ("0.mp4", "video")])
def test_a_file_name_is_a_medium_by_its_suffix(name, kind):
    assert [media.kind for media in sample_of(text="x", file_name=name).unplaced] == [kind]
    assert sample_of(text="x", file_name="0.doc").unused == ("file_name",)
    assert sample_of(text="x", image="b.png", file_name=name).unused == (("file_name",) if kind == "image" else ())


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"messages": CHAT, "instruction": "other"}, "conversation in 'messages', and has 'instruction' besides"),
        ({"messages": CHAT, "conversations": CHAT[:1]}, "two columns for the conversation"),
        ({"messages": CHAT, "history": [["a", "b"]]}, "'history' besides"),
        ({"question": "q", "answer": "a", "response": "b"}, "two columns for the answer, 'answer' and 'response'"),
        ({"question": "q", "prompt": "p", "answer": "a"}, "two columns for the question"),
        ({"question": "q", "input": "p", "answer": "a"}, "two columns for the question, 'question' and 'input'"),
        ({"caption": "a", "text": "b"}, "two columns for the answer"),
        ({"sentence": "a", "label": "b"}, "two columns for the answer"),
        ({"caption": "a", "image": "a.png", "images": ["b.png"]}, "two columns for images"),
        ({"caption": "a", "image_path": "a.png", "img": "b.png"}, "two columns for images"),
        ({"messages": [{"role": "system", "content": "a"}, *CHAT], "system": "b"}, "a system text in 'system' and"),
        ({"messages": [{"role": "user", "from": "gpt", "content": "a"}]}, "both 'role' and 'from'"),
        (
            {"messages": [{"role": "user", "content": "<bbox>"}, CHAT[1]], "objects": {"bbox": [[1, 2, 3, 4]]}},
            "<bbox> in its text stands for what 'objects' lists",
        ),
        ({"question": "q", "options": ["a", "b"], "answer": 2}, "2, but there are 2 choices"),
        ({"question": "q", "options": ["a", "b"], "answer": -1}, "-1, but there are 2 choices"),
        ({"question": "<img>a/b.jpg</img>What?", "answer": "a"}, "names the file 'a/b.jpg' in <img> tags"),
        ({"messages": [{"role": "user", "content": "<audio>b.wav</audio>"}, CHAT[1]]}, "in <audio> tags"),
        ({"question": "q", "options": [1, 2], "answer": 1}, "the text of one choice and the number of another"),
        ({"question": "q", "answer": None}, "'answer' is null"),
        ({"messages": None}, "'messages' is null"),
        ({"messages": [{"role": "user", "content": "a", "images": ["a.png"]}]}, "'images' of its own"),
        ({"text": "a" * ((16 << 20) + 1)}, "16,777,217 characters of text, more than the 16,777,216 allowed"),
    ],
)  # fmt: skip
def test_a_record_of_two_meanings_is_refused(fields, pattern):
    refused(pattern, **fields)


def test_calls_of_openais_earlier_form_are_calls():
    call = {"name": "find", "arguments": '{"x": 1}'}
    asked = {"role": "assistant", "content": None, "function_call": call}
    sample = sample_of(messages=[CHAT[0], asked], functions=[{"name": "find", "parameters": {}}])
    assert json.loads(dict(sample.turns[1].extras)["tool_calls"])[0]["function"] == {
        "name": "find",
        "arguments": {"x": 1},
    }
    assert json.loads(sample.tools)[0]["function"]["name"] == "find"
    assert sample.unused == ()
    assert sample_of(messages=[{**CHAT[0], "tool_calls": [call]}, CHAT[1]]).unused == ("messages[].tool_calls",)


def test_a_key_that_stands_twice_in_an_object_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "q", "answer": "yes", "answer": "no"}')
    with pytest.raises(UserError, match=r"a.jsonl:1: is not valid JSON: an object has the key 'answer' twice"):
        open_source(DataSource(path=str(tmp_path / "a.jsonl")))[0]


@pytest.mark.parametrize("character", ["\ud83d", "\U0010fffd"])
def test_thoughts_and_tools_hold_no_reserved_characters(tmp_path, character):
    (tmp_path / "t.jinja").write_text(ROLES)
    thought = sample_of(messages=[CHAT[0], {**CHAT[1], "reasoning_content": f"so{character}"}])
    tool = sample_of(messages=CHAT, tools=[{"name": f"f{character}", "parameters": {}}])
    for sample, template in ((thought, str(tmp_path / "t.jinja")), (tool, None)):
        with pytest.raises(UserError, match=rf"x:1: the text holds U\+{ord(character):X}"):
            learned(sample, template)


def test_a_long_path_with_blanks_is_a_path():
    place = "/mnt/clips of cats/kinetics 400/train part/abcdefghijklmnopqrstuvwxyz0123456789"
    (media,) = sample_of(video=place, question="q", answer="a").unplaced
    assert media.source == Path(place)


def test_columns_that_the_user_names_decide():
    assert texts(sample_of({"answer": "chosen"}, prompt="q", chosen="a", rejected="b")) == [
        ("user", "q"),
        ("assistant", "a"),
    ]
    both = {"messages": CHAT, "instruction": "other"}
    assert sample_of({"messages": "messages"}, **both).unused == ("instruction",)
    assert texts(sample_of({"question": "q", "answer": "a"}, **both, q="x", a="y")) == [
        ("user", "x"),
        ("assistant", "y"),
    ]
    assert texts(sample_of({"input": "more"}, instruction="q", more="m", output="a"))[0] == ("user", "q\nm")


def test_columns_may_be_named_in_the_singular(tmp_path):
    lines = write_lines(tmp_path / "a.jsonl", [{"x": "1.png", "question": "q", "answer": "a"}])
    source = DataSource(path=str(lines), columns={"image": "x"})
    assert [media.name for media in open_source(source)[0].unplaced] == ["1.png"]
    with pytest.raises(ValueError, match="one column is named twice: image, images"):
        DataSource(path=str(lines), columns={"image": "x", "images": "y"})


def test_keys_that_nobody_reads_are_unused(tmp_path):
    rows = [
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "q", "cache": 1}], "name": "me"},
                {"role": "assistant", "content": "a", "reasoning_content": "so", "id": 7, "empty": None},
            ],
            "images": [{"path": "a.png", "detail": "low"}],
            "source": "web",
            "score": 0.5,
            "license": None,
            "tags": [],
        },
        {"messages": CHAT, "source": "web", "year": 2019},
    ]
    (tmp_path / "a.png").write_bytes(image_bytes())
    blend = open_blend(
        [DataSource(path=str(write_lines(tmp_path / f"{name}.jsonl", some)), name=name)
         for name, some in (("one", rows), ("two", [{"text": "a"}]))],
        cache_dir=tmp_path / "cache",
    )  # fmt: skip
    (tmp_path / "t.jinja").write_text(ROLES)
    encoding = small_encoding(template=str(tmp_path / "t.jinja"))
    for _ in range(2):  # measured, then from the cache
        index = blend_sizes(blend, encoding, cache_dir=tmp_path / "cache", workers=0)
        assert unused_by_source(blend, index, encoding) == {
            "one": (
                *("images[].detail", "messages[].content[].cache", "messages[].id", "messages[].name"),
                *("score", "source", "year"),
            )
        }
    (line,) = unused_lines(blend, index, encoding)
    assert line.startswith("source one: columns not used: images[].detail, ")


@pytest.mark.parametrize(
    ("key", "no", "yes"),
    [("weight", 0, 1), ("loss", False, True), ("train", False, None), ("trainable", 0.0, 1.0), ("loss_mask", 0, 1)],
)
@pytest.mark.parametrize("tagged", [False, True])
def test_turns_that_are_marked_carry_no_loss(tmp_path, key, no, yes, tagged):
    turns = [("user", "q1", no), ("assistant", "BAD", no), ("user", "q2", None), ("assistant", "good", yes)]
    for messages in (turns, [*turns[2:], *turns[:2]]):
        sample = sample_of(messages=[{"role": role, "content": text, key: mark} for role, text, mark in messages])
        (tmp_path / "t.jinja").write_text(ROLES)
        template = None if tagged else str(tmp_path / "t.jinja")
        assert learned(sample, template).replace("\n", "") == "good"
    asked = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "BAD", key: yes}]
    assert "BAD" in learned(sample_of(messages=asked), template)


def test_marks_that_cannot_be_obeyed_are_refused():
    def marked(**keys):
        return [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", **keys}]

    refused("message 2 has the weight 0.5", messages=marked(weight=0.5))
    refused("contradicts itself: weight, loss", messages=marked(weight=0, loss=True))
    refused("is the user's", messages=[{"role": "user", "content": "q", "train": True}, CHAT[1]])
    silent = sample_of(messages=marked(weight=0))
    with pytest.raises(UserError, match="no assistant answer that carries loss"):
        learned(silent)
    with pytest.raises(UserError, match="marked as not to be learned"):
        encode_prompt(silent, small_encoding(units=()))
    asked = sample_of(messages=[{"role": "user", "content": "q", "weight": 0}, CHAT[1]])
    with pytest.raises(UserError, match="marks the user's turn"):
        learned(asked, train_on="all")


def test_message_keys_the_template_reads_carry_loss(tmp_path):
    (tmp_path / "t.jinja").write_text(ROLES)
    sample = sample_of(messages=[CHAT[0], {"role": "assistant", "reasoning_content": "two and two", "content": "4"}])
    assert learned(sample, str(tmp_path / "t.jinja")) == "<two and two>4"
    assert learned(sample).strip() == "4"


def test_a_list_of_frames_is_a_clip(tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(image_bytes(8, 6, seed=number))
    names = [f"{number}.png" for number in range(3)]

    def clip(**fields):
        sample = parse_record(FileRecord("x:1", tmp_path, fields))
        (media,) = [*sample.unplaced, *(p for t in sample.turns for p in t.content if isinstance(p, Media))]
        return media

    for media in (clip(text="x", videos=[names]), clip(text="x", video=names)):
        assert clip_size(media).frames == 3
        assert clip_size(media).seconds == 0
    typed = [{"role": "user", "content": [{"type": "video", "video": names, "fps": 2.0}]}, CHAT[1]]
    timed = clip(messages=typed)
    assert isinstance(timed.source, Frames)
    assert (clip_size(timed).seconds, clip_size(timed).width) == (1.5, 8)
    sums = [int(frame.sum()) for frame in decode_clip(timed, [2, 0], lambda frame: frame)]
    assert sums == [int(decode_clip(clip(text="x", video=names), [at], lambda f: f)[0].sum()) for at in (2, 0)]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("video", {"video_start": 2.0, "video_end": 4.0}),
        ("video", {"fps": 0.5}),
        ("video", {"nframes": 8}),
        ("image", {"max_pixels": 3136}),
        ("image", {"resized_height": 56, "resized_width": 56}),
    ],
)
def test_options_of_one_item_are_refused(kind, options):
    content = [{"type": kind, kind: "a.bin", **options}]
    refused("has the option", messages=[{"role": "user", "content": content}, CHAT[1]])
    refused("has the option", messages=[{"role": "user", "content": [{"type": kind, **options}]}, CHAT[1]],
            **{f"{kind}s": ["a.bin"]})  # fmt: skip
    refused("has the option", caption="x", **{kind: {"path": "a.bin", **options}})
    content = [{"type": kind, kind: "a.bin", **dict.fromkeys(options)}]  # as columnar files write it
    assert sample_of(messages=[{"role": "user", "content": content}, CHAT[1]])


def test_columns_of_parquet_are_written_as_a_person_would(tmp_path):
    features = {"info": {"features": {
        "label": {"names": ["cat", "dog"], "_type": "ClassLabel"},
        "many": {"feature": {"names": ["cat", "dog"], "_type": "ClassLabel"}, "_type": "List"},
    }}}  # fmt: skip
    columns = {
        "label": pa.array([1, -1], pa.int64()),
        "many": pa.array([[1, 0], [0]], pa.list_(pa.int64())),
        "short": pa.array([0.1, 2019.0], pa.float32()),
        "price": pa.array([decimal.Decimal("12.50"), decimal.Decimal("3")]),
        "day": pa.array([datetime.date(2024, 1, 2)] * 2),
        "year": pa.array([2019.0, None], pa.float64()),
    }
    table = pa.table(columns).replace_schema_metadata({"huggingface": json.dumps(features)})
    pq.write_table(table, tmp_path / "x.parquet")

    def answers(column):
        reader = open_source(DataSource(path=str(tmp_path / "x.parquet"), columns={"answer": column}))
        for row in range(2):
            try:
                yield reader[row].turns[-1].content[0]
            except UserError as error:
                yield str(error).partition(";")[0]

    assert {name: list(answers(name)) for name in columns} == {
        "label": ["dog", "x.parquet:2: 'answer' is null"],
        "many": ["dog", "cat"],
        "short": ["0.1", "2019"],
        "price": ["12.50", "3.00"],
        "day": ["2024-01-02"] * 2,
        "year": ["2019", "x.parquet:2: 'answer' is null"],
    }
