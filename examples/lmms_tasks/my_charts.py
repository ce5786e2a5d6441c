"""Functions of the lmms-eval task in my_charts.yaml: what a row shows and asks, and how an answer is scored."""

from __future__ import annotations

from typing import Any

from lmms_eval.tasks.chartqa.utils import relaxed_correctness


def images(row: dict[str, Any]) -> list[Any]:
    return [row["image"].convert("RGB")]


def question(row: dict[str, Any], lmms_eval_specific_kwargs: Any = None) -> str:
    return str(row["question"])


def scores(row: dict[str, Any], written: list[str]) -> dict[str, float]:
    return {"relaxed_overall": float(relaxed_correctness(written[0], row["answer"]))}
