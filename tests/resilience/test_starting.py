"""How a machine becomes part of a run that a launcher starts, or starts again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from dilatant.config import UserError, load_config
from dilatant.config.environment import LaunchPlace
from dilatant.resilience.launch import fresh_folder
from dilatant.resilience.processes.agent_run import coordinator_port
from dilatant.resilience.processes.coordinator_process import STATE, read_record
from dilatant.resilience.protocol.agent import Agent
from dilatant.resilience.protocol.coordinator import Coordinator
from dilatant.resilience.protocol.values import Order, Settings

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_agent_started_by_launcher_imports_no_torch(tmp_path: Path) -> None:
    """Only its ranks need it, which are processes of their own."""
    config = EXAMPLES / "quickstart.yaml"
    program = f"""
import sys
from pathlib import Path
import dilatant.resilience.processes.agent_run as agents
from dilatant.cli.options import read_config
from dilatant.cli.train import run
def told(options):
    print(options.host, options.port, options.stands_by, "torch" in sys.modules)
    return 75
agents.run_agent = told
sys.exit(run(read_config(Path({str(config)!r}), ["resilience.enabled=true", "resilience.standby=b:1"])))
"""
    placed = {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **placed}, cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.split()) == (75, ["a", "29500", "True", "False"]), done.stderr


def test_a_launcher_starts_one_process_a_machine() -> None:
    place = LaunchPlace("Slurm", 1, 8, 1, 4, "n1", 20000, True)
    with pytest.raises(UserError, match=r"Slurm started 4 processes .*--ntasks-per-node=1"):
        coordinator_port(place)


def test_new_coordinator_turns_away_agents_of_an_earlier_start(tmp_path: Path) -> None:
    """Their leader was started again under the same address, as a pod is, and they heed no lesser term."""
    config = load_config(EXAMPLES / "quickstart.yaml", [f"output_dir={tmp_path}"])
    before = Coordinator(Settings(initial=1), read_record(fresh_folder(config)), now=0.0)
    agent = Agent("node-a", Settings(), 1)
    effects = [*before.start(), *before.hear(agent.status(), now=0.0)]
    for second in range(100):  # it orders again and again in a long run
        effects += [*before.hear(agent.status(), float(second)), *before.tick(float(second))]
    for effect in effects:
        if isinstance(effect, Order):
            agent.obey(effect, now=100.0)
        else:
            (tmp_path / "resilience" / STATE).write_bytes(msgspec.json.encode(effect.record))
    assert agent.generation == 1
    after = Coordinator(Settings(initial=1), read_record(fresh_folder(config)), now=200.0)
    (order,) = after.hear(agent.status(), now=200.0)
    assert isinstance(order, Order)
    agent.obey(order, now=200.0)
    assert agent.is_out
