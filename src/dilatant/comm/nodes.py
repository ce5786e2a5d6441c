"""Node numbers: which ranks share a machine."""

from __future__ import annotations

from dilatant.comm.comm import Comm


def nodes_of(comm: Comm) -> tuple[int, ...]:
    """Return the node of every rank, numbered in the order of each node's first rank."""
    numbers = {machine: number for number, machine in enumerate(dict.fromkeys(comm.machines))}
    return tuple(numbers[machine] for machine in comm.machines)
