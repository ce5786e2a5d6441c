"""Real agents, coordinators and connections under faults of all kinds: every history is that of an undisturbed run."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path

import pytest

from harness.faults.light.checker import check
from harness.faults.light.cluster import FAULTS, Cluster, inject


def run_chaos(folder: Path, seed: int, faults: list[str], size: int = 4) -> Counter[str]:
    """Inject faults one after another; the generations and steps that came of it."""
    draw = random.Random(seed)
    cluster = Cluster(folder, size)
    try:
        cluster.await_steps(2)
        for number, kind in enumerate(faults):
            try:
                inject(cluster, kind, draw)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, fault {number} ({kind}): {error}") from None
        cluster.end()
        last = check(cluster.histories())
        return Counter(steps=last, generations=cluster.record.generation, faults=len(faults))
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from None
    finally:
        cluster.close()


SLOW = ["stopped and continued", "worker stopped", "cut off", "cut off one way", "slow network", "data cut off"]
QUICK = [kind for kind in FAULTS if kind not in SLOW]
RUNS = 4


@pytest.mark.parametrize("run", [0, *(pytest.param(run, marks=pytest.mark.slow) for run in range(1, RUNS))])
def test_steps_count_once_and_replicas_agree_under_kills(run: int, tmp_path: Path) -> None:
    """All kinds twice, in another order."""
    faults = [*QUICK, *QUICK]
    random.Random(0).shuffle(faults)
    assert run_chaos(tmp_path, run, faults[run::RUNS])["generations"] > 6


@pytest.mark.slow
def test_steps_count_once_and_replicas_agree_under_cuts_or_stops(tmp_path: Path) -> None:
    assert run_chaos(tmp_path, 0, SLOW)["steps"] > 10


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_steps_count_once_under_a_thousand_faults(tmp_path_factory: pytest.TempPathFactory) -> None:
    """`make chaos`; CHAOS_FAULTS and CHAOS_SEED choose others."""
    wanted, seed = int(os.environ.get("CHAOS_FAULTS", "1000")), int(os.environ.get("CHAOS_SEED", "1000"))
    found: Counter[str] = Counter()
    while found["faults"] < wanted:
        draw = random.Random(seed)
        faults = draw.choices(list(FAULTS), list(FAULTS.values()), k=min(25, wanted - found["faults"]))
        found += run_chaos(tmp_path_factory.mktemp("chaos"), seed, faults, draw.choice((3, 4, 5)))
        print(f"seed {seed}: {dict(found)}", flush=True)
        seed += 1
