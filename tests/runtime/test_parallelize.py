"""`parallelize` as a program uses it: alone, again and again, and also after an error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cases.engine_case import CASE, TEXT, VOCABULARY, build_model, build_samples
from dilatant import Auto, Encoder, MultimodalModel, ParallelSpec, UserError, parallelize
from dilatant.comm import launch
from dilatant.comm.errors import CommAborted
from dilatant.config import ClusterConfig, PlanConfig
from dilatant.cost.analytic import analytic_costs
from dilatant.cost.hardware import load_hardware
from dilatant.cost.model import save_costs
from dilatant.data.sample import EncodedSample
from dilatant.models.sources import parse_config
from dilatant.plan.plan import Plan
from dilatant.planning.measuring.layer_costs import measure_layers
from dilatant.planning.measuring.layer_shapes import layer_shapes
from dilatant.planning.problem.describe_model import describe_model
from dilatant.planning.problem.planned_hardware import plan_target
from dilatant.runtime.runtime import Runtime
from harness.worker_pool import Worker, WorkerPool
from oracles.dense_mask import Token, embedded, matrix
from oracles.one_process import losses_of_batch

APART = {"vision": ParallelSpec(), "language": ParallelSpec(pp=2)}


def alone(**options: object) -> Runtime:
    return parallelize(
        build_model(CASE, "meta"),
        {"vision": ParallelSpec(), "language": ParallelSpec()},
        colocated={"vision": "language"},
        seed=CASE.seed,
        **options,
    )


def test_one_process_trains_several_models_without_workers() -> None:
    first, second = alone(), alone(num_microbatches=3)
    samples = build_samples(CASE)
    losses = [each.execute(samples).loss for each in (first, second, first)]
    # Microbatches change the order of sums.
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    # The third step added to the gradients of the first.
    for name, gradient in ((n, p.grad) for n, p in second.parameters.items() if p.grad is not None):
        torch.testing.assert_close(first.parameters[name].grad, 2 * gradient, rtol=1e-4, atol=1e-6)
    first.close()
    second.close()


def test_too_few_workers_are_told_what_to_call() -> None:
    with pytest.raises(UserError, match=r"need 3 workers, but there is 1; .*launch\(function, 3\)"):
        parallelize(build_model(CASE, "meta"), APART)


def test_a_schedule_and_a_policy_are_chosen_by_name() -> None:
    samples = build_samples(CASE)
    runtimes = [alone(), alone(num_microbatches=3, schedule="gpipe", assignment="random")]
    losses = [runtime.execute(samples).loss for runtime in runtimes]
    # Microbatches change the order of sums.
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    for runtime in runtimes:
        runtime.close()
    for option, known in (("schedule", "1f1b"), ("assignment", "random")):
        with pytest.raises(UserError, match=rf"{option} 'best' is unknown; .*{known}"):
            alone(**{option: "best"})


def _again_and_again(pooled: Worker, times: int) -> list[float]:
    worker = launch.Worker(pooled.rank, pooled.size, pooled.rank, torch.device("cpu"), pooled.store)
    samples, losses = build_samples(CASE), []
    for attempt in range(times):
        runtime = parallelize(build_model(CASE, "meta"), APART, worker=worker, num_microbatches=2, seed=CASE.seed)
        if attempt == 1:
            with pytest.raises(CommAborted):  # noqa: PT012
                runtime.comm.world.barrier()  # all have built theirs: an abort would reach them there, too
                if worker.rank == 1:
                    runtime.comm.abort("rank 1 had enough")
                runtime.execute(samples)
        else:
            losses.append(runtime.execute(samples).loss)
        runtime.close()
    return losses


def test_parallelize_may_be_called_again_even_after_an_error(workers: WorkerPool) -> None:
    for losses in workers.run(_again_and_again, 3, 3):
        assert losses == pytest.approx([losses[0]] * 2, rel=1e-6)


def _planned(pooled: Worker, costs: Path) -> tuple[list[float], str]:
    """Two runtimes planned one after the other, by costs that only rank 0 can read."""
    worker = launch.Worker(pooled.rank, pooled.size, pooled.rank, torch.device("cpu"), pooled.store)
    samples, losses, plans = build_samples(CASE), [], []
    for _ in range(2):
        runtime = parallelize(
            build_model(CASE, "meta"),
            Auto(
                [samples] * 2,
                plan=PlanConfig(costs=None if pooled.rank else str(costs), chunks=(1,), microbatch_sizes=(2,)),
            ),
            worker=worker,
            seed=CASE.seed,
        )
        losses.append(runtime.execute(samples).loss)
        plans.append(runtime.plan.to_json())
        runtime.close()
    assert plans[0] == plans[1]
    return losses, plans[0]


def test_layout_is_planned_from_model_batches_and_workers(workers: WorkerPool, tmp_path: Path) -> None:
    here = plan_target(ClusterConfig(gpus_per_node=2)).hardware
    shapes = layer_shapes(describe_model(build_model(CASE, "meta")))
    save_costs(
        analytic_costs(shapes, here, dtype="float32"), tmp_path / "costs.yaml"
    )  # instead of measuring for seconds
    alone = parallelize(build_model(CASE, "meta"), Auto([build_samples(CASE)]), seed=CASE.seed)
    expected = alone.execute(build_samples(CASE)).loss
    alone.close()
    found = workers.run(_planned, 2, tmp_path / "costs.yaml")
    assert len({plan for _, plan in found}) == 1
    assert Plan.from_json(found[0][1]).ranks == (0, 1)
    for losses, _ in found:  # sums in another order
        assert losses == pytest.approx([expected] * 2, rel=1e-6)


def test_what_planning_lacks_is_named() -> None:
    samples = build_samples(CASE)
    bare = replace(samples[0], sizes={})
    for auto, says in (
        ("auto", r"specs is 'auto'; give .*Auto\(batches\)"),
        (Auto(), "Auto has no batches"),
        (Auto([[]]), "Auto has no batches"),
        (Auto([samples, samples[1:]]), "global batches of one size"),
        (Auto([[bare]]), rf"sample '{bare.id}' does not say its tokens: sizes\['language'\]"),
    ):
        with pytest.raises(UserError, match=says):
            parallelize(build_model(CASE, "meta"), auto)
    with pytest.raises(UserError, match="what is colocated"):
        parallelize(build_model(CASE, "meta"), Auto([samples]), colocated={"vision": "language"})


class Protein(nn.Module):
    """Reads names of residues and where they are: integers and numbers of unlike shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.names, self.places = nn.Embedding(5, 12), nn.Linear(3, 12)

    def forward(self, residues: Tensor, places: Tensor) -> Tensor:
        return torch.tanh(self.names(residues) + self.places(places.mean(2)))


