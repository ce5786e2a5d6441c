"""A whole model by an id of the hub, found in the cache without any network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForImageTextToText

from cases.tiny_wholes import save_as_the_hub_does

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def in_cache(folder: Path, family: str) -> None:
    """The model `somebody/tiny` as `hf download` leaves it: blobs, and a snapshot of links."""
    model = folder / "hub" / "models--somebody--tiny"
    save_as_the_hub_does(family, model / "made")
    (model / "blobs").mkdir()
    snapshot = model / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted((model / "made").iterdir())):
        blob = model / "blobs" / f"{number:040}"
        file.rename(blob)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    (model / "made").rmdir()
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(COMMIT)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "paligemma"])
def test_an_id_is_read_trained_in_stages_and_exported(family: str, project: Path) -> None:
    in_cache(project / "home", family)
    config = {
        "output_dir": "run",
        "model": {"id": "somebody/tiny", "freeze": ["vision.encoder"]},
        "data": {"train": [{"path": "train.jsonl"}], "max_length": 96, "workers": 0},
        "parallel": {"units": {"vision": {"pp": 1}, "language": {"pp": 2}}, "microbatches": 2},
        "train": {"steps": 1, "global_batch_size": 4, "report_to": [], "device": "cpu"},
    }
    (project / "config.yaml").write_text(yaml.safe_dump(config))
    offline = {"HF_HOME": str(project / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    for name, code, said in (("somebody/tiny", 0, ""), ("somebody/else", 2, "neither a local folder nor in the")):
        command = [sys.executable, "-m", "dilatant", "train", "config.yaml", "--set", f"model.id={name}", "--overwrite"]
        ended = subprocess.run(
            command, cwd=project, env={**os.environ, **offline}, capture_output=True, text=True, check=False
        )
        assert ended.returncode == code, ended.stderr
        assert said in " ".join(ended.stderr.split())
    exported = AutoModelForImageTextToText.from_pretrained(project / "run" / "export")
    assert exported.config.model_type == family
    # What was copied from the hub's files goes along.
    assert json.loads((project / "run" / "export" / "preprocessor_config.json").read_text())["image_mean"] == [0.5] * 3
