"""Run the steps of a case on ranks and compare them with those of one process, within stated tolerances."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase

from cases.attention.stand_in_kernels import stand_ins
from cases.engine_case import Case, build_model, build_samples
from dilatant.comm.comm import Comm
from dilatant.config.memory_modes import Shard
from dilatant.cost.memory import Zero
from dilatant.data.sample import EncodedSample
from dilatant.models.core.unit import Unit
from dilatant.runtime.runtime import Execution, Runtime
from dilatant.runtime.state.shared_weights import StateLayout
from dilatant.training.feeding.inputs import DecodeRequirements
from dilatant.training.optimizers.master_weights import make_masters
from harness.staged_comm import StagedComm
from harness.worker_pool import Worker, WorkerPool
from oracles.engine_step import STEPS, build_optimizer, expected

RELATIVE = 1e-5
"""The rule's own bound for fp32."""
ABSOLUTE = 1e-7
"""Of the largest gradient: what cancels exactly (a key's bias under softmax) leaves rounding noise of that size."""
STEP_SIZE = 0.1
"""lr / eps of the drawn steps' AdamW: how much a gradient's error moves a weight at most."""
BF16 = 2**-9
"""Rounding to bf16 is off by this share at most."""
COMMON: dict[str, Any] = {
    "deadline": None,
    # Not shrunk: that takes minutes, and a case is readable as it is.
    "phases": (Phase.explicit, Phase.reuse, Phase.generate),
    "print_blob": True,
    "suppress_health_check": list(HealthCheck),
}
"""Settings of hypothesis for tests of whole steps."""


@dataclass(frozen=True)
class Allowed:
    """Tolerances. relative: share of a gradient's norm. absolute: share of the largest gradient, for each number. loss:
    share of the language model's loss. drawn: share of a generator's loss."""

    relative: float
    absolute: float
    loss: float
    drawn: float

    @classmethod
    def of_case(cls, case: Case) -> Allowed:
        """Return the tolerances of a case."""
        blocks = case.language_layers + max((layers for _, _, layers, _, _ in case.encoders), default=0)
        if any(connector == "transformer" for _, _, connector, _ in case.generators):
            blocks += 2  # `Generator.connector_layers`
        return cls.in_fp8(blocks) if case.fp8 else cls.of_blocks(blocks, case.dtype)

    @classmethod
    def in_fp8(cls, blocks: int) -> Allowed:
        """Return the tolerances of a path through so many blocks that multiply in FP8, with activations in fp32.

        The two runs' numbers differ by about 2**-22 of their size. That moves one of them across a border of E4M3,
        whose steps are up to 2**-3, with the probability of the difference over the step, and then by a step. Hardly
        any number of a case is moved; one that is, in a row of 16, moves the row by 2**-5 of its norm, and a gradient
        that a single row makes as much. The loss is a mean over many rows: in the mean square, differences times steps
        add up over seven products of two factors in a block; four times the root is hardly ever reached."""
        loss = 4 * (14 * blocks * 2**-22 * 2**-3) ** 0.5
        return cls(2**-5, ABSOLUTE, loss, loss)

    @classmethod
    def of_blocks(cls, blocks: int, dtype: torch.dtype) -> Allowed:
        """Return the tolerances of a path through so many blocks.

        In bf16 both runs round the result of every operation, in different shapes and so at different places. A
        gradient passes about 15 roundings per block forward and as many backward, and as many before and after the
        blocks. Independent errors, uniform up to BF16, add to sqrt(roundings / 3) * BF16, for two runs sqrt(2) times
        that, and twice that is hardly ever reached. Terms that cancel leave a bf16 rounding of numbers as large as the
        largest gradient. A generator's loss is a square, with twice the relative error of its root; the language
        model's is a mean over targets of fp32 numbers, from rounded logits."""
        if dtype == torch.float32:
            return cls(RELATIVE, ABSOLUTE, RELATIVE, RELATIVE)
        roundings = 30 * (blocks + 2)
        relative = 2 * (2 * roundings / 3) ** 0.5 * BF16
        return cls(relative, BF16, BF16, 2 * relative)

    def of(self, expected: torch.Tensor, largest: float) -> float:
        return self.relative * expected.norm().item() + self.absolute * largest * expected.numel() ** 0.5


def _only(sample: EncodedSample, parts: frozenset[str]) -> EncodedSample:
    """Return a sample as a rank loads it: the parts that its stages use, and only the sizes of others."""
    nothing = np.zeros(0, np.int64)
    return replace(
        sample,
        input_ids=sample.input_ids if "tokens" in parts else nothing,
        labels=sample.labels if "tokens" in parts else nothing,
        media={unit: inputs for unit, inputs in sample.media.items() if unit in parts},
        targets=sample.target_tokens,
        content=sample.content_digest,
    )


