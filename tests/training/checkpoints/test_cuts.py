"""A layout without cuts is cut so that the run's costs are most even, and keeps these cuts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cases.planning.planned_project import LANGUAGE, VISION, config, model_section, write_samples
from dilatant.plan.plan import ParallelSpec
from dilatant.planning.layout import TrainingPlan
from dilatant.training.prepare import prepare
from dilatant.training.run_costs import Cutter


def planned(folder: Path, language: dict[str, Any], **sections: Any) -> TrainingPlan:
    """Return the plan of a run with this layout of the language model and a separate encoder."""
    layout = {"units": {"vision": {}, "language": language}, "microbatches": 4}
    return prepare(config(folder, parallel=layout, **sections)).planned


def cuts(found: TrainingPlan, unit: str = "language") -> tuple[int, ...]:
    return tuple(stage.first for stage in found.plan.unit(unit).replicas[0].stages)


def slowest(found: TrainingPlan, tokens: float) -> float:
    """Return the seconds of the slowest language-model stage for a row of one sample of `tokens` tokens."""
    assert found.costs is not None
    own = [placed.index for placed in found.plan.stages() if placed.unit == "language"]
    work = found.costs.stages.seconds[own][:, :2].sum(axis=1) @ np.array([tokens**2, tokens, 1.0])
    return float(work.max())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with an empty cache, without layer costs of other tests."""
    monkeypatch.setenv("DILATANT_CACHE", str(tmp_path / "cache"))
    write_samples(tmp_path, 32)
    return tmp_path


def test_no_other_cut_has_a_faster_slowest_stage(folder: Path) -> None:
    """The vocabulary makes the head as slow as several blocks, and the first blocks are frozen."""
    frozen = [f"language.layers.{number}" for number in range(2)]
    section = model_section(config={**LANGUAGE, "vocab_size": 6000})
    sections: dict[str, Any] = {"model": {**section, "freeze": ["vision.encoder", *frozen]}}
    own = planned(folder, {"pp": 2}, **sections)
    others = [planned(folder, {"pp": 2, "cuts": [0, first]}, **sections) for first in range(1, 6)]
    tokens = 128.0
    assert slowest(own, tokens) == pytest.approx(min(slowest(other, tokens) for other in others), rel=1e-9)
    assert slowest(own, tokens) < 0.9 * slowest(others[2], tokens)  # an even one
    assert [cuts(other) for other in others] == [(0, first) for first in range(1, 6)]  # as they were written


def test_resumed_run_keeps_its_cuts_until_the_layout_changes(folder: Path) -> None:
    """Costs that are measured between the runs do not change the cuts."""
    own = planned(folder, {"pp": 2})
    other = planned(folder, {"pp": 2, "cuts": [0, 1]})
    assert cuts(own) != cuts(other)
    (folder / "run").mkdir()
    (folder / "run" / "plan.json").write_text(other.to_json(), encoding="utf-8")
    train = {"global_batch_size": 16, "steps": 2, "report_to": []}
    resumed = {**train, "resume": "auto"}
    assert planned(folder, {"pp": 2}, train=train).plan == own.plan
    assert planned(folder, {"pp": 2}, train=resumed).plan == other.plan
    for changed in ({"pp": 3}, {"pp": 2, "replicas": 2}):
        assert planned(folder, changed, train=resumed).plan == planned(folder, changed).plan


def test_encoders_in_the_first_stage_leave_it_fewer_layers(folder: Path) -> None:
    heavy = model_section()
    heavy["encoders"]["vision"]["config"] = {**VISION, "num_hidden_layers": 16}
    tree = {"units": {"language": {"pp": 2}}, "colocated": {"vision": "language"}}
    run = config(folder, parallel=tree, model=heavy)
    together, apart = prepare(run).planned, planned(folder, {"pp": 2}, model=heavy)
    assert cuts(together) == (0, 1)
    assert cuts(apart) > (0, 1)


def test_cuts_assume_longest_rows_where_sizes_are_unknown(folder: Path) -> None:
    known = prepare(config(folder, parallel={"units": {"vision": {"pp": 2}, "language": {"pp": 2}}}))
    specs = {"vision": ParallelSpec(pp=2), "language": ParallelSpec(pp=2)}
    found = Cutter(config(folder), known.model, {})(specs, {}, known.planned.plan)
    row = 128.0  # data.max_length, and four patches an image
    assert found["vision"].cuts == cuts(known.planned, "vision")
    staged = planned(folder, {"pp": 2, "cuts": list(found["language"].cuts or ())})
    assert slowest(staged, row) == min(slowest(planned(folder, {"pp": 2, "cuts": [0, k]}), row) for k in range(1, 6))