class Volume(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.Conv3d(2, 10, 2, 2)

    def forward(self, points: Tensor) -> Tensor:
        return torch.tanh(self.cells(points).flatten(2).transpose(1, 2))


EXAMPLE = {"residues": torch.zeros(1, 6, dtype=torch.int64), "places": torch.zeros(1, 6, 2, 3)}


def _build_own() -> MultimodalModel:
    torch.manual_seed(0)
    encoders = {
        "protein": Encoder(Protein(), kind="protein", example=EXAMPLE, width=12, tokens_per_row=6),
        "lidar": Encoder(
            Volume(), "linear", kind="lidar", input_name="points", row_shape=(2, 4, 2, 2), width=10, tokens_per_row=2
        ),
    }  # fmt: skip
    language = parse_config({"model_type": "llama", **TEXT, "num_hidden_layers": 2}, "language")
    masks = {"protein": "embedded"}
    return MultimodalModel(encoders, language, seed=0, media_attention=masks).train()


def _own_samples(model: MultimodalModel) -> list[EncodedSample]:
    samples = []
    for number, (proteins, clouds) in enumerate([(1, 1), (2, 0), (0, 0), (1, 2)]):
        random = np.random.default_rng(number)
        ids = [3, 4, *[model.placeholder_ids["protein"]] * 6 * proteins]
        ids += [5, *[model.placeholder_ids["lidar"]] * 2 * clouds, 6, 7]
        labels = [token if place > 1 and token < VOCABULARY else -100 for place, token in enumerate(ids)]
        media: dict[str, dict[str, Any]] = {}
        if proteins:
            media["protein"] = {
                "residues": random.integers(0, 5, (proteins, 6)),
                "places": random.standard_normal((proteins, 6, 2, 3)).astype(np.float32),
            }
        if clouds:
            media["lidar"] = {"points": random.standard_normal((clouds, 2, 4, 2, 2)).astype(np.float32)}
        sizes = model.sizes_of(ids, media)
        samples.append(EncodedSample(f"{number}", np.array(ids), np.array(labels), media, sizes))
    return samples


def _one_step_of_own(pooled: Worker) -> tuple[float, dict[str, Tensor]]:
    worker = launch.Worker(pooled.rank, pooled.size, pooled.rank, torch.device("cpu"), pooled.store)
    model = _build_own()
    runtime = parallelize(
        model,
        dict.fromkeys(model.units, ParallelSpec()),
        colocated={"protein": "language"},
        worker=worker,
        num_microbatches=2,
    )
    loss = runtime.execute(_own_samples(model)).loss
    found = {name: p.grad.clone() for name, p in runtime.parameters.items() if p.grad is not None}
    runtime.close()
    return loss, found


def test_custom_encoders_train_on_two_ranks_as_in_one_process(workers: WorkerPool) -> None:
    model = _build_own()
    samples = _own_samples(model)

    def seen_in(sample: EncodedSample) -> np.ndarray:
        """Every protein sees itself alone."""
        tokens = [Token(0, "text", None, place, place) for place in range(len(sample.input_ids))]
        at = (sample.input_ids == model.placeholder_ids["protein"]).nonzero()[0].tolist()
        for count, place in enumerate(at):
            tokens[place] = Token(0, "protein", count // 6, place, place)
        return matrix(tokens, embedded(False))

    modules = {name: (model[name].model, model[name].projector, 0) for name in model.encoders}
    loss = losses_of_batch(model.language.model, modules, model.placeholder_ids, samples, seen_in)["language"]
    loss.backward()
    wanted = {
        name: p.grad
        for unit in model.units.values()
        for name, p in unit.named_logical_parameters()
        if p.grad is not None
    }
    results = workers.run(_one_step_of_own, 2)
    assert set().union(*(found for _, found in results)) == wanted.keys()
    for total, found in results:
        assert total == pytest.approx(loss.item(), rel=1e-5)  # fp32 sums in another order
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-6, msg=name)


class Words(nn.Module):
    """Items of unlike length, of which every token also hears its item's mean."""

    def __init__(self) -> None:
        super().__init__()
        self.names = nn.Embedding(7, 12)

    def forward(self, names: Tensor, lengths: Tensor) -> Tensor:
        items = self.names(names).split(lengths.tolist())
        return torch.cat([torch.tanh(item + item.mean(0)) for item in items])


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(3, 10)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(10, 10), nn.Tanh()) for _ in range(3)])
        self.last = nn.LayerNorm(10)

    def forward(self, points: Tensor) -> Tensor:
        hidden = self.widen(points)
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden)


