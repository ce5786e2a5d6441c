"""YAML from outside is bounded, says each key once, and names the place of a mistake."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from dilatant.config import UserError, load_config
from dilatant.config.files.yaml_text import MOST_BYTES, MOST_COPIES, explain, read_yaml
from dilatant.cost.hardware import load_hardware, read_hardware_file
from dilatant.cost.model import CostModel, load_costs

GOOD = """
model: {language_model: {config: {model_type: llama}, tokenizer: bytes}}
data: {train: [{path: train.jsonl}]}
"""


def nested_aliases(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines)


BAD = {
    nested_aliases(9): f"aliases repeat more than {MOST_COPIES:,} values",
    "a: &a [1, *a]": "line 1, column 4: an alias that contains itself",
    "a: {b: 1,\n b: 2}": "line 2, column 2: key 'b' is there already, in line 1; write it once",
    "a: 1\nc: [{d: 1, d: 2}]": "key 'd' is there already, in line 2",
    "a: 010": "line 1, column 4: 010 would be read in base 8",
    "a: {b: 1:30}": "line 1, column 8: 1:30 would be read in base 60",
    "a: '" + "x" * MOST_BYTES + "'": "longer than 4 MiB",
}


@pytest.mark.parametrize("text", BAD, ids=BAD.values())
def test_every_reader_of_yaml_refuses_it_in_a_line(text: str, tmp_path: Path) -> None:
    with pytest.raises(yaml.YAMLError) as caught:
        read_yaml(text)
    assert BAD[text] in explain(caught.value)
    file = tmp_path / "x.yaml"
    file.write_text(text)
    for read in (load_config, load_costs, lambda path: load_hardware("x", path)):
        with pytest.raises(UserError, match=r"YAML|cost model|cannot be read") as wrong:
            read(file)
        assert "\n" not in str(wrong.value)
        assert BAD[text] in str(wrong.value)
    with pytest.raises(UserError, match="is not a cost model"):
        CostModel.from_yaml(text)
    with pytest.raises(UserError, match="is not YAML"):
        read_hardware_file(text, "x.yaml")


def test_a_few_aliases_and_merged_keys_are_as_yaml_says() -> None:
    assert read_yaml("a: &a {b: 1, c: 2}\nd: {<<: *a, b: 3}\ne: *a") == {
        "a": {"b": 1, "c": 2},
        "d": {"b": 3, "c": 2},
        "e": {"b": 1, "c": 2},
    }
    assert len(read_yaml(nested_aliases(3))["a2"]) == 9


def test_a_section_written_twice_is_no_config(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(f"{GOOD}train: {{steps: 2}}\ntrain: {{seed: 3}}\n")
    with pytest.raises(UserError, match=r"line 5, column 1: key 'train' is there already, in line 4"):
        load_config(tmp_path / "c.yaml")


def test_pipes_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "c.yaml")
    for read in (load_config, load_costs, lambda path: load_hardware("x", path)):
        with pytest.raises(UserError, match="no regular file"):
            read(tmp_path / "c.yaml")


def test_variables_and_homes_in_paths_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("PART", "model")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "$PART").mkdir()
    (tmp_path / "c.yaml").write_text(GOOD)
    sets = ["output_dir=$HERE/run", "data.train=[{path: '${HERE}/a*.jsonl'}, {path: ~/b.jsonl}]"]
    config = load_config(tmp_path / "c.yaml", [*sets, "model.language_model.tokenizer=$HERE/$PART"])
    assert config.output_dir == f"{tmp_path}/elsewhere/run"
    assert [source.path for source in config.data.train] == [
        f"{tmp_path}/elsewhere/a*.jsonl",
        f"{tmp_path}/home/b.jsonl",
    ]
    assert config.model.language_model.tokenizer == f"{tmp_path}/elsewhere/model"
    # What is there under this very name is meant.
    assert load_config(tmp_path / "c.yaml", ["output_dir=$PART"]).output_dir == f"{tmp_path}/$PART"


@pytest.mark.parametrize(
    "override", ["output_dir=$NOWHERE/run", "data.train.0.path=${NOWHERE}/x.jsonl", "train.resume=$NOWHERE"]
)
def test_a_variable_that_is_not_set_is_named(override: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOWHERE", raising=False)
    (tmp_path / "c.yaml").write_text(GOOD)
    with pytest.raises(UserError, match=r"variable NOWHERE is not set"):
        load_config(tmp_path / "c.yaml", [override])


def test_a_home_that_nobody_has_is_said_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(GOOD)
    with pytest.raises(UserError, match="cannot be used"):
        load_config(tmp_path / "c.yaml", ["output_dir=~nobody-of-this-name/run"])
