"""Nodes of a Ray cluster as a run's machines: each one's agent is an actor in a placement group.

Ray finds the nodes, replaces lost ones and carries what they print; membership, commits and recovery stay with the
coordinator, which knows these agents like any others. Ray is an optional dependency, imported inside functions.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from dilatant.comm.errors import WorkerFailed
from dilatant.comm.ray_cluster import LOCAL, Connection, cause_of, check_cluster, cluster_address
from dilatant.comm.store.token import fresh_token
from dilatant.config import Config, UserError
from dilatant.config.environment import use_ray_cluster
from dilatant.report.say import say, warn
from dilatant.report.text.wording import counted
from dilatant.resilience.machines import LEADER_LAST_SECONDS, LeaderAddresses
from dilatant.resilience.processes.agent_run import AgentOptions, run_agent
from dilatant.resilience.processes.messages import is_loopback

FAILED_STARTS = 3
"""Actors in a row that may end before they run, after which a lost node is not replaced any more."""
LOOK_SECONDS = 1.0


class NodeAgent:
    """Ray actor that is the agent of its node. The ranks are its children, on the devices that Ray gives the actor."""

    def greet(self) -> str:
        """Return the node's address, which also tells that the actor runs."""
        import ray

        return str(ray.util.get_node_ip_address())

    def serve(self, options: AgentOptions, token: bytes) -> int:
        """Run this node's ranks in the run; see `run_agent`."""
        import ray

        use_ray_cluster(ray.get_runtime_context().gcs_address)  # data.preprocess: ray
        return run_agent(options, token)


@dataclass(eq=False)
class _Agent:
    """An actor, which ends without this reference to it. bundle: its index in the placement group. address, exit_code:
    Ray references of what `greet` and `serve` return. failed_starts: actors before it in this bundle that ended before
    they ran."""

    bundle: int
    actor: Any
    address: Any
    exit_code: Any
    failed_starts: int


