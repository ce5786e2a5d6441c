"""Media are placed in the text, every mismatch is an error that names the sample, and sizes need no decoding."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.data_builders import AUDIO_ID, IMAGE_ID, image_bytes, small_encoding, wav_bytes
from dilatant.config import UserError
from dilatant.data.sample import Media, Sample, Turn
from dilatant.data.text.chat import MEDIA, chat_tokenizer
from dilatant.data.text.encode import encode_prompt, encode_sample, find_problems, measure_sample
from dilatant.data.text.encoding import QUESTION
from dilatant.data.text.tokenizer import byte_tokenizer

ENCODING = small_encoding()
BOS, EOS = 257, 258


def image(seed=0, **form):
    return Media("image", image_bytes(seed=seed, **form), f"image {seed}")


def sound(seconds=0.05):
    return Media("audio", wav_bytes(seconds), f"sound of {seconds}")


def sample(*content, answer="yes", unplaced=()):
    return Sample("s:1", (Turn("user", content), Turn("assistant", (answer,))), tuple(unplaced))


def letters(text):
    return [*text.encode()]


def check_consistent(example, encoding):
    """Check the invariants of an encoded sample by counting anew."""
    encoded = encode_sample(example, encoding)
    sizes = measure_sample(example, encoding)
    assert encoded.input_ids.dtype == encoded.labels.dtype == np.int64
    assert encoded.input_ids.shape == encoded.labels.shape
    assert dict(encoded.sizes) == dict(sizes.tokens)
    assert (encoded.labels != -100).sum() == sizes.target_tokens
    carries = encoded.labels != -100
    assert (encoded.labels[carries] == encoded.input_ids[carries]).all()
    assert not carries[0]
    assert not np.isin(encoded.input_ids[carries], [IMAGE_ID, AUDIO_ID]).any()
    for unit, placeholder, merged, tokens in (("vision", IMAGE_ID, 4, 4), ("audio", AUDIO_ID, 3, 5)):
        rows = sum(len(array) for array in encoded.media.get(unit, {}).values())
        assert (encoded.input_ids == placeholder).sum() == rows * merged
        assert encoded.sizes.get(unit, 0) == rows * tokens
    return encoded


def test_placed_media_stand_where_they_were_written():
    encoded = check_consistent(sample("a", image(), "b", sound(), "c"), ENCODING)
    middle = [*letters("a"), *[IMAGE_ID] * 4, *letters("b"), *[AUDIO_ID] * 3, *letters("c\n")]
    assert encoded.input_ids.tolist() == [BOS, *middle, *letters("yes"), EOS]
    assert encoded.labels.tolist() == [-100] * (1 + len(middle)) + [*letters("yes"), EOS]


def test_markers_take_the_media_beside_the_text_in_order():
    pictures = [image(1), image(2)]
    encoded = check_consistent(sample("<image>?<image><audio>", unplaced=[*pictures, sound()]), ENCODING)
    expected = [BOS, *[IMAGE_ID] * 4, *letters("?"), *[IMAGE_ID] * 4, *[AUDIO_ID] * 3, *letters("\nyes"), EOS]
    assert encoded.input_ids.tolist() == expected
    alone = [encode_sample(sample(each), ENCODING).media["vision"]["pixel_values"].values for each in pictures]
    assert (encoded.media["vision"]["pixel_values"].values == np.concatenate(alone)).all()
    assert not (alone[0] == alone[1]).all()


def test_media_without_markers_come_before_the_first_question():
    example = Sample(
        "s", (Turn("system", ("be",)), Turn("user", ("a",)), Turn("assistant", ("b",))), (image(), sound())
    )
    encoded = check_consistent(example, ENCODING)
    assert encoded.input_ids.tolist() == [
        BOS, *letters("be\n"), *[IMAGE_ID] * 4, *[AUDIO_ID] * 3, *letters("a\nb"), EOS,
    ]  # fmt: skip


def test_a_sample_without_media_is_ordinary():
    encoded = check_consistent(sample("a"), ENCODING)
    assert encoded.media == {}
    assert dict(encoded.sizes) == {"language": len(encoded.input_ids), "vision": 0, "audio": 0}
    text_only = small_encoding(units=())
    assert (encode_sample(sample("a <image> tag"), text_only).input_ids[1:14] == letters("a <image> tag")).all()


def test_media_of_a_unit_that_prepends_come_before_all_text():
    vision, audio = ENCODING.units
    encoding = replace(ENCODING, units=(vision, replace(audio, merge="prepend")))
    encoded = check_consistent(sample("a<audio>b", image(), unplaced=[sound(0.15)]), encoding)
    assert encoded.input_ids.tolist() == [
        *[AUDIO_ID] * 6, BOS, *letters("ab"), *[IMAGE_ID] * 4, *letters("\nyes"), EOS,
    ]  # fmt: skip


def test_prepending_units_follow_the_model_order():
    units = tuple(replace(unit, merge="prepend") for unit in ENCODING.units)
    encoded = check_consistent(sample(sound(), "a", image(), image(1)), replace(ENCODING, units=units))
    assert encoded.input_ids[:12].tolist() == [*[IMAGE_ID] * 8, *[AUDIO_ID] * 3, BOS]


def test_a_long_sound_takes_several_windows():
    for seconds, windows in ((0.05, 1), (0.1, 1), (0.1001, 2), (0.3, 3), (0.301, 4)):
        encoded = check_consistent(sample(sound(seconds)), ENCODING)
        assert encoded.media["audio"]["input_features"].shape == (windows, 16, 10)


def test_markers_separate_two_encoders_of_one_kind():
    vision, _ = ENCODING.units
    detail = replace(vision, name="detail", marker="<detail>", placeholder_id=302)
    encoding = replace(ENCODING, units=(vision, detail))
    encoded = encode_sample(sample("<detail><image>", image(3), unplaced=[image(1), image(2)]), encoding)
    assert encoded.input_ids[1:13].tolist() == [302] * 4 + [IMAGE_ID] * 8
    assert {unit: len(inputs["pixel_values"]) for unit, inputs in encoded.media.items()} == {"detail": 1, "vision": 2}


def test_loss_on_all_tokens_leaves_out_media_and_the_first():
    encoded = check_consistent(sample("a", image()), replace(ENCODING, train_on="all"))
    assert encoded.labels.tolist() == [-100, *letters("a"), *[-100] * 4, *letters("\nyes"), EOS]
    alone = Sample("s", (Turn("user", ("text only",)),))
    assert (encode_sample(alone, replace(ENCODING, train_on="all")).labels != -100).sum() == len("text only\n")


def test_a_prompt_is_what_training_saw_before_the_last_answer():
    turns = (*sample("a", image()).turns, Turn("user", ("b<image>",)), Turn("assistant", ("the end",)))
    example = Sample("s", turns, (image(5),))
    prompt, whole = encode_prompt(example, ENCODING), encode_sample(example, ENCODING)
    assert prompt.answer == "the end"
    count = len(prompt.sample.input_ids)
    assert whole.input_ids[:count].tolist() == prompt.sample.input_ids.tolist()
    assert whole.input_ids[count:].tolist() == [*letters("the end"), EOS]
    seen, other = (each.media["vision"]["pixel_values"].values for each in (prompt.sample, whole))
    assert (seen == other).all()
    question = Sample("s", example.turns[:1])
    assert encode_prompt(question, ENCODING).answer == ""


PARTS = st.lists(st.sampled_from(["image", "audio", "<image>", "<audio>", "text", "é", " "]), max_size=5)


@settings(max_examples=40, deadline=None, print_blob=True)
@given(st.lists(PARTS, min_size=1, max_size=3), st.booleans())
def test_sizes_and_places_agree_for_any_mixture(turns, prepend):
    unplaced, conversation = [], []
    for number, parts in enumerate(turns):
        content = []
        for part in parts:
            if part in ("image", "audio"):
                content.append(image() if part == "image" else sound(0.12))
            else:
                content.append(part)
                unplaced += [image()] if part == "<image>" else [sound(0.05)] if part == "<audio>" else []
        conversation += [Turn("user", tuple(content)), Turn("assistant", (f"answer {number}",))]
    units = tuple(replace(unit, merge="prepend" if prepend else "placeholder") for unit in ENCODING.units)
    example = Sample("s", tuple(conversation), tuple(unplaced))
    encoding = replace(ENCODING, units=units)
    encoded = check_consistent(example, encoding)
    prompt = encode_prompt(example, encoding).sample
    assert encoded.input_ids[: len(prompt.input_ids)].tolist() == prompt.input_ids.tolist()


def text_of(example):
    """Return the text of a sample without the tokens that stand for media."""
    ids = encode_sample(example, replace(ENCODING, max_length=None)).input_ids
    return bytes(int(token) for token in ids if token < 256).decode()


@pytest.mark.parametrize(
    ("example", "text"),
    [
        (sample("a <image> tag", answer="an <audio> tag"), "a <image> tag\nan <audio> tag"),
        (sample("a <image>", image(), " \\<image>", answer="b"), "a <image> \\<image>\nb"),
        (sample("<audio>b \\<image>", answer="<image>", unplaced=[sound(0.05)]), "b \\<image>\n<image>"),
        (sample("<image>b \\<image>", answer="c", unplaced=[image()]), "b <image>\nc"),
        (sample("b \\<image>", answer="c", unplaced=[image()]), "b <image>\nc"),
    ],
)
def test_markers_are_words_where_nothing_else_is_meant(example, text):
    assert text_of(example) == text


def test_a_word_is_never_the_token_that_it_spells():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    encoding = replace(ENCODING, chat=chat_tokenizer(tokenizer), max_length=None)
    ids = encode_sample(sample("a <image> tag", answer="b"), encoding).input_ids
    assert bytes(int(token) for token in ids if token < 256).decode() == "a <image> tag\nb"
    assert tokenizer.convert_tokens_to_ids("<image>") not in ids


@pytest.mark.parametrize(
    ("example", "pattern"),
    [
        (sample("<image><image>", unplaced=[image()]), "^s:1: 2 image markers in the text for 1 images"),
        (sample("<image>", unplaced=[image(), image()]), "1 image markers in the text for 2 images"),
        (sample("<image>\\<image>", unplaced=[image(), image()]), "a backslash before a marker makes it a word"),
        (sample("a" * 40), "has 46 tokens, more than the 45 allowed"),
        (Sample("s:1", (Turn("user", ("a",)),)), "has no assistant answer"),
        (sample("a", answer="  "), "only empty answers"),
        (sample(f"a{MEDIA}"), r"U\+10FFFD, a private character"),
        (sample(Media("image", b"no image", "x.png")), "image 'x.png' is no image in a known format"),
        (sample(Media("image", image_bytes(64, 64)[:-2000], "x.png")), "image 'x.png' is damaged"),
        (sample(Media("image", image_bytes(64, 64, "JPEG")[:-1500], "x.jpg")), "image 'x.jpg' is damaged"),
        (sample(Media("image", b"", "x.png")), "is no image"),
        (sample(Media("audio", b"not a sound", "x.wav")), "audio 'x.wav' cannot be read"),
        (sample(Media("audio", wav_bytes()[:-99], "x.wav")), "audio 'x.wav' is cut off"),
        (sample(Media("audio", wav_bytes(form="FLAC")[:-99], "x.flac")), "audio 'x.flac' (is cut off|cannot be read)"),
        (sample(Media("audio", wav_bytes(0), "x.wav")), "audio 'x.wav' is empty"),
    ],
)
def test_what_cannot_be_trained_on_is_named(example, pattern):
    encoding = replace(ENCODING, max_length=45)
    with pytest.raises(UserError, match=pattern) as caught:
        encode_sample(example, encoding)
    assert str(caught.value).startswith("s:1: ")
    assert "; " in str(caught.value)  # a remedy
    assert str(caught.value) in [str(problem) for problem in find_problems(example, encoding, deep=True)]
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_sample_length_may_reach_the_token_limit_exactly():
    length = len(encode_sample(sample("a" * 40), ENCODING).input_ids)
    encode_sample(sample("a" * 40), replace(ENCODING, max_length=length))
    with pytest.raises(UserError, match="allowed"):
        encode_sample(sample("a" * 40), replace(ENCODING, max_length=length - 1))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"s:1: image '.*none.png' does not exist; put it there"):
        encode_sample(sample(Media("image", tmp_path / "none.png", "none.png")), ENCODING)


def test_media_of_a_kind_without_encoder_are_refused():
    vision, _ = ENCODING.units
    with pytest.raises(UserError, match=r"holds the audio 'sound of 0\.05', but the model has no audio encoder"):
        encode_sample(sample(sound()), replace(ENCODING, units=(vision,)))


@pytest.mark.parametrize("form", ["GIF", "JPEG", "BMP", "WEBP", "TIFF"])
def test_an_image_is_read_by_its_content_whatever_its_name(tmp_path, form):
    path = tmp_path / "picture.png"
    path.write_bytes(image_bytes(form=form))
    encode_sample(sample(Media("image", path, "picture.png")), ENCODING)


def test_an_encoding_travels_to_another_process():
    copy = pickle.loads(pickle.dumps(ENCODING))
    example = sample("a", image())
    assert (encode_sample(example, copy).input_ids == encode_sample(example, ENCODING).input_ids).all()
    assert copy.fingerprint == ENCODING.fingerprint


def test_the_fingerprint_changes_with_whatever_changes_tokens():
    vision, audio = ENCODING.units
    variants = [
        ENCODING,
        replace(ENCODING, train_on="all"),
        replace(ENCODING, units=(vision,)),
        replace(ENCODING, units=(replace(vision, tokens_per_image=5), audio)),
        replace(ENCODING, units=(vision, replace(audio, merged_per_window=2))),
        replace(ENCODING, units=(vision, replace(audio, marker="[sound]"))),
        small_encoding(template="plain", units=()),
    ]
    assert len({variant.fingerprint for variant in variants}) == len(variants)


@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_held_out_loss_covers_the_whole_last_answer(train_on):
    turns = (Turn("user", ("a", image())), Turn("assistant", ("first",)), Turn("user", ("b",)))
    example = Sample("s:1", (*turns, Turn("assistant", ("yes",))))
    encoding = replace(ENCODING, train_on=train_on)
    asked = encode_sample(example, encoding, frozenset({QUESTION}))
    whole = encode_sample(example, encoding)
    assert asked.input_ids.tolist() == whole.input_ids.tolist()
    judged = np.flatnonzero(asked.labels != -100)
    assert asked.labels[judged].tolist() == [*letters("yes"), EOS]
    first = len(encode_prompt(example, encoding).sample.input_ids)
    assert judged.tolist() == [*range(first, first + 4)]


@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_an_item_that_ends_where_a_sample_is_cut_stays(spare: int) -> None:
    turns = (Turn("user", ("a",)), Turn("assistant", ("b",)), Turn("user", (image(), "c")))
    example = Sample("s:1", (*turns, Turn("assistant", ("d",))))
    whole = encode_sample(example, ENCODING).input_ids
    end = int(np.flatnonzero(whole == IMAGE_ID)[-1]) + 1
    cut = encode_sample(example, replace(ENCODING, max_length=end + spare, truncates=True))
    kept = end - 4 if spare < 0 else end + spare  # the image, of four tokens, goes as a whole
    assert cut.input_ids.tolist() == whole[:kept].tolist()
    assert len(cut.media.get("vision", ())) == (spare >= 0)


@settings(max_examples=40)
@given(st.integers(2, 40), st.integers(0, 3))
def test_truncation_keeps_first_tokens_and_never_splits_an_item(length: int, pictures: int) -> None:
    """The truncated sample is a prefix of the whole one, and its measured sizes equal the encoded ones."""
    content = [part for number in range(pictures) for part in ("abc", image(number))]
    example = sample(*content, "de", answer="yes or no")
    whole = encode_sample(example, ENCODING)
    cut = replace(ENCODING, max_length=length, truncates=True)
    measured = measure_sample(example, cut)
    kept = measured.tokens["language"]
    assert kept <= length
    if measured.refusals:
        assert "no answer within its first" in str(measured.refusals[0])
        assert kept < len(whole.input_ids) - len("yes or no") - 1 or (whole.labels[:kept] == -100).all()
        return
    encoded = check_consistent(example, cut)
    assert encoded.input_ids.tolist() == whole.input_ids[:kept].tolist()
    assert encoded.labels.tolist() == whole.labels[:kept].tolist()
    if kept < min(length, len(whole.input_ids)):  # it stops before an item that would not fit
        assert whole.input_ids[kept] == IMAGE_ID
        assert kept + 4 > length
    held_out = replace(cut, held_out=True)
    assert measure_sample(example, held_out).tokens["language"] == len(whole.input_ids)


def test_a_default_system_text_is_as_if_records_had_it():
    """Conversations with a system text, and texts without a question, stay as they are."""
    encoding = replace(ENCODING, system="Be brief.")
    plain = sample("<image>a", unplaced=[image()])
    written = replace(plain, turns=(Turn("system", ("Be brief.",)), *plain.turns))
    own = replace(plain, turns=(Turn("system", ("Be long.",)), *plain.turns))
    alone = Sample("s:1", (Turn("assistant", ("text",)),))
    for changed, same in ((plain, written), (written, written), (own, own), (alone, alone)):
        found, expected = encode_sample(changed, encoding), encode_sample(same, ENCODING)
        assert found.input_ids.tolist() == expected.input_ids.tolist()
        assert found.labels.tolist() == expected.labels.tolist()
        check_consistent(changed, encoding)
    assert letters("Be brief.\n") == check_consistent(plain, encoding).input_ids[1:11].tolist()
    prompt = encode_prompt(plain, encoding).sample.input_ids.tolist()
    assert prompt == encode_prompt(written, ENCODING).sample.input_ids.tolist()
    assert encoding.fingerprint != ENCODING.fingerprint
