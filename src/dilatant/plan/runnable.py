"""What of all that plans can say this version trains: planner, page and the refusal of training ask here."""

from __future__ import annotations

from dilatant.plan.plan import Plan


def trains(tp: int, cp: int) -> bool:
    """Whether the runtime runs stages of these degrees."""
    return True


def planned_only(plan: Plan) -> dict[str, str]:
    """Unit → its degrees that this version plans but does not train, as in "cp 2"; empty for a plan that trains."""
    found = {}
    for unit in plan.units:
        degrees = {(stage.tp, stage.cp) for replica in unit.replicas for stage in replica.stages}
        texts = [degrees_text(tp, cp) for tp, cp in sorted(degrees) if not trains(tp, cp)]
        if texts:
            found[unit.name] = " and ".join(texts)
    return found


def planned_only_text(plan: Plan) -> str:
    """`planned_only` for a reader, as in "vision cp 2, language cp 2"; empty for a plan that trains."""
    return ", ".join(f"{unit} {degrees}" for unit, degrees in planned_only(plan).items())


def degrees_text(tp: int, cp: int) -> str:
    """`tp 2 cp 4`, without what is 1."""
    return " ".join(f"{name} {degree}" for name, degree in (("tp", tp), ("cp", cp)) if degree != 1)


def training_problems(plan: Plan) -> list[str]:
    """Why this version cannot train the plan, once for each unit."""
    return [
        f"unit {unit!r} asks for {degrees}, which this version plans but does not train yet; give it cp = 1 and more "
        "stages, replicas or tp instead"
        for unit, degrees in planned_only(plan).items()
    ]
