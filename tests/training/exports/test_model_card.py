"""The model card of an export, and its upload."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import HfApi, ModelCard

from dilatant.config import UserError
from dilatant.config.config import parse_config
from dilatant.hf.hub_upload import push
from dilatant.training.export_checkpoint import model_card


def card_of(base: Path, licence: str | None = None, **model: Any) -> ModelCard:
    data = {"train": [{"path": "secret/charts.jsonl", "weight": 2}, {"id": "someone/questions"}]}
    train = {"steps": 9, "global_batch_size": 8}
    tree = {"output_dir": "run", "model": model, "data": data, "train": train}
    return ModelCard(model_card(parse_config(tree, base=base), base / "my|run", 7, licence))


def test_a_card_says_where_a_model_comes_from(tmp_path: Path) -> None:
    card = card_of(tmp_path, id="owner/vlm", lora={"r": 4})
    assert card.data.base_model == ["owner/vlm"]
    assert card.data.datasets == ["someone/questions"]
    assert card.data.license is None
    for part in (
        "| from | owner/vlm |",
        "| data | charts.jsonl (weight 2), someone/questions (weight 1) |",
        "| steps | 7 of 8 samples each |",
        "| trained | LoRA of rank 4 on language |",
        "| licence | not stated",
        "| plan | not stored |",
    ):
        assert part in card.text
    assert "secret" not in card.content
    assert str(tmp_path) not in card.content


def test_a_folder_is_named_by_its_last_part_and_is_no_id(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    card = card_of(tmp_path, "apache-2.0", id="m")
    assert card.data.license == "apache-2.0"
    assert card.data.base_model is None
    assert "| from | m |" in card.text


class Hub:
    """Stands for huggingface_hub's API: accepts what that accepts, and keeps it."""

    def __init__(self, problem: Exception | None = None) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.problem = problem

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = inspect.signature(getattr(HfApi, name)).bind(self, *args, **kwargs).arguments
            self.calls.append((name, bound))
            if self.problem is not None:
                raise self.problem
            return SimpleNamespace(repo_id=bound["repo_id"])

        return call


def test_an_upload_makes_a_private_repository_and_drops_old_shards(tmp_path: Path) -> None:
    hub = Hub()
    push(tmp_path, "me/mine", 3, api=hub)
    (first, made), (second, sent) = hub.calls
    assert (first, second) == ("create_repo", "upload_folder")
    assert made["private"] is True
    assert made["exist_ok"] is True
    assert sent["folder_path"] == tmp_path
    assert sent["ignore_patterns"] == ["files.json"]
    assert "*.safetensors" in sent["delete_patterns"]
    with pytest.raises(UserError, match=r"is exported, but could not be pushed to 'me/mine': 403 no"):
        push(tmp_path, "me/mine", 3, api=Hub(RuntimeError("403\nno")))
