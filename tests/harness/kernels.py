"""Compile numba's kernels once before tests start, since every test process would compile those that it calls.

Tests that call the kernels run here in two processes, one half of the kernels each; their results are ignored, because
they run again with all other tests. Numba caches compiled kernels beside the source; if all caches are younger than
their sources, nothing is compiled.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HALVES = (
    (
        "attention/test_block_tables.py::test_the_transposed_table_is_the_table_by_columns",
        "attention/test_block_tables.py::test_joined_intervals_hide_nothing_and_stay_few",
        "attention/test_block_placement.py::test_swaps_only_ever_help",
        "schedule/test_simulator.py::test_messages_take_turns_at_ports_as_in_the_event_simulator",
        "schedule/test_simulator.py::test_busy_and_idle_by_cause_fill_every_rank_exactly",
        "schedule/test_memory_sweep.py::test_1f1b_holds_one_microbatch_per_stage_behind_it",
        "schedule/test_schedule_families.py::test_zero_bubble_h2_ranks_never_idle_between_their_actions",
        "schedule/test_plan_scorer.py::test_a_deep_schedule_gives_way_to_memory",
        "plan/test_search.py::test_all_devices_run_valid_stages",
        "plan/costs/test_partition.py::test_equally_good_cuts_resolve_to_the_most_even_one",
        "plan/costs/test_partition.py::test_an_impossible_cut_says_what_is_missing",
    ),
    (
        "plan/templates/test_templates.py::test_equally_slow_stages_count_as_the_longer_path",
        "plan/templates/test_compose.py::test_template_seconds_cover_the_batch_without_planned_count",
        "plan/templates/test_reinstantiate.py::test_a_smaller_template_replaces_a_pipeline_after_a_loss",
        "schedule/test_assign_microbatches.py::test_balanced_is_within_half_percent_of_bound_on_both_units",
        "schedule/test_assign_microbatches.py::test_the_search_reaches_its_step_on_the_vlm_distribution",
        "schedule/test_assign_microbatches.py::test_unlike_replica_counts_get_an_assignment_that_runs",
        "benchmarks/test_microbatch_policies.py::test_entrain_uses_fewer_microbatches_where_that_is_faster",
        "benchmarks/test_microbatch_policies.py::test_matchings_equal_brute_force",
    ),
)
"""Node ids below tests/."""


def compile_kernels() -> None:
    tests = Path(__file__).parents[1]
    if all(_is_cached(source) for source in (tests.parent / "src").rglob("*.py")):
        return
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    running = [
        subprocess.Popen(
            [*command, *(str(tests / test) for test in half)],
            cwd=tests.parent,
            env=inherited,
            stdout=subprocess.DEVNULL,
        )
        for half in HALVES
    ]
    for process in running:
        process.wait()


def _is_cached(source: Path) -> bool:
    """Return True if a file has no kernels, or a cached kernel is younger than the file."""
    if "@njit(cache=True" not in source.read_text(encoding="utf-8"):
        return True
    caches = [*(source.parent / "__pycache__").glob(f"{source.stem}.*.nbi")]
    return bool(caches) and max(each.stat().st_mtime for each in caches) > source.stat().st_mtime