def _strict_steps(
    worker: Worker, case: Case, zero: Zero, nodes: int, shard: Mapping[str, Shard], shares: str
) -> dict[str, Any]:
    with compiling_all():
        return _steps(worker, case, zero, nodes, shard, shares)


@contextmanager
def compiling_all() -> Iterator[None]:
    """Context in which a block that is to be compiled and cannot be, for no reason known before, is an error."""
    known = "tensor-parallel|the numbers of its experts|four-bit|recomputation keeps|modules within"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=f"train.compile: .* run eager: (?!{known})")
        yield


def _steps(
    worker: Worker, case: Case, zero: Zero, nodes: int, shard: Mapping[str, Shard], shares: str
) -> dict[str, Any]:
    device = torch.device(shares or "cpu")
    comm = (StagedComm if shares else Comm)(worker.store, worker.rank, worker.size, device=device)
    runtime = Runtime(
        build_model(case, "meta"),
        case.plan,
        comm,
        seed=case.seed,
        layout=StateLayout(
            zero, [rank % nodes for rank in range(comm.size)], bucket_bytes=case.bucket_bytes, shard=shard
        ),
        execution=Execution(
            case.dtype,
            look_ahead=case.look_ahead,
            check_transport=case.check,
            compile="blocks" if case.compiler else "none",
            compiler=case.compiler,
            kernels=stand_ins() if case.fuses else "none",
        ),
    )
    for stage in runtime.modules.values():
        if stage.shards is not None:
            stage.shards.rows_of_piece = case.rows_of_piece
    whole = build_samples(case)
    step = runtime.prepare(whole, case.assignment, case.schedule)
    needed = DecodeRequirements(runtime.model, case.plan, comm.rank).of(step)
    samples = [_only(sample, needed.get(number, frozenset())) for number, sample in enumerate(whole)]
    owned = runtime.owned
    masters = make_masters(owned.parameters)
    optimizer = build_optimizer(masters)
    losses, gradients = [], {}
    for number in range(STEPS):
        if number:
            step = runtime.prepare(samples, case.assignment, case.schedule)
        result = runtime.execute(samples, step)
        losses.append((result.loss, dict(result.losses)))
        if number == 0:
            norm = runtime.grad_norm()
            gradients = {key: _host(p.grad) for key, p in owned.parameters.items() if p.grad is not None}
        for key, parameter in owned.parameters.items():
            masters[key].grad = parameter.grad
        optimizer.step()
        for key, parameter in owned.parameters.items():
            parameter.grad = masters[key].grad = None
            parameter.data.copy_(masters[key])
        owned.gather()
    owners = {key: box.name for key, box in owned.boxes.items()}
    empty = [name for name, p in runtime.parameters.items() if not p.untyped_storage().nbytes() and p.numel()]
    with runtime.whole_weights():
        held = {runtime.boxes[name].key: _host(p) for name, p in runtime.parameters.items()}
    updated = {key: _host(master) for key, master in masters.items()}
    shared = {  # a generator is whole on each of them
        p.unit for p in case.plan.stages() if p.stage.tp > 1 and comm.rank in p.stage.ranks and p.unit not in case.nets
    }
    foreign = [
        name
        for unit in runtime.model.units.values()
        for name, p in unit.named_logical_parameters()
        if not p.is_meta and (name not in runtime.parameters or (unit.unit in shared and name in _of_model(unit)))
    ]
    runtime.close()
    comm.close()
    found = {"losses": losses, "gradients": gradients, "norm": norm, "parameters": held, "foreign": foreign}
    return found | {"owns": owners, "masters": updated, "empty": empty}


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _of_model(unit: Unit) -> set[str]:
    """Return the weights of which each tensor- or expert-parallel rank has a separate copy or part."""
    return {w.canonical for w in unit.weights if w.part == "model" and unit.structure is not None}


