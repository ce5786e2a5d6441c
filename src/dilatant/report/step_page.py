"""The step page: one measured step as one HTML file that needs no network and opens from a disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dilatant.plan import Plan
from dilatant.report.gantt_data import pack_chart
from dilatant.report.gantt_of_step import measured_chart
from dilatant.report.gantt_summary import losses, pace
from dilatant.report.gantt_tables import action_legend, cause_tones, idle_legend, idle_rows
from dilatant.report.page import scripted, template
from dilatant.report.wording import seconds_text, unbroken
from dilatant.schedule.measured import MeasuredAction


def write_step_page(path: str | Path, actions: Sequence[MeasuredAction], plan: Plan, title: str) -> Path:
    """Write the page of one step to `path` and return it. Raises ValueError without actions."""
    path = Path(path)
    path.write_text(render_step_page(actions, plan, title), encoding="utf-8")
    return path


def render_step_page(actions: Sequence[MeasuredAction], plan: Plan, title: str) -> str:
    """The page as text; everything given is escaped. Raises ValueError without actions."""
    timeline = measured_chart(actions, plan)
    tones = cause_tones(plan, timeline.idle_fractions())
    samples = {sample for one in actions for sample in one.samples}
    microbatches = {(one.unit, one.action.stage, one.action.microbatch) for one in actions}
    most = max(sum(1 for _, stage, _ in microbatches if stage == placed.index) for placed in plan.stages())
    return template("step.html").render(
        title=title,
        subtitle=f"{seconds_text(timeline.seconds)} for {len(samples):,} samples in {most} "
        f"{'microbatch' if most == 1 else 'microbatches'} on {len(plan.ranks):,} ranks",
        summary=[unbroken(one) for one in (losses(timeline), *pace(timeline, plan))],
        action_legend=action_legend(plan, [timeline]),
        idle_rows=idle_rows(timeline, plan, tones),
        idle_legend=idle_legend(tones),
        **scripted({"timelines": [pack_chart(timeline, plan, title)]}),
    )
