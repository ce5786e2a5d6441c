"""A loop of one's own: log-probabilities and whole states are those of transformers under every kind of layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from cases.cut_wholes import opened
from cases.engine_case import CASE, TEXT, VOCABULARY, build_model
from dilatant import EncodedSample, MultimodalModel, ParallelSpec, UserError, parallelize
from dilatant.comm import launch
from dilatant.models.sources import parse_config
from dilatant.runtime.state.full_state import full_keys
from harness.worker_pool import Worker, WorkerPool

RATE = 0.5
State = dict[str, Tensor]


def config() -> Any:
    settings = {**TEXT, "model_type": "qwen3", "head_dim": 8, "num_hidden_layers": 2, "tie_word_embeddings": True}
    return parse_config(settings, "language")


def samples() -> list[EncodedSample]:
    found = []
    for number, tokens in enumerate((5, 9, 3, 7)):
        drawn = np.random.default_rng(number)
        ids = drawn.integers(3, VOCABULARY, tokens)
        labels = np.where(np.arange(tokens) < 1 + number % 2, -100, ids)
        found.append(EncodedSample(f"{number}", ids, labels, sizes={"language": tokens}))
    return found


def in_transformers(state: State) -> tuple[list[Tensor], State]:
    """The log-probabilities of the targets, sample by sample, and the state after a step of SGD."""
    model = AutoModelForCausalLM.from_config(config())
    model.load_state_dict(state)
    likely = []
    for sample in samples():
        ids, labels = torch.as_tensor(sample.input_ids), torch.as_tensor(sample.labels)[1:]
        by_token = model(ids[None]).logits[0, :-1].log_softmax(-1)
        likely.append(by_token[labels != -100, labels[labels != -100]])
    (-torch.cat(likely).mean()).backward()
    torch.optim.SGD(model.parameters(), lr=RATE).step()
    return [each.detach() for each in likely], model.state_dict()


def _loop(pooled: Worker, state: State, spec: ParallelSpec, options: dict[str, Any]) -> tuple[Any, ...]:
    worker = launch.Worker(pooled.rank, pooled.size, pooled.rank, torch.device("cpu"), pooled.store)
    model = MultimodalModel({}, config(), device="meta")
    parallel = parallelize(model, {"language": spec}, worker=worker, num_microbatches=2, **options)
    parallel.load_state_dict(state)
    before = parallel.log_probabilities(samples())
    was_training = all(module.training for module in parallel.modules.values())
    optimizer = torch.optim.SGD(parallel.owned.parameters.values(), lr=RATE)
    parallel.execute(samples())
    optimizer.step()
    parallel.owned.gather()
    found = before, parallel.state_dict(), parallel.state_dict(everywhere=True), was_training
    parallel.close()
    return found


@pytest.mark.parametrize(
    ("ranks", "spec", "options"),
    [
        pytest.param(1, ParallelSpec(), {}, marks=pytest.mark.slow),
        (2, ParallelSpec(pp=2), {}),
        pytest.param(2, ParallelSpec(tp=2), {}, marks=pytest.mark.slow),
        (2, ParallelSpec(cp=2), {}),
        pytest.param(2, ParallelSpec(replicas=2), {"zero": "all"}, marks=pytest.mark.slow),
        (2, ParallelSpec(tp=2), {"zero": "all"}),
    ],
    ids=["one rank", "pipeline", "tensor", "context", "sharded state", "tensor, sharded state"],
)
def test_a_loop_on_ranks_is_that_of_transformers(
    workers: WorkerPool, ranks: int, spec: ParallelSpec, options: dict[str, Any]
) -> None:
    torch.manual_seed(3)
    state = AutoModelForCausalLM.from_config(config()).state_dict()
    likely, after = in_transformers(state)
    results = workers.run(_loop, ranks, state, spec, options)
    for rank, (before, on_first, everywhere, was_training) in enumerate(results):
        assert was_training
        assert on_first.keys() == (after.keys() if rank == 0 else set())
        assert everywhere.keys() == after.keys()
        for ours, theirs in zip(before, likely, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)  # fp32 sums in another order
        for found in (on_first, everywhere):
            for key, tensor in found.items():
                torch.testing.assert_close(tensor, after[key], rtol=1e-5, atol=1e-6, msg=key)  # the same


def _two_steps(pooled: Worker, options: dict[str, Any], rests: bool) -> tuple[dict[str, Tensor], State, bool]:
    """Two steps of AdamW with gradients that add up. rests: before the second one everything goes to the host."""
    worker = launch.Worker(pooled.rank, pooled.size, pooled.rank, torch.device("cpu"), pooled.store)
    model = MultimodalModel({}, config(), device="meta")
    spec = ParallelSpec(replicas=pooled.size)
    parallel = parallelize(model, {"language": spec}, worker=worker, num_microbatches=2, **options)
    owned = parallel.owned.parameters
    optimizer = torch.optim.AdamW(owned.values(), lr=0.01)
    parallel.execute(samples())
    optimizer.step()
    parallel.owned.gather()
    is_free = True
    if rests:
        moments = parallel.offload(optimizer, weights=False)
        moved = [each for state in optimizer.state.values() for each in state.values()]
        is_free = not any(each.untyped_storage().nbytes() for each in moved) and parallel.grad_norm() > 0
        held = [
            *parallel.tensors().values(),
            *owned.values(),
            *(each.grad for each in owned.values() if each.grad is not None),
        ]
        rest = parallel.offload()
        is_free = is_free and not any(each.untyped_storage().nbytes() for each in held)
        for use in (parallel.state_dict, lambda: parallel.load_state_dict({}), parallel.offload):
            with pytest.raises(RuntimeError, match="are on the host"):
                use()
        moments.restore()
        rest.restore()
    parallel.execute(samples())
    optimizer.step()
    parallel.owned.gather()
    found = {key: each.detach().clone() for key, each in owned.items()}, parallel.state_dict(True), is_free
    if rests:
        parallel.offload()
        with pytest.raises(RuntimeError, match="are on the host"):
            parallel.execute(samples())
    parallel.close()
    return found


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(1, {}), pytest.param(2, {"zero": "all", "precision": "bf16"}, marks=pytest.mark.slow)],
    ids=["one rank", "sharded state in bf16"],
)
def test_what_rested_on_the_host_goes_on_unchanged(workers: WorkerPool, ranks: int, options: dict[str, Any]) -> None:
    undisturbed, rested = (workers.run(_two_steps, ranks, options, rests) for rests in (False, True))
    for (owned, state, _), (own_owned, own_state, is_free) in zip(undisturbed, rested, strict=True):
        assert is_free
        assert owned.keys() == own_owned.keys()
        for wanted, found in ((owned, own_owned), (state, own_state)):
            for key, tensor in wanted.items():
                assert torch.equal(tensor, found[key]), key


def test_a_state_that_does_not_fit_is_listed_and_not_loaded() -> None:
    parallel = parallelize(MultimodalModel({}, config(), device="meta"), {"language": ParallelSpec()})
    state = parallel.state_dict()
    before = {name: tensor.clone() for name, tensor in parallel.tensors().items()}
    norm, proj = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"
    wrong = {key: tensor + 1 for key, tensor in state.items() if key != norm} | {"odd": torch.ones(1)}
    wrong[proj] = torch.ones(2, 2)
    with pytest.raises(UserError) as error:
        parallel.load_state_dict(wrong)
    for part in ("has no 'odd'", f"lacks '{norm}'", "language.layers.0.mlp.up_proj.weight is [2, 2] there"):
        assert part in str(error.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in parallel.tensors().items())
    del state["lm_head.weight"]  # the tied embedding has it
    parallel.load_state_dict(state)
    parallel.close()


def test_keys_of_parts_begin_with_the_unit_and_those_of_wholes_are_its_own() -> None:
    keys = set(full_keys(build_model(CASE, "meta")))
    assert {key.partition(".")[0] for key in keys} == {"vision", "language"}
    assert "language.model.embed_tokens.weight" in keys
    assert any(key.startswith("vision.projector.") for key in keys)
    model = opened("llava")
    assert model.whole is not None
    assert set(full_keys(model)) <= set(model.whole.composite().state_dict())
