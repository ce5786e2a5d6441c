"""Sentences on why a search did not choose a layout."""

from __future__ import annotations

from dilatant.plan.cluster import Cluster
from dilatant.plan.search.search_result import SearchResult
from dilatant.plan.search.why_not import WhyNot
from dilatant.report.search_report import compared_plan
from dilatant.report.text.plan_summary import explain
from dilatant.report.text.wording import bytes_text, counted, listed, percent_text, seconds_text


def why_not_text(answer: WhyNot, result: SearchResult, cluster: Cluster) -> tuple[str, ...]:
    """Return whether such a plan was tried, was cut by its bound, does not fit, or is slower and why."""
    if answer.is_chosen:
        return ("The plan that was chosen is like that.",)
    if not answer.plans:
        return no_plan_text(answer, cluster)
    best, winner = answer.plans[0], compared_plan(result.winner, cluster, chosen=True)
    own = compared_plan(best, cluster)
    slower = best.score.seconds / result.seconds - 1.0
    return (
        _tried(answer, result),
        f"The fastest like that: {own.name}, {own.layout}, schedule {best.score.schedule}, takes "
        f"{seconds_text(best.score.seconds)} a step, {percent_text(abs(slower))} "
        f"{'more' if slower >= 0 else 'less'} than the plan that was chosen ({seconds_text(result.seconds)}).",
        explain(own, winner),
        f"Its fullest rank needs {bytes_text(max(best.score.peak_bytes, default=0.0))} of the "
        f"{_capacities(cluster)} that plans may use.",
    )


def no_plan_text(answer: WhyNot, cluster: Cluster) -> tuple[str, ...]:
    """Return why an answer has no plan."""
    if answer.impossible:
        return tuple(f"No plan is like that: {why}." for why in answer.impossible)
    return (
        f"No plan like that fits memory, of which plans may use {_capacities(cluster)} on each device: the nearest, "
        f"{answer.overflow}.",
    )


def _capacities(cluster: Cluster) -> str:
    """Return the memory of a device that plans may use."""
    if not cluster.parts:
        return bytes_text(cluster.bytes_per_device)
    return listed([f"{bytes_text(own.bytes_per_device)} ({own.name})" for own in cluster.parts])


def _tried(answer: WhyNot, result: SearchResult) -> str:
    are = "is" if answer.candidates == 1 else "are"
    like = f"{counted(answer.candidates, 'candidate')} of the search {are} like that"
    if answer.was_simulated:
        return f"{like}, and the fastest of them was simulated and compared."
    if not answer.candidates:
        return "The search took no plan like that to fit memory; simulated now, one does."
    if answer.bound >= result.seconds:
        return f"{like}, and none was simulated: none can take less than {seconds_text(answer.bound)}."
    return (
        f"{like}, and the fastest was not simulated, since others promised more (it cannot take less than "
        f"{seconds_text(answer.bound)}); simulated now:"
    )