def _build_unlike() -> MultimodalModel:
    torch.manual_seed(0)
    words = {"names": torch.zeros(3, dtype=torch.int64), "lengths": torch.tensor([3])}
    encoders = {
        "words": Encoder(
            Words(), kind="words", width=12, example=words, tokens_of=lambda inputs: int(inputs["lengths"].sum())
        ),
        "cloud": Encoder(Deep(), kind="cloud", input_name="points", row_shape=(2, 3), width=10, tokens_per_row=2),
    }
    language = parse_config({"model_type": "llama", **TEXT, "num_hidden_layers": 2}, "language")
    return MultimodalModel(encoders, language, seed=0).train()


def _unlike_samples(model: MultimodalModel) -> list[EncodedSample]:
    samples = []
    for number, (lengths, clouds) in enumerate([([2, 5], 1), ([1], 0), ([], 1), ([3], 2)]):
        random = np.random.default_rng(number)
        ids = [3, *[model.placeholder_ids["words"]] * sum(lengths), 5]
        ids += [*[model.placeholder_ids["cloud"]] * 2 * clouds, 6, 7]
        labels = [token if place > 1 and token < VOCABULARY else -100 for place, token in enumerate(ids)]
        media: dict[str, dict[str, Any]] = {}
        if lengths:
            names = random.integers(0, 7, sum(lengths))
            media["words"] = {"names": names, "lengths": np.array(lengths)}
        if clouds:
            media["cloud"] = {"points": random.standard_normal((clouds, 2, 3)).astype(np.float32)}
        sizes = model.sizes_of(ids, media)
        samples.append(EncodedSample(f"{number}", np.array(ids), np.array(labels), media, sizes))
    return samples


