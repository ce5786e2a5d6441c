"""Ranks that an outer launcher started find one store, and only those that hold the token."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dilatant.comm.comm import Comm
from dilatant.comm.launch import Worker, launch
from harness.listening import listening
from harness.patience import HANG_SECONDS

SECRET = "a secret of sixteen characters or more"


def _sum(worker: Worker) -> float:
    comm = Comm(worker.store, worker.rank, worker.size)
    total = torch.tensor([worker.rank + 1.0])
    comm.world.sum_(total).wait()
    comm.close()
    return total.item()


def _addresses(worker: Worker) -> list[str]:
    comm = Comm(worker.store, worker.rank, worker.size)
    found = sorted(listening(os.getpid()).values())
    comm.world.barrier()
    comm.close()
    return found


def _fail(worker: Worker) -> float:
    comm = Comm(worker.store, worker.rank, worker.size)
    comm.world.barrier()
    if worker.rank == 1:
        raise ValueError("out of paper")
    comm.world.barrier()
    return 0.0


def _rank(function: Any, variables: Mapping[str, str], answer: Connection) -> None:
    os.environ.update(variables)
    try:
        answer.send(launch(function, 1))
    except Exception as error:
        answer.send(f"{type(error).__name__}: {error}")


def _start(function: Any, variables: Mapping[str, str]) -> tuple[Any, Connection]:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_rank, args=(function, variables, theirs))
    process.start()
    theirs.close()
    return process, ours


def _answer(started: tuple[Any, Connection]) -> Any:
    process, connection = started
    answer = connection.recv() if connection.poll(60) else "no answer"
    process.join(HANG_SECONDS)
    process.kill()
    return answer


def _run(function: Any, of_ranks: list[dict[str, str]]) -> list[Any]:
    started = [_start(function, variables) for variables in of_ranks]
    return [_answer(each) for each in started]


def _free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


def _torchrun(size: int, home: Path, machines: int) -> list[dict[str, str]]:
    port = _free_port()
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank % (size // machines)),
            "LOCAL_WORLD_SIZE": str(size // machines),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "XDG_CONFIG_HOME": str(home / str(rank * machines // size)),
        }
        for rank in range(size)
    ]


def test_ranks_of_one_machine_need_no_token(tmp_path: Path) -> None:
    assert _run(_sum, _torchrun(3, tmp_path, machines=1)) == [[6.0]] * 3


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="sockets are listed in /proc")
def test_ranks_of_one_machine_listen_on_loopback_only(tmp_path: Path) -> None:
    for (addresses,) in _run(_addresses, _torchrun(2, tmp_path, machines=1)):
        assert addresses
        assert set(addresses) == {"127.0.0.1"}


def test_machines_that_share_a_token_communicate(tmp_path: Path) -> None:
    of_ranks = _torchrun(2, tmp_path, machines=2)
    assert _run(_sum, [{**variables, "DILATANT_TOKEN": SECRET} for variables in of_ranks]) == [[3.0]] * 2


def test_the_store_of_torchruns_agent_carries_an_address_only(tmp_path: Path) -> None:
    of_ranks = _torchrun(2, tmp_path, machines=2)
    agent = dist.TCPStore("127.0.0.1", int(of_ranks[0]["MASTER_PORT"]), is_master=True, wait_for_workers=False)
    variables = {"DILATANT_TOKEN": SECRET, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert _run(_sum, [{**each, **variables} for each in of_ranks]) == [[3.0]] * 2
    assert agent.check(["dilatant/0"])
    keys_of_torch = 1  # TCPStore's own
    assert agent.num_keys() <= 1 + keys_of_torch


def test_a_rank_without_the_token_is_refused_and_others_go_on(tmp_path: Path) -> None:
    of_ranks = [{**each, "DILATANT_TOKEN": SECRET} for each in _torchrun(2, tmp_path, machines=2)]
    intruder = {**of_ranks[1], "DILATANT_TOKEN": "another secret of some length"}
    tokenless = {key: value for key, value in of_ranks[1].items() if key != "DILATANT_TOKEN"}
    holds_the_store = _start(_sum, of_ranks[0])
    for variables in (intruder, tokenless):
        answer = _answer(_start(_sum, variables))
        assert answer.startswith("UserError: the store of the run at 127.0.0.1:"), answer
        assert "set DILATANT_TOKEN to one secret on all machines" in answer
    assert _answer(_start(_sum, of_ranks[1])) == [3.0]
    assert _answer(holds_the_store) == [3.0]


def test_a_failure_reaches_all_ranks_through_the_store(tmp_path: Path) -> None:
    first, second = _run(_fail, _torchrun(2, tmp_path, machines=1))
    assert second == "WorkerFailed: rank 1: out of paper"
    assert first == "WorkerFailed: rank 1: out of paper"


def test_a_taken_port_is_one_clear_error(tmp_path: Path) -> None:
    (variables, _) = _torchrun(2, tmp_path, machines=1)
    with socket.create_server(("127.0.0.1", int(variables["MASTER_PORT"]))):
        (answer,) = _run(_sum, [variables])
    assert answer.startswith("UserError: rank 0 cannot listen on port")


def test_a_token_that_is_too_short_stops_a_rank_at_once(tmp_path: Path) -> None:
    (variables, _) = _torchrun(2, tmp_path, machines=2)
    (answer,) = _run(_sum, [{**variables, "DILATANT_TOKEN": "short"}])
    assert answer.startswith("UserError: the token in DILATANT_TOKEN has fewer than 16 characters")