def check_case(
    workers: WorkerPool,
    case: Case,
    zero: Zero,
    nodes: int,
    above: int = 0,
    shard: Mapping[str, Shard] = MappingProxyType({}),
    shares: str = "",
) -> None:
    """Compare the case with one process. above: ranks without a stage above the plan's highest. shard: see
    `StateLayout`. shares: the device that all ranks share, whose rows travel through host memory; empty for CPU ranks
    as they are."""
    losses, gradients, parameters = expected(case)
    allowed = Allowed.of_case(case)
    if shares.startswith("cuda"):  # kernels of a CPU and a GPU add hundreds of numbers in other orders
        allowed = Allowed(*(10 * each for each in astuple(allowed)))
    # After updates, two runs with different roundings differ as much as the oracle's bf16 and fp32 runs do.
    exact = losses
    if case.dtype == torch.bfloat16:
        exact = [losses[0], *expected(replace(case, dtype=torch.float32))[0][1:]]
    in_fp64 = cache(lambda: expected(replace(case, dtype=torch.float64))[1])
    ranks = case.plan.ranks[-1] + 1 + above
    results = workers.run(_strict_steps, ranks, case, zero, nodes, dict(shard), shares)
    largest = max((g.abs().max().item() for g in gradients.values()), default=0.0)
    norm = sum(g.double().square().sum().item() for g in gradients.values()) ** 0.5
    seen: set[str] = set()
    for result in results:
        before, moved = losses[0], Counter[str]()
        for (loss, parts), (expected_loss, expected_parts), (_, exact_parts) in zip(
            result["losses"], losses, exact, strict=True
        ):
            # The change of a loss by updates has the relative error of the gradients. Twice: the moments that scale the
            # updates differ, too.
            moved.update({name: 2 * abs(value - before[1][name]) for name, value in expected_parts.items()})
            drawn = {name for name, *_ in case.generators}
            rounded = {name: 2 * abs(value - exact_parts[name]) for name, value in expected_parts.items()}
            limits = {
                name: (allowed.drawn if name in drawn else allowed.relative) * (value + moved[name]) + rounded[name]
                for name, value in expected_parts.items()
            }
            before = expected_loss, expected_parts
            assert {*parts} == {*expected_parts}
            for name, limit in limits.items():
                assert parts[name] == pytest.approx(expected_parts[name], abs=limit), name
            weights = dict.fromkeys(parts, 1.0) | {name: weight for name, *_, weight in case.generators}
            limit = sum(weights[name] * limit for name, limit in limits.items())
            assert loss == pytest.approx(expected_loss, abs=limit)
            limit = allowed.loss * expected_parts["language"] + rounded["language"]
            assert parts["language"] == pytest.approx(expected_parts["language"], abs=limit)
        assert result["norm"] == pytest.approx(norm, rel=allowed.relative)
        assert {name.partition(".")[0] for name in result["empty"]} <= {
            unit for unit, how in shard.items() if how.startswith("weights")
        }
        assert not result["foreign"], "a rank gave memory to a layer that it does not hold"
        assert set(result["gradients"]) == {key for key, name in result["owns"].items() if name in gradients}
        for key, gradient in result["gradients"].items():
            expected_gradient = part_of(gradients, key)
            limit = allowed.of(expected_gradient, largest)
            if case.dtype == torch.float32 and (gradient - expected_gradient).norm().item() > limit:
                # Deep nets lose digits, for example where a norm removes what a bias adds: the other run may be as far
                # from the exact gradient as the oracle, on the other side.
                limit += 2 * (expected_gradient.double() - part_of(in_fp64(), key)).norm().item()
            assert_close(gradient, expected_gradient, limit, f"gradient of {key}")
        seen |= result["parameters"].keys()
        # bf16 weights are rounded from masters; fp32 weights are what all holders have of them.
        compared = result["masters" if case.dtype == torch.bfloat16 else "parameters"]
        for key, parameter in compared.items():
            wanted = part_of(parameters, key)
            limit = allowed.of(wanted, 1.0)
            if case.dtype == torch.bfloat16:  # masters begin alike, and differ by what gradients do
                name = key.partition("@")[0]
                moved = part_of(gradients, key) if name in gradients else torch.zeros_like(parameter)
                limit = 2 * STEPS * STEP_SIZE * allowed.of(moved, largest)
            assert_close(parameter, wanted, limit, f"{key} after {STEPS} steps")
    assert {key.partition("@")[0] for key in seen} == set(parameters)
    released = {name.partition(".")[0] for result in results for name in result["empty"]}
    assert released == {unit for unit, how in shard.items() if how.startswith("weights")}


def part_of(whole: dict[str, torch.Tensor], key: str) -> torch.Tensor:
    """Return the weight named by `key`, or the part of it that a suffix `@first:end,...` selects."""
    name, _, spans = key.partition("@")
    for dim, of_dim in enumerate(spans.split(",") if spans else ()):
        pieces = [slice(*map(int, span.split(":"))) for span in of_dim.split("+")]
        whole = {name: torch.cat([whole[name].narrow(dim, p.start, p.stop - p.start) for p in pieces], dim)}
    return whole[name]


def assert_close(mine: torch.Tensor, theirs: torch.Tensor, allowed: float, what: str) -> None:
    error = (mine - theirs).norm().item()
    assert error <= allowed, f"{what}: {error} off {theirs.norm().item()}, {allowed} allowed"