def _one_step_of_unlike(pooled: Worker) -> tuple[float, dict[str, Tensor]]:
    worker = launch.Worker(pooled.rank, pooled.size, pooled.rank, torch.device("cpu"), pooled.store)
    model = _build_unlike()
    runtime = parallelize(
        model,
        {"words": ParallelSpec(cp=2), "cloud": ParallelSpec(pp=2), "language": ParallelSpec(cp=2)},
        colocated={"words": "language"},
        worker=worker,
        num_microbatches=2,
    )
    loss = runtime.execute(_unlike_samples(model)).loss
    found = {name: p.grad.clone() for name, p in runtime.parameters.items() if p.grad is not None}
    runtime.close()
    return loss, found


def test_own_encoders_of_unlike_items_or_cut_in_stages_train_as_in_one_process(workers: WorkerPool) -> None:
    model = _build_unlike()

    def words(**inputs: Tensor) -> Tensor:
        return model["words"].model(**inputs)[None]

    modules: dict[str, Any] = {
        "words": (words, model["words"].projector, 0),
        "cloud": (model["cloud"].model, model["cloud"].projector, 0),
    }
    samples = _unlike_samples(model)
    loss = losses_of_batch(model.language.model, modules, model.placeholder_ids, samples)["language"]
    loss.backward()
    wanted = {
        name: p.grad
        for unit in model.units.values()
        for name, p in unit.named_logical_parameters()
        if p.grad is not None
    }
    results = workers.run(_one_step_of_unlike, 4)
    assert set().union(*(found for _, found in results)) == wanted.keys()
    for total, found in results:
        assert total == pytest.approx(loss.item(), rel=1e-5)  # fp32 sums in another order
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-6, msg=name)
    described = describe_model(_build_unlike())
    assert described.item_tokens == {"words": 3.0, "cloud": 2.0}
    measured = measure_layers(described, plan_target(ClusterConfig()), (6,), repeats=1)
    modelled = analytic_costs(layer_shapes(described), load_hardware("H100"))
    for costs in (measured, modelled):
        assert costs.layers.keys() >= {entry.kind for entry in described.types}


def test_encoders_of_any_kind_are_planned() -> None:
    described = describe_model(_build_own())
    own = [layer for unit in described.spec.units[:2] for layer in unit.layers]
    assert [(layer.name, layer.parameters) for layer in own if layer.name.endswith(".encoder")] == [
        ("protein.encoder", 5 * 12 + 3 * 12 + 12),
        ("lidar.encoder", 2 * 8 * 10 + 10),
    ]
    assert described.item_tokens == {"protein": 6.0, "lidar": 2.0}
    target = plan_target(ClusterConfig())
    measured = measure_layers(described, target, (8, 16), repeats=1)
    modelled = analytic_costs(layer_shapes(described), load_hardware("H100"))
    for costs in (measured, modelled):
        for layer in own:
            assert costs.layer(layer.kind).forward(12) > 0, layer.kind
