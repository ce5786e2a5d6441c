"""Step page: one measured step as one HTML file, beside its prediction if there is one."""

from __future__ import annotations

from collections.abc import Sequence

from dilatant.plan import Plan
from dilatant.report.gantt import measured_chart, predicted_chart
from dilatant.report.pages.page import pack_chart, render
from dilatant.report.parts import summary
from dilatant.report.step_comparison import Prediction, comparison_section
from dilatant.report.text.gantt_summary import data_waits, losses, measurement, pace
from dilatant.report.text.gantt_tables import cause_tones, idle_section, timeline_parts
from dilatant.report.text.wording import counted, seconds_text, unbroken
from dilatant.schedule.measured import DataWait, MeasuredAction


def render_step_page(
    actions: Sequence[MeasuredAction],
    plan: Plan,
    title: str,
    prediction: Prediction | None = None,
    waits: Sequence[DataWait] = (),
) -> str:
    """Return the page as text; all values are escaped. Raises ValueError without actions."""
    measured = measured_chart(actions, plan, waits)
    computed = measured_chart(actions, plan)  # predictions exclude waits for data
    predicted = None if prediction is None else predicted_chart(prediction.timeline)
    charts = {"Who computed what, when": measured}
    if predicted is not None:
        charts = {"The step as predicted": predicted, "The step as measured": measured}
    tones = cause_tones(plan, [cause for chart in charts.values() for cause in chart.idle_fractions()])
    samples = {sample for one in actions for sample in one.samples}
    microbatches = {(one.unit, one.action.stage, one.action.microbatch) for one in actions}
    most = max(sum(1 for _, stage, _ in microbatches if stage == placed.index) for placed in plan.stages())
    sentences = [losses(measured, plan), *data_waits(waits, measured.seconds), *pace(measured, plan)]
    if predicted is not None:
        sentences = [*measurement(predicted, computed, plan), *sentences]
    longest = max(chart.seconds for chart in charts.values())
    parts = [summary(map(unbroken, sentences))]
    if predicted is not None and prediction is not None:
        note = f"By costs {prediction.origin}, without the summing of gradients."
        parts.append(comparison_section(predicted, computed, plan, tones, note))
    return render(
        f"{title} · Dilatant timeline",
        title,
        f"{seconds_text(measured.seconds)} for {counted(len(samples), 'sample')} in "
        f"{counted(most, 'microbatch')} on {counted(len(plan.ranks), 'rank')}",
        [*parts, *timeline_parts(charts, plan), idle_section(measured, plan, tones)],
        "Measured, every action on every rank.",
        [pack_chart(chart, plan, name, longest) for name, chart in charts.items()],
    )
