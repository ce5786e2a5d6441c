"""Launching workers: results in order, the first error first, outer launchers understood."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from dilatant.comm import launch
from dilatant.comm.comm import Comm
from dilatant.comm.errors import WorkerFailed
from dilatant.comm.launch import Worker, launch_local
from dilatant.config.environment import LaunchPlace, first_host, place_from
from dilatant.config.errors import UserError
from harness.patience import HANG_SECONDS


def _sum_of_ranks(worker: Worker, offset: int) -> int:
    import torch

    comm = Comm(worker.store, worker.rank, worker.size)
    total = torch.tensor([worker.rank + offset])
    comm.world.sum_(total).wait()
    comm.close()
    return int(total)


def test_every_rank_runs_the_function_and_results_come_by_rank() -> None:
    assert launch_local(_sum_of_ranks, 3, 10) == [33, 33, 33]
    assert launch_local(_sum_of_ranks, 1, 10) == [10]


def _one_ends_while_others_wait(worker: Worker, how: str) -> None:
    comm = Comm(worker.store, worker.rank, worker.size, timeout_seconds=1e5)
    comm.world.barrier()
    if worker.rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(3)
        if how == "user":
            raise UserError("sample 'cat.png' cannot be read")
        raise ValueError("stage 2, F of microbatch 4: out of paper")
    comm.world.barrier()


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("raise", WorkerFailed, "^rank 1: stage 2, F of microbatch 4: out of paper$"),
        ("killed", WorkerFailed, "^rank 1 was killed by SIGKILL"),
        ("exit", WorkerFailed, "^rank 1 ended with exit code 3$"),
        ("user", UserError, "^sample 'cat.png' cannot be read$"),
    ],
)
def test_the_first_error_ends_the_run_and_is_the_one_reported(how, error, message) -> None:
    with pytest.raises(error, match=message):
        launch_local(_one_ends_while_others_wait, 3, how)


def _one_dies_before_the_others_begin(worker: Worker) -> None:
    if worker.rank == 1:
        os._exit(3)
    time.sleep(1000)


def test_nobody_is_waited_for_who_has_nothing_to_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GRACE_SECONDS", 1000.0)
    with pytest.raises(WorkerFailed, match=r"^rank 1 ended with exit code 3$"):
        launch_local(_one_dies_before_the_others_begin, 3)


def _tell_and_sleep(worker: Worker, told: str) -> None:
    Path(told, str(os.getpid())).touch()
    time.sleep(1000)


def _launch_and_tell(told: str) -> None:
    launch_local(_tell_and_sleep, 2, told)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks for processes in /proc")
@pytest.mark.slow
def test_workers_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    launcher = multiprocessing.get_context("forkserver").Process(target=_launch_and_tell, args=(str(tmp_path),))
    launcher.start()
    deadline = time.monotonic() + HANG_SECONDS
    while len(workers := [*tmp_path.iterdir()]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    launcher.kill()
    launcher.join()
    while left := [worker.name for worker in workers if Path("/proc", worker.name).exists()]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("local_rank", "visible", "started_here", "index"),
    [(0, 1, True, 0), (3, 4, True, 3), (3, 4, False, 3), (3, 1, False, 0)],
)
def test_a_rank_takes_its_own_gpu_or_the_only_one_it_is_shown(
    local_rank: int, visible: int, started_here: bool, index: int
) -> None:
    assert launch._gpu_index(local_rank, visible, started_here) == index


@pytest.mark.parametrize(("visible", "started_here"), [(1, True), (2, True), (2, False)])
def test_two_ranks_do_not_share_a_gpu(visible: int, started_here: bool) -> None:
    with pytest.raises(UserError, match="needs a GPU of its own"):
        launch._gpu_index(3, visible, started_here)


def test_functions_workers_cannot_import_are_user_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="at the top level of a module"):
        launch_local(lambda worker: None, 2)
    with pytest.raises(UserError, match="its arguments such that pickle takes them"):
        launch_local(_sum_of_ranks, 2, threading.Lock())
    monkeypatch.setattr(_sum_of_ranks, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "<stdin>", raising=False)
    with pytest.raises(UserError, match="a notebook, at a prompt or on standard input"):
        launch_local(_sum_of_ranks, 2, 1)


TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "1234",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_ID": "0",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "12345",
}


def test_the_variables_of_outer_launchers_are_understood() -> None:
    assert place_from(TORCHRUN) == LaunchPlace("torchrun", 5, 8, 1, 4, "node0", 1234, False, "2")
    assert place_from(SLURM) == LaunchPlace("Slurm", 3, 4, 1, 2, "gpu07", 32345, True, "0")
    kubernetes = {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-0.train"}
    assert place_from(kubernetes) == LaunchPlace("Kubernetes", 1, 2, 0, 1, "job-0.train", 29500, True, "0")
    assert place_from({}) is None
    assert place_from({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}) is None
    # A batch script on its first node, before srun, is no worker.
    assert place_from({k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"}) is None


def test_incomplete_variables_say_what_is_missing() -> None:
    with pytest.raises(UserError, match="started by Kubernetes, but WORLD_SIZE and MASTER_ADDR is not set"):
        place_from({"JOB_COMPLETION_INDEX": "1"})


OMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "1234",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_PORT": "a:1"}


def test_the_variables_of_mpirun_are_understood_or_refused() -> None:
    assert place_from(OMPI) == LaunchPlace("mpirun", 3, 4, 1, 2, "node0", 1234, True)
    assert place_from({**SLURM, **OMPI, "SLURM_NTASKS": "2"}) == place_from(OMPI)  # of the helper that srun started
    with pytest.raises(UserError, match="started by mpirun, but MASTER_ADDR is not set"):
        place_from({key: value for key, value in OMPI.items() if key != "MASTER_ADDR"})
    mvapich = {key.replace("OMPI", "MV2"): value for key, value in OMPI.items()}
    assert place_from(mvapich) == place_from(OMPI)
    one, other = (place_from({**HYDRA, "PMI_PORT": port}) for port in ("a:1", "a:2"))
    assert one is not None
    assert other is not None
    assert (one.host, one.one_machine, one.rank) == ("127.0.0.1", True, 1)
    assert one.port != other.port  # two runs of one machine
    assert place_from({**HYDRA, "PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0"}) is None
    for alone in ({"PMIX_RANK": "0"}, {"PMI_RANK": "1", "PMI_SIZE": "2"}):
        with pytest.raises(UserError, match="set RANK, WORLD_SIZE"):
            place_from(alone)
    assert place_from({**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "PMIX_RANK": "0"}) is None


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"RANK": "8"}, "rank 8 of 8"),
        ({"RANK": "-1"}, "rank -1 of 8"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "rank 0 of 0"),
        ({"LOCAL_RANK": "4"}, "local rank 4 of 4"),
        ({"RANK": "two"}, "not numbers"),
        ({"MASTER_PORT": "99999"}, "no port"),
    ],
)
def test_a_rank_that_there_is_not_is_refused_at_once(variables: dict[str, str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        place_from({**TORCHRUN, **variables})


@pytest.mark.parametrize(
    ("counts", "node", "tasks"),
    [("3,2", "0", 3), ("3,2", "1", 2), ("2(x3),1", "2", 2), ("2(x3),1", "3", 1), ("4(x2)", "1", 4), ("4", "", 4)],
)
def test_tasks_of_a_node_are_read_as_slurm_writes_them(counts: str, node: str, tasks: int) -> None:
    place = place_from({**SLURM, "SLURM_STEP_TASKS_PER_NODE": counts, "SLURM_NODEID": node, "SLURM_LOCALID": "0"})
    assert place is not None
    assert place.local_size == tasks


def test_a_slurm_step_with_only_a_step_task_count_is_placed() -> None:
    variables = {key: value for key, value in SLURM.items() if key != "SLURM_NTASKS"}
    assert place_from({**variables, "SLURM_STEP_NUM_TASKS": "4"}) == place_from(SLURM)


def test_a_shell_of_salloc_is_a_step_of_one_task() -> None:
    assert place_from({**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}) is None


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu[03-05,9],cpu1", "gpu03"),
        ("a1,b2", "a1"),
        ("solo", "solo"),
        ("", None),
        ("foo-[10-20]-[01-02],bar", "foo-10-01"),
        ("rack[1,3-4]node[1-4]", "rack1node1"),
        ("gpu[001-002]-ib", "gpu001-ib"),
        ("n[1-2].cluster.local", "n1.cluster.local"),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, host: str | None) -> None:
    assert first_host(nodes) == host
