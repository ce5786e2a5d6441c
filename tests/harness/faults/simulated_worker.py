"""A node's worker in the simulated protocol: it computes by the clock, and holds whole histories for weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dilatant.resilience.protocol.agent import (
    Activate,
    Apply,
    Broken,
    Command,
    Done,
    Event,
    Fence,
    HandedOver,
    HandOver,
    Made,
    Prepared,
    Rebuild,
    SaveAndEnd,
    Stopped,
)
from dilatant.resilience.protocol.values import GOES_ON, NO_STATE, too_few

if TYPE_CHECKING:
    from harness.faults.simulator import World

LAYERS = 2


class Violated(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What a node holds: of each of its layers all updates so far, as (step, samples, generation that computed). An
    idle node has no layers, and counts the steps."""

    base: int
    layers: dict[int, tuple[tuple[int, int, int], ...]]
    applied: int = 0


def layers_of(place: int, size: int, needed: int) -> range | tuple[int, ...]:
    """Return the layers of the node at a place. Memory may need a node for each layer: then an odd one is idle."""
    if needed > 1 and place == size - size % LAYERS:
        return ()
    return range(LAYERS) if size == 1 else (place % LAYERS,)


class Worker:
    """A node's only worker: it computes, holds weights, and does as its agent says."""

    def __init__(self, world: World, node: str) -> None:
        self.world = world
        self.node = node
        self.generation = 0
        self.held = Weights(NO_STATE, {})
        self.pending: Weights | None = None
        self.gradient: tuple[int, int, int] | None = None
        self.members: tuple[str, ...] = ()
        self.said = 0.0
        self.is_asked_to_end = self.ends = False

    def do(self, command: Command) -> None:
        world = self.world
        if isinstance(command, Fence):
            self.generation = command.generation
            prepared = None if self.gradient is None else self.gradient[0]
            self.say(0.05, Stopped(command.generation, self.held.base, self.held.applied, prepared))
        elif isinstance(command, Rebuild):
            self.rebuild(command)
        elif isinstance(command, Activate):
            assert self.pending is not None
            self.held, self.pending = self.pending, None
            world.check_held(self.held, "activated")
            self.ends = False
            self.begin()
        elif isinstance(command, HandOver):
            self.generation = command.generation
            world.handed_over += 1
            self.say(world.random.uniform(0.05, 2.0), HandedOver(command.generation))
        elif isinstance(command, SaveAndEnd):
            self.is_asked_to_end = True
        elif isinstance(command, Apply):
            self.apply(command.step)
            self.compute()

    def say(self, seconds: float, event: Event) -> None:
        """To the agent, unless the node is gone by then; what it says is about a generation."""
        world = self.world
        self.said = max(self.said, world.now + seconds + world.slow * world.random.random())  # in order
        world.after(self.said - world.now, lambda: world.event(self.node, event))

    def rebuild(self, order: Rebuild) -> None:
        if self.pending is not None and self.pending.base == order.base:
            self.held = self.pending
        self.pending = None
        if self.held.base == order.base and order.base != NO_STATE:
            if self.held.applied == order.committed - 1:
                self.apply(order.committed - 1)
            if self.held.applied != order.committed:
                raise Violated(f"{self.node} has {self.held.applied} steps and must have {order.committed}")
        self.gradient = None
        self.members = order.members
        mine = self.held if self.held.base == order.base != NO_STATE else None
        everybody = self.world.meet(("copy", order.generation), self.node, mine, order.members)
        if everybody is not None:
            self.world.check_copied(order)
            found: dict[int, Any] = {}
            for weights in everybody.values():
                found |= weights.layers if weights is not None else {}
            if len(order.members) < self.world.needed:
                self.world.save_what_is_left(order, found if len(found) == LAYERS else {})
            for node in order.members:
                other = self.world.workers.get(node)
                if other is not None and other.generation == order.generation:
                    self.world.after(
                        self.world.random.uniform(0.1, 0.6),
                        lambda other=other: other.copied(order, found),  # type: ignore[misc]
                    )

    def copied(self, order: Rebuild, found: dict[int, Any]) -> None:
        if self.generation != order.generation or self.world.workers.get(self.node) is not self:
            return
        size, needed = len(order.members), self.world.needed
        if size < needed:
            reason = too_few(size, f"{needed} that the model needs")
            told = f"; what is left is saved, and {GOES_ON}" if len(found) == LAYERS else ""
            self.say(0.05, Broken(order.generation, f"{reason}{told}", fatal=True))
            return
        wanted = layers_of(order.members.index(self.node), size, needed)
        if len(found) < LAYERS:  # nobody who is left has it: all go back to what was saved
            saved = self.world.saved
            self.world.rollbacks += order.base != NO_STATE
            found = dict.fromkeys(range(LAYERS), saved)
        self.world.idle += not wanted
        self.pending = Weights(order.generation, {layer: found[layer] for layer in wanted}, len(found[0]))
        self.say(0.05, Made(order.generation, self.pending.applied))

    def begin(self) -> None:
        """All agree whether they train at all."""
        generation = self.generation
        everybody = self.world.meet(("begin", generation), self.node, self.is_asked_to_end, self.members)
        if everybody is not None:
            for node in self.members:
                other = self.world.workers.get(node)
                if other is not None and other.generation == generation:
                    other.ends = any(everybody.values())
                    other.compute()

    def compute(self) -> None:
        generation, step = self.generation, self.held.applied
        if step == self.world.steps or self.ends:
            self.say(0.1, Done(generation))
            return

        def computed() -> None:
            if self.generation != generation or self.world.workers.get(self.node) is not self:
                return
            if self.world.random.random() < self.world.flaky:
                self.say(0.0, Broken(generation, "a link failed"))
                return
            everybody = self.world.meet(("step", generation, step), self.node, self.is_asked_to_end, self.members)
            if everybody is not None:
                for node in self.members:
                    other = self.world.workers.get(node)
                    if other is not None and other.generation == generation:
                        self.world.after(
                            self.world.random.uniform(0.0, 0.6),
                            lambda other=other: other.reduced(generation, step, any(everybody.values())),  # type: ignore[misc]
                        )

        self.world.after(self.world.random.uniform(0.3, 1.0), computed)

    def reduced(self, generation: int, step: int, ends: bool) -> None:
        if self.generation == generation and self.world.workers.get(self.node) is self:
            self.ends = ends
            self.gradient = (step, self.world.samples_of(step), generation)
            corrupted = self.world.random.random() < self.world.flaky
            hashes = {"layer": -1 if corrupted else hash(self.gradient)} if self.held.layers else {}
            self.say(0.0, Prepared(generation, step, hashes))

    def apply(self, step: int) -> None:
        if self.gradient is None or self.gradient[0] != step:
            raise Violated(f"{self.node} is to apply step {step} and has {self.gradient}")
        layers = {layer: (*updates, self.gradient) for layer, updates in self.held.layers.items()}
        self.held = Weights(self.held.base, layers, step + 1)
        self.gradient = None
        self.world.check_held(self.held, "applied")
