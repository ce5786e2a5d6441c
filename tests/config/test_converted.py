"""Configs of other tools become configs that load, and every key that means something else is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dilatant.cli.app import run
from dilatant.config import Config, UserError
from dilatant.config.config import place_of
from dilatant.config.converted import convert, read_others

LLAMA_FACTORY = """
model_name_or_path: Qwen/Qwen2.5-VL-7B-Instruct
image_max_pixels: 262144
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: mine, hub
dataset_dir: {folder}
template: qwen2_vl
cutoff_len: 4096
max_samples: 1000
output_dir: saves/qwen
logging_steps: 10
save_steps: 500
report_to: none  # a comment
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
val_size: 0.1
eval_steps: 500
loraplus_lr_ratio: 16
resume_from_checkpoint: null
"""

SWIFT = r"""
# a comment
NPROC_PER_NODE=4 MAX_PIXELS=1003520 \
swift sft \
    --model Qwen/Qwen3-VL-4B-Instruct \
    --dataset 'AI-ModelScope/x#20000' \
              data/y.jsonl \
    --val_dataset val.csv --train_type full \
    --torch_dtype bfloat16 \
    --num_train_epochs 1 --max_steps -1 \
    --per_device_train_batch_size 2 --gradient_accumulation_steps=4 \
    --learning_rate 1e-5 --vit_lr 2e-6 --adam_beta2 0.95 \
    --freeze_vit false --lora_rank 8 \
    --system 'You are brief.' --max_length 2048 --packing true \
    --attn_impl flash_attn --deepspeed zero2 --gradient_checkpointing true
