"""The table of architectures in docs/families.md is what was measured, and no family falls to a lower rung."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers.utils import is_torchvision_available

from benchmarks.models import families_of_transformers

RESULTS = json.loads(families_of_transformers.CHECKED.read_text(encoding="utf-8"))
PROVEN = {family: result["rung"] for family, result in RESULTS.items() if result["rung"] is not None}


def test_the_page_has_the_results_of_every_check() -> None:
    _, _, table = families_of_transformers.PAGE.read_text(encoding="utf-8").partition(families_of_transformers.BEGIN)
    assert families_of_transformers.markdown().endswith(table)
    assert all(result["refusals"] for result in RESULTS.values() if result["rung"] != 3)
    assert not re.search(r"\w(Error|Exception)\b", table)


@pytest.mark.parametrize(
    ("reason", "line"),
    [
        ("blip: 'blip' does not open whole: a reason. Name its encoder and more", "a reason"),
        ("stages of one block do not run (RuntimeError: a shape)", "stages of one block do not run"),
        ("images are not read: they do not run (StrictDataclassError: 3 (4))", "images are not read: they do not run"),
        ("TypeError: blocks (3)", "a small copy ends in an error of Python"),
        ("the loss changes from 1 (a half) to 2", "the loss changes from 1 (a half) to 2"),
    ],
)
def test_the_page_has_reasons_without_errors_of_python(reason: str, line: str) -> None:
    assert families_of_transformers.plain(reason) == line


def test_ids_of_checked_configs_are_in_their_vocabulary() -> None:
    for family in ("llava_next_video", "minicpmv4_6", "video_llava", "qwen3_omni_moe"):
        config = families_of_transformers.config_of(family)
        kinds = ("image", "audio", "video")
        ids = {getattr(config, f"{kind}_token_{end}", None) for kind in kinds for end in ("id", "index")}
        assert max(ids - {None}) < config.get_text_config().vocab_size, family


def test_a_family_is_named_by_its_type_or_its_class(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "a.py").write_text(
        'KINDS = ("llava",)\nfrom transformers import AriaForConditionalGeneration\n'
    )
    (tmp_path / "room" / "b.py").write_text("GLM4V = my_glm4v = Ariadne = 0\n")
    families = ["llava", "aria", "glm4v", "janus"]
    assert families_of_transformers.named_in_source(families, tmp_path) == {"llava", "aria"}


def test_most_families_train_without_being_named_in_the_source() -> None:
    trained = {family for family, result in RESULTS.items() if families_of_transformers.is_trained(result)}
    named = families_of_transformers.named_in_source(trained, families_of_transformers.SOURCE)
    assert {"llava", "qwen2_vl"} <= named
    assert len(trained - named) > len(trained) / 2


@pytest.mark.slow
@pytest.mark.parametrize("family", PROVEN)
def test_no_family_falls_to_a_lower_rung(family: str) -> None:
    for package in RESULTS[family]["needs"]:
        pytest.importorskip(package)
    result = families_of_transformers.check(family)
    assert result["rung"] is not None, result["refusals"]
    assert result["rung"] >= PROVEN[family], result["refusals"]
    assert families_of_transformers.is_trained(result) == families_of_transformers.is_trained(RESULTS[family])
    before = RESULTS[family]
    assert result["proven"]["tp"] == before["proven"]["tp"]
    if is_torchvision_available():
        assert result["found"].get("clips") == before["found"].get("clips"), result["found"]
