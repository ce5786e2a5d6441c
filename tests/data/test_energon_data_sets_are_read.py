"""Energon's folders are read as its .nv-meta says: splits, excluded samples and field maps, or refused by name."""

from __future__ import annotations

import json
import pickle

import pytest

from cases.data_builders import image_bytes, write_tar
from cases.mds_files import write_energon
from dilatant.config import DataSource, UserError
from dilatant.data.errors import SampleError
from dilatant.data.readers.reader import open_source
from dilatant.data.sample import FileSlice

CAPTIONS = "sample_type:\n  __module__: megatron.energon\n  __class__: CaptioningSample\nfield_map:\n"
SPLITS = {"train": ["shards/{0..1}.tar"], "val": ["shards/2.tar"], "test": []}


def sample(number, **more):
    members = {"png": image_bytes(seed=number), "txt": f"t{number}".encode(), **more}
    return {f"{number:03}.{suffix}": data for suffix, data in members.items()}


def folder_of(tmp_path, dataset, exclude=(), **more):
    shards = {f"shards/{at}.tar": {**sample(2 * at, **more), **sample(2 * at + 1, **more)} for at in range(3)}
    return DataSource(path=str(write_energon(tmp_path / "x", shards, SPLITS, dataset, exclude)), prompt="What?")


def answers(reader):
    return [reader[at].turns[-1].content[0] for at in range(len(reader))]


def test_splits_are_those_of_the_data_set(tmp_path):
    source = folder_of(tmp_path, f"{CAPTIONS}  image: jpg,png\n  caption: txt\n")
    reader = pickle.loads(pickle.dumps(open_source(source)))
    assert answers(reader) == ["t0", "t1", "t2", "t3"]
    assert reader.passed_over == ("the splits val (1 shards); only 'train' is read",)
    assert reader.name_of(3) == "1.tar:003"
    (media,) = reader[3].unplaced
    assert isinstance(media.source, FileSlice)
    for name in ("val", "validation", "dev"):
        assert answers(open_source(source.model_copy(update={"split": name}))) == ["t4", "t5"]
    with pytest.raises(UserError, match="has no split 'test'; there are train, val"):
        open_source(source.model_copy(update={"split": "test"}))
    with pytest.raises(UserError, match="it has the splits train, val; name one with 'split'"):
        open_source(source, held_out=True)
    assert answers(open_source(source.model_copy(update={"split": "val"}), held_out=True)) == ["t4", "t5"]


def test_excluded_shards_and_samples_are_left_out(tmp_path):
    exclude = ["shards/0.tar/001", "shards/1.tar/{002,003}", "shards/2.tar"]
    source = folder_of(tmp_path, f"{CAPTIONS}  image: png\n  caption: txt\n", exclude)
    reader = pickle.loads(pickle.dumps(open_source(source)))
    assert answers(reader) == ["t0"]
    assert reader.name_of(0) == "0.tar:000"
    assert "1 shards and 3 samples that .nv-meta excludes" in reader.passed_over
    whole = open_source(source.model_copy(update={"format": "webdataset"}))
    assert len(whole) == 6
    split = tmp_path / "x" / ".nv-meta" / "split.yaml"
    split.write_text(json.dumps({"exclude": ["shards/0.tar/9"], "split_parts": SPLITS}))
    with pytest.raises(UserError, match=r"^0.tar holds no sample '9', which .nv-meta excludes"):
        open_source(source)


@pytest.mark.parametrize(
    ("kind", "fields", "about", "question", "answer", "unused"),
    [
        ("CaptioningSample", {"image": "png", "caption": "json[a][b][1]"}, {"a": {"b": [0, "x"]}}, "What?", "x",
         (".txt",)),
        ("VQASample", {"image": "png", "context": "json[q]", "answers": "json[as]"}, {"q": "Q", "as": ["x", "y"]},
         "Q", "x", ("answer[1:]", ".txt")),
        ("VQAWebdataset", {"image": "png", "context": "txt", "answers": "json[as]", "answer_weights": "json[w]"},
         {"as": ["x", "y"], "w": [0.2, 0.8]}, "t0", "y", ("answer[1:]",)),
        ("MultiChoiceVQASample", {"image": "png", "context": "txt", "choices": "json[c]",
                                  "correct_choice_idx": "json[i]"}, {"c": ["x", "y"], "i": 1, "more": 1},
         "t0\nA. x\nB. y", "B", (".json[more]",)),
        ("OCRSample", {"image": "png", "text": "json[t],txt", "words_text": "json[w]"}, {"w": ["a"]}, "What?", "t0",
         ("words_text",)),
        ("ImageClassificationSample", {"image": "png", "label": "json[l]", "label_name": "txt"}, {"l": 3}, "What?",
         "t0", ("label",)),
    ],
)  # fmt: skip
def test_field_maps_are_honoured(tmp_path, kind, fields, about, question, answer, unused):
    lines = "".join(f"  {field}: {way}\n" for field, way in fields.items())
    named = f"sample_type: {{__module__: megatron.energon, __class__: {kind}}}"
    if kind.endswith("Webdataset"):
        named = f"__module__: megatron.energon\n__class__: {kind}"
    source = folder_of(tmp_path, f"{named}\nfield_map:\n{lines}", json=json.dumps(about).encode())
    found = open_source(source)[0]
    assert [turn.content for turn in found.turns] == [(question,), (answer,)]
    assert len(found.unplaced) == 1
    assert sorted(found.unused) == sorted(unused)