"""


def converted(text: str, devices: int = 1) -> tuple[dict[str, Any], list[str]]:
    tree, left_out = convert(read_others(text), devices)
    Config.model_validate(tree)
    assert yaml.safe_load(yaml.safe_dump(tree)) == tree
    return tree, left_out


def test_a_yaml_file_of_llama_factory_keeps_its_meaning(tmp_path: Path) -> None:
    about = {
        "mine": {
            "file_name": "mine.json",
            "formatting": "sharegpt",
            "columns": {"messages": "talk", "images": "pictures"},
        },
        "hub": {"hf_hub_url": "lab/set"},
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(about))
    tree, left_out = converted(LLAMA_FACTORY.format(folder=tmp_path), devices=2)
    assert tree == {
        "model": {
            "id": "Qwen/Qwen2.5-VL-7B-Instruct", "lora": {"r": 8}, "processor": {"max_pixels": 262144},
        },
        "data": {
            "train": [
                {"path": str(tmp_path / "mine.json"), "columns": {"messages": "talk", "images": "pictures"}},
                {"id": "lab/set"},
            ],
            "max_length": 4096, "max_samples": 1000, "val_size": 0.1,
        },
        "train": {
            "global_batch_size": 16,
            "optimizer": {"learning_rate": 1e-4, "groups": {"*.lora_B.*": {"learning_rate": 16e-4}}},
            "schedule": {"kind": "cosine", "warmup_ratio": 0.1},
            "precision": "bf16", "logging_steps": 10, "save_steps": 500, "report_to": "none", "epochs": 3.0,
        },
        "evaluation": {"steps": 500},
        "output_dir": "saves/qwen",
    }  # fmt: skip
    assert sorted(line.partition(":")[0] for line in left_out) == ["do_train", "template"]
    assert "write 'data.chat_template'" in " ".join(left_out)


def test_a_command_line_of_ms_swift_keeps_its_meaning() -> None:
    tree, left_out = converted(SWIFT)
    assert tree["model"] == {
        "id": "Qwen/Qwen3-VL-4B-Instruct",
        "freeze": ["vision.projector"],
        "processor": {"max_pixels": 1003520},
    }
    assert tree["data"] == {
        "train": [{"id": "AI-ModelScope/x", "limit": 20000}, {"path": "data/y.jsonl"}],
        "eval": [{"path": "val.csv"}],
        "system": "You are brief.",
        "max_length": 2048,
    }
    assert tree["train"] == {
        "global_batch_size": 32,
        "optimizer": {
            "betas": [0.9, 0.95], "learning_rate": 1e-5, "groups": {"vision.encoder": {"learning_rate": 2e-6}},
        },
        "precision": "bf16",
        "recompute": "block",
        "epochs": 1,
    }  # fmt: skip
    named = {line.partition(":")[0] for line in left_out}
    assert named == {"lora_rank", "packing", "attn_impl", "deepspeed"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("stage: dpo\nmodel_name_or_path: x", {"method": "dpo"}),
        ("stage: dpo\nmodel_name_or_path: x\npref_loss: simpo", {"method": "simpo", "beta": 0.1, "gamma": 0.5}),
        (
            "stage: dpo\nmodel_name_or_path: x\npref_loss: sigmoid\npref_beta: 0.3\npref_ftx: 1.0",
            {"method": "dpo", "beta": 0.3, "sft_weight": 1.0},
        ),
        (
            "stage: kto\nmodel_name_or_path: x\npref_beta: 0.2\nkto_chosen_weight: 1.0\nkto_rejected_weight: 1.5",
            {"method": "kto", "beta": 0.2, "desirable_weight": 1.0, "undesirable_weight": 1.5},
        ),
        ("swift rlhf --model x --rlhf_type kto --undesirable_weight 0.5", {"method": "kto", "undesirable_weight": 0.5}),
        ("swift rlhf --model x --rlhf_type dpo --loss_type ipo --beta 0.2", {"method": "ipo", "beta": 0.2}),
        ("swift rlhf --model x --rlhf_type simpo", {"method": "simpo"}),
    ],
)
def test_pairs_of_answers_are_converted(text: str, expected: dict[str, Any]) -> None:
    tree, left_out = converted(text + ("\ndataset: y.json" if "\n" in text else " --dataset y.json"))
    assert tree["train"]["preferences"] == expected
    assert not [line for line in left_out if line.startswith(("stage", "rlhf", "loss", "pref", "beta"))]


def test_losses_that_are_not_of_pairs_are_refused() -> None:
    with pytest.raises(UserError, match="'grpo' is no loss of pairs here"):
        converted("swift rlhf --model x --rlhf_type grpo")


@pytest.mark.parametrize("text", ["stage: ppo\nmodel_name_or_path: x", "", "hello"])
def test_what_is_no_supervised_training_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="only configs and command lines of supervised training"):
        converted(text)


def test_another_kind_of_tuning_is_refused() -> None:
    with pytest.raises(UserError, match="'freeze' is no kind of tuning here"):
        converted("model: x\nfinetuning_type: freeze")


def test_every_key_is_written_or_named() -> None:
    keys = {"model": "x", "dataset": "y.json", "frobnicate": 3, "optim": "lion", "lr_scheduler_type": "polynomial"}
    tree, left_out = convert(keys, 1)
    assert tree == {"model": {"id": "x", "lora": {}}, "data": {"train": [{"path": "y.json"}]}}
    assert [line.partition(":")[0] for line in left_out] == ["frobnicate", "optim", "lr_scheduler_type"]
    tree, left_out = convert({"model_name_or_path": "x", "dataset": "mllm_demo"}, 1)
    assert tree["data"] == {"train": [{"id": "mllm_demo"}]}
    assert "data/dataset_info.json is not there, so names are taken for ids of the hub" in left_out[0]
    assert place_of("learning_rate") == "train.optimizer.learning_rate"
    assert [place_of(key) for key in ("train", "steps", "frobnicate")] == [None, None, None]


def test_the_verb_prints_yaml_and_what_it_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.sh").write_text("swift sft --model x --packing true")
    monkeypatch.setattr("sys.argv", ["dilatant", "convert-config", str(tmp_path / "run.sh")])
    with pytest.raises(SystemExit) as ended:
        run()
    out, err = capsys.readouterr()
    assert not ended.value.code
    assert yaml.safe_load(out) == {"model": {"id": "x", "lora": {}}}
    assert "left out: packing: True: samples are always packed" in err
    assert "'data' is missing" in err


def test_zeros_that_are_values_stay() -> None:
    tree, _ = convert({"model": "x", "weight_decay": 0.0, "max_grad_norm": 0, "warmup_steps": 0}, 1)
    assert tree["train"] == {"optimizer": {"weight_decay": 0.0}, "max_grad_norm": None}


def test_scripts_may_have_line_ends_of_windows() -> None:
    assert read_others("swift sft --model m \\\r\n  --dataset a.jsonl\r\n") == {"model": "m", "dataset": "a.jsonl"}


def test_all_of_a_named_data_set_is_converted_or_named(tmp_path: Path) -> None:
    about = {"hf_hub_url": "lab/set", "subset": "en", "split": "dev", "num_samples": 9, "folder": "z", "ranking": False}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"mine": about}))
    names = ["mine", "HF::lab/more:small#5"]
    tree, left_out = convert({"model": "m", "dataset": names, "dataset_dir": str(tmp_path)}, 1)
    assert tree["data"]["train"] == [
        {"id": "lab/set", "subset": "en", "split": "dev", "limit": 9},
        {"id": "lab/more", "subset": "small", "limit": 5},
    ]
    assert left_out == [f"mine.folder of {tmp_path / 'dataset_info.json'}: 'z': no key here"]