class RayMachines:
    """`Machines` that are nodes of the Ray cluster of a config, to which this process is connected until `close`.

    leader: addresses of this process, on a node of the cluster. Raises UserError if Ray or the cluster is missing.
    """

    def __init__(self, config: Config) -> None:
        address = cluster_address(config.data.ray_address)
        check_cluster(address, "launcher")
        if address == LOCAL:
            raise UserError(
                "launcher: 'ray' needs a cluster of several machines; set RAY_ADDRESS or data.ray_address to HOST:PORT "
                "of `ray start --head`"
            )
        self._connection = Connection(address, shows_logs=True)
        import ray

        ranks, hardware = config.resilience.ranks_per_node, config.cluster.hardware
        has_gpus = hardware not in (None, "CPU") or any(node.get("GPU") for node in _nodes())
        self._bundle = {"CPU": ranks} | ({"GPU": ranks} if has_gpus and config.train.device != "cpu" else {})
        self._seconds = config.parallel.timeout_seconds
        self._agents: list[_Agent] = []
        self._group: Any = None
        self.token = fresh_token()
        host = str(ray.util.get_node_ip_address())
        self.leader = LeaderAddresses(host if is_loopback(host) else "", 0, host)

    def start(self, leader: LeaderAddresses, count: int, console: Console) -> None:
        """Reserve `count` nodes and start an agent on each. Raises UserError if Ray does not give them in time."""
        import ray

        self._console, self._options = console, AgentOptions(leader.name, leader.port)
        self._group = ray.util.placement_group([self._bundle] * count, strategy="STRICT_SPREAD")
        deadline, is_shown = time.monotonic() + self._seconds, False
        while not self._group.wait(LOOK_SECONDS):
            missing = shortage(self._bundle, count, _nodes(), ray.available_resources())
            if time.monotonic() > deadline:
                raise UserError(f"launcher: Ray has not given the nodes in {self._seconds:g} s: {missing}")
            if not is_shown:
                say(console, f"waits for Ray: {missing}")
                is_shown = True
        self._agents = [self._begin(bundle) for bundle in range(count)]

    def watch(self, has_begun: bool) -> None:
        """Start the agents of lost nodes again, where Ray places them. Raises WorkerFailed before the run has begun."""
        import ray

        if not self._agents:
            return
        codes = [agent.exit_code for agent in self._agents]
        ended, _ = ray.wait(codes, num_returns=len(codes), timeout=0)
        for agent in [agent for agent in self._agents if agent.exit_code in ended]:
            self._agents.remove(agent)
            problem, is_lost = _end_of(agent)
            if problem and not has_begun:
                raise WorkerFailed(f"a node's agent ended before the run began: {problem}")
            if is_lost:
                self._replace(agent, problem)
            elif problem:
                warn(self._console, f"a node's agent ended, and is not started again: {problem}")

    def close(self) -> None:
        """Give running agents some seconds to end, then leave the cluster, which frees the nodes. Idempotent."""
        import ray

        agents, self._agents = self._agents, []
        running = [agent.exit_code for agent in agents if ray.wait([agent.address], timeout=0)[0]]
        if running:
            ray.wait(running, num_returns=len(running), timeout=LEADER_LAST_SECONDS)
        self._connection.close()

    def _begin(self, bundle: int, failed_starts: int = 0) -> _Agent:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        # One processor, so that Ray lets each rank compute in one thread; the bundle keeps the others for the ranks.
        make = ray.remote(NodeAgent).options(
            num_cpus=1,
            num_gpus=self._bundle.get("GPU", 0),
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle),
        )
        actor = make.remote()
        return _Agent(bundle, actor, actor.greet.remote(), actor.serve.remote(self._options, self.token), failed_starts)

    def _replace(self, agent: _Agent, problem: str) -> None:
        """Start the agent of a lost node again, on the node that Ray gives its bundle."""
        import ray

        try:
            place, failed = f"node {ray.get(agent.address, timeout=0)}", 0
        except ray.exceptions.RayError:
            place, failed = "a node", agent.failed_starts + 1
        if failed == FAILED_STARTS:
            warn(self._console, f"{place} is not replaced: {failed} agents could not start; the last: {problem}")
            return
        say(self._console, f"{place} was lost: {problem}; another one joins when Ray gives it")
        ray.kill(agent.actor)  # Ray also calls an actor unavailable that may still run
        self._agents.append(self._begin(agent.bundle, failed))


def _nodes() -> list[Mapping[str, float]]:
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _end_of(agent: _Agent) -> tuple[str, bool]:
    """Return why an agent has ended, empty if it was asked to; and True if its process or node was lost."""
    import ray

    try:
        code = ray.get(agent.exit_code)
    except ray.exceptions.RayError as error:
        return cause_of(error), not isinstance(error, ray.exceptions.RayTaskError)
    return f"its exit code is {code}; what it said is above" if code else "", False


def shortage(
    bundle: Mapping[str, float], count: int, nodes: Sequence[Mapping[str, float]], free: Mapping[str, float]
) -> str:
    """Say what a cluster lacks for `count` nodes with the resources of `bundle` each.

    nodes: resources of each node that is alive. free: resources of all nodes that nobody has reserved.
    """
    each = " and ".join(counted(int(amount), kind) for kind, amount in bundle.items())
    large = [node for node in nodes if all(node.get(kind, 0) >= amount for kind, amount in bundle.items())]
    if len(large) < count:
        return f"{len(large)} of its {counted(len(nodes), 'node')} have {each}, and the run needs {count} such nodes"
    all_of = {kind: sum(node.get(kind, 0) for node in nodes) for kind in bundle}
    left = " and ".join(f"{free.get(kind, 0):g} of {amount:g} {kind}s" for kind, amount in all_of.items())
    return f"the run needs {count} nodes with {each}, but others use the cluster: {left} are free"