def test_crude_samples_are_read_as_their_members_say(tmp_path):
    source = folder_of(tmp_path, "__module__: megatron.energon\n__class__: CrudeWebdataset\nsubflavors: {a: 1}\n")
    reader = open_source(source)
    assert answers(reader) == ["t0", "t1", "t2", "t3"]
    assert ".nv-meta/dataset.yaml: subflavors" in reader.passed_over


def test_another_field_map_is_other_data(tmp_path):
    source = folder_of(tmp_path, f"{CAPTIONS}  image: png\n  caption: txt\n", json=b'{"c": "d"}')
    before = open_source(source)
    assert open_source(source).fingerprint == before.fingerprint
    (tmp_path / "x" / ".nv-meta" / "dataset.yaml").write_text(f"{CAPTIONS}  image: png\n  caption: json[c]\n")
    assert open_source(source).fingerprint != before.fingerprint
    assert answers(open_source(source)) == ["d"] * 4


INFO = {"shards/0.tar": 2, "shards/1.tar": 2, "shards/2.tar": 2}


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("dataset.yaml", "sample_loader: x.py:sample_loader\n", "'sample_loader' is a function"),
        ("dataset.yaml", "sample_type: {__module__: mine, __class__: VQASample}", "'VQASample' of 'mine' are not read"),
        ("dataset.yaml", "__module__: megatron.energon\n__class__: InterleavedWebdataset\nfield_map: {a: b}",
         "type 'InterleavedWebdataset' of"),
        ("dataset.yaml", "sample_type: {__module__: megatron.energon, __class__: VQASample}", "no field_map"),
        ("dataset.yaml", f"{CAPTIONS}  image: 'png['\n", "is no list of members"),
        ("dataset.yaml", f"{CAPTIONS}  image: [png]\n", "Expected `str`"),
        ("dataset.yaml", f"{CAPTIONS}  image: png\n  image: jpg\n", "key 'image' is there already"),
        ("dataset.yaml", "!!python/object/apply:os.system [ls]", "cannot be read"),
        (".info.json", json.dumps({"shard_counts": INFO | {"shards/0.tar": 3}}), r"0.tar has 2 samples, not 3"),
        (".info.json", json.dumps({"shard_counts": INFO | {"shards/0.tar": 1 << 60}}), "Expected `int` <"),
        (".info.json", '{"shard_counts": {"a.tar": 1, "a.tar": 1}}', r"an object has the key 'a.tar' twice"),
        (".info.json", '{"shard_counts": {"a.tar": ', "cannot be read"),
        (".info.json", '{"shard_counts": {}}', r"one that .info lacks: \['shards/0.tar'"),
        ("split.yaml", '{"split_parts": {"train": ["../y.tar"]}}', "one that .info lacks"),
        ("split.yaml", '{"split_parts": {"train": ["shards/0.tar", "shards/0.tar"]}}', "one twice"),
        ("split.yaml", '{"split_parts": {"train": []}}', "no split 'train'; there are none"),
        ("split.yaml", '{"split_parts": {"train": ["{0..9999999999}"]}}', "stands for more than 100,000 files"),
        ("split.yaml", json.dumps({"split_parts": {"train": ["{a,b}" * 40]}}), "stands for more than"),
        ("split.yaml", '{"split_parts": {}, "filter": 1}', "unknown field `filter`"),
    ],
)  # fmt: skip
def test_what_is_wrong_or_needs_code_is_refused_by_name(tmp_path, file, text, said):
    source = folder_of(tmp_path, f"{CAPTIONS}  image: png\n  caption: txt\n")
    (tmp_path / "x" / ".nv-meta" / file).write_text(text)
    with pytest.raises(UserError, match=said):
        open_source(source)


def test_a_shard_outside_of_the_folder_is_refused(tmp_path):
    source = folder_of(tmp_path, f"{CAPTIONS}  image: png\n  caption: txt\n")
    write_tar(tmp_path / "y.tar", sample(0))
    meta = tmp_path / "x" / ".nv-meta"
    (meta / ".info.json").write_text(json.dumps({"shard_counts": {"../y.tar": 1}}))
    (meta / "split.yaml").write_text('{"split_parts": {"train": ["../y.tar"]}}')
    with pytest.raises(UserError, match=r"names '../y.tar', which is no file below its own folder"):
        open_source(source)


def test_a_member_that_only_code_could_read_is_the_samples_error(tmp_path):
    source = folder_of(tmp_path, f"{CAPTIONS}  image: png\n  caption: pth\n", pth=b"\x80\x02cos\nsystem\n.")
    with pytest.raises(SampleError, match=r"^0.tar:000: its member .pth is neither text, JSON nor a medium"):
        open_source(source)[0]


def test_a_sample_without_a_mapped_member_is_named(tmp_path):
    source = folder_of(tmp_path, f"{CAPTIONS}  image: png\n  caption: json[c],json[d]\n", json=b'{"e": 1}')
    with pytest.raises(SampleError, match=r"^0.tar:000: has no json\[c\] or json\[d\] for 'caption'"):
        open_source(source)[0]


def test_older_names_of_the_files_are_known(tmp_path):
    source = folder_of(tmp_path, f"{CAPTIONS}  image: png\n  caption: txt\n")
    meta = tmp_path / "x" / ".nv-meta"
    (meta / ".info.json").unlink()
    (meta / ".info.yaml").write_text("shard_counts:\n" + "".join(f"  {name}: 2\n" for name in INFO))
    (meta / "split.yaml").rename(meta / "split.json")
    assert answers(open_source(source)) == ["t0", "t1", "t2", "t3"]
    (meta / ".info.yaml").unlink()
    with pytest.raises(UserError, match="run `energon prepare` there"):
        open_source(source.model_copy(update={"format": "energon"}))
    assert len(open_source(source)) == 6
