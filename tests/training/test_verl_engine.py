"""verl's loop on our runtime: gradients of losses of whole sequences are those of transformers, on every layout."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from dilatant import UserError
from dilatant.runtime.state.full_state import full_keys
from harness.verl_interface import BASE, HFModelConfig, OptimizerConfig, batch_of, calls_that_fail, engine_module
from harness.worker_pool import Worker, WorkerPool

LENGTHS = (5, 9, 3, 7)
TEMPERATURE = 0.7
SIZE: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in transformers' files."""
    path = tmp_path_factory.mktemp("policy")
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZE, vocab_size=40)).save_pretrained(path)
    return path


def nested(parts: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


def fields() -> dict[str, Any]:
    """Of a batch as verl hands it: sequences without padding, and some that only the loss knows."""
    drawn = torch.Generator().manual_seed(0)
    sequences = [torch.randint(3, 40, (tokens,), generator=drawn) for tokens in LENGTHS]
    masks = [torch.arange(len(each)) > 1 for each in sequences]
    old = [torch.randn(len(each), generator=drawn) - 3 for each in sequences]
    return {
        "input_ids": nested(sequences),
        "loss_mask": nested(masks),
        "old_log_probs": nested(old),
        "advantages": torch.tensor([1.0, -0.5, 0.3, 2.0]),
        "temperature": TEMPERATURE,
        "calculate_entropy": True,
    }


def batch(**more: Any) -> Any:
    return batch_of({**fields(), **more})


def sequence_loss(model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
    """A ratio of whole sequences (as in GSPO), clipped, and a bonus for entropy: no sum over tokens."""
    losses, ratios = [], []
    of_tokens = (model_output["log_probs"], model_output["entropy"], data["old_log_probs"], data["loss_mask"])
    for number, (likely, entropy, old, mask) in enumerate(zip(*(each.unbind() for each in of_tokens), strict=True)):
        own = mask[1:].float()  # a token's log-probability stands at the token before it
        ratio = (((likely - old)[:-1] * own).sum() / own.sum()).exp()
        gain = data["advantages"][number] * torch.stack([ratio, ratio.clamp(0.5, 1.5)]).amin()
        losses.append(-gain - 0.01 * (entropy[:-1] * own).sum())
        ratios.append(float(ratio.detach()))
    return torch.stack(losses).sum() / data["batch_num_tokens"], {"actor/ratio": sum(ratios)}


def in_transformers(folder: Path) -> tuple[float, dict[str, Tensor], list[Tensor]]:
    """The loss, its gradients by key, and the log-probabilities of each sequence."""
    model, data = AutoModelForCausalLM.from_pretrained(folder), fields()
    likely, entropies = [], []
    for sequence in data["input_ids"].unbind():
        of_all = (model(sequence[None]).logits[0] / TEMPERATURE).log_softmax(-1)
        following = torch.cat([sequence[1:], sequence[:1]])
        likely.append(of_all.gather(-1, following[:, None])[:, 0])
        entropies.append(-(of_all.exp() * of_all).sum(-1))
    data["batch_num_tokens"] = int(data["loss_mask"].values().sum())
    loss, _ = sequence_loss({"log_probs": nested(likely), "entropy": nested(entropies)}, data)
    loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return float(loss.detach()), gradients, [each.detach()[:-1] for each in likely]


@contextmanager
def opened(
    pooled: Worker | None, meeting: Path, folder: Path, layout: dict[str, int], **settings: Any
) -> Iterator[Any]:
    """An engine as verl's worker opens it, behind torch.distributed's default group."""
    rank, size = (0, 1) if pooled is None else (pooled.rank, pooled.size)
    before = dict(os.environ)
    places = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
    }
    os.environ.update({name: str(value) for name, value in places.items()})
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    try:
        with engine_module() as module:
            how = module.DilatantEngineConfig(layout=layout, microbatches=2, **settings)
            rates = OptimizerConfig(lr=1e-2, total_training_steps=4)
            engine = module.DilatantEngine(HFModelConfig(str(folder)), how, rates, None)
            engine.initialize()
            yield engine
            engine.close()
    finally:
        dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(before)


def _step(pooled: Worker | None, meeting: Path, folder: Path, layout: dict[str, int]) -> tuple[Any, ...]:
    with opened(pooled, meeting, folder, layout) as engine:
        with engine.eval_mode():
            known = engine.forward_backward_batch(batch(), None, forward_only=True)["model_output"]
        with engine.train_mode():
            engine.optimizer_zero_grad()
            output = engine.forward_backward_batch(batch(), sequence_loss)
            held = engine.runtime.parameters
            gradients = {
                key: held[name].grad.clone() for key, name in full_keys(engine.runtime.model).items() if name in held
            }
            norm = engine.optimizer_step()
        first = engine.is_mp_src_rank_with_outputs(), engine.get_data_parallel_size(), engine.lr_scheduler_step()
        weights = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
        likely = [each[:-1].clone() for each in known["log_probs"].unbind()]
        return output["loss"], output["metrics"], gradients, norm, first, weights, likely


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (1, {}),
        (2, {"pp": 2}),
        pytest.param(2, {"tp": 2}, marks=pytest.mark.slow),
        pytest.param(2, {}, marks=pytest.mark.slow),
    ],
    ids=["one rank", "pipeline", "tensor", "replicas"],
)
def test_a_loss_of_whole_sequences_has_the_right_gradient(
    workers: WorkerPool, folder: Path, tmp_path: Path, ranks: int, layout: dict[str, int]
) -> None:
    loss, gradients, likely = in_transformers(folder)
    meeting = tmp_path / "meeting"
    results = (
        [_step(None, meeting, folder, layout)] if ranks == 1 else workers.run(_step, ranks, meeting, folder, layout)
    )
    whole = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    found: set[str] = set()
    for rank, (losses, metrics, own, norm, first, weights, own_likely) in enumerate(results):
        assert losses == pytest.approx([loss], rel=1e-5)  # fp32
        assert metrics.keys() == {"actor/ratio"}
        assert first == (rank == 0, 1, pytest.approx(1e-2))
        assert norm == pytest.approx(float(whole), rel=1e-4)  # fp32 sums in another order
        for ours, theirs in zip(own_likely, likely, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        if "tp" not in layout:
            found |= own.keys()
            for key, gradient in own.items():
                torch.testing.assert_close(gradient, gradients[key], rtol=1e-4, atol=1e-6, msg=key)  # the same
        assert weights.keys() == gradients.keys()
    assert "tp" in layout or found == gradients.keys()
    before = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(not torch.equal(results[0][5][key], before[key]) for key in gradients)


def test_a_checkpoint_goes_on_where_it_was_saved(folder: Path, tmp_path: Path) -> None:
    with opened(None, tmp_path / "meeting", folder, {}) as engine:

        def step() -> dict[str, Tensor]:
            engine.train_batch(batch(), sequence_loss)
            engine.lr_scheduler_step()
            return {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}

        step()
        for number in range(2):
            engine.save_checkpoint(str(tmp_path / f"{number}"), max_ckpt_to_keep=1)
        after = step()
        engine.initialize()
        engine.load_checkpoint(str(tmp_path / "1"))
        for key, tensor in step().items():
            assert torch.equal(tensor, after[key]), key
        with pytest.raises(UserError, match="cannot be read"):  # it was the older one
            engine.load_checkpoint(str(tmp_path / "0"))


def test_the_engine_is_verls_and_refuses_by_name(folder: Path, tmp_path: Path) -> None:
    with engine_module() as module:
        assert not calls_that_fail(module.DilatantEngine)
        assert module.EngineRegistry.get_engine_cls("language_model", "dilatant") is module.DilatantEngine
    with opened(None, tmp_path / "meeting", folder, {}) as engine:
        for name, value in {
            "multi_modal_inputs": [{}, {"pixel_values": 1}, {}, {}],
            "distillation_use_topk": True,
        }.items():
            with pytest.raises(UserError, match=f"does not have {name}"):
                engine.forward_backward_batch(batch(**{name: value}), sequence_loss)
        with pytest.raises(UserError, match="several"):
            engine.forward_backward_batch(batch(temperature=torch.arange(1.0, 5.0)), sequence_loss)
        with pytest.raises(UserError, match="not to cuda"):
            engine.to("cuda")
        engine.to("cpu")


@contextmanager
def as_on_a_gpu(engine: Any) -> Iterator[None]:
    """Let verl and the engine take the device for a GPU: the host then is another place."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{BASE}.get_device_name", lambda: "cuda")
        patch.setattr(engine, "_ranks", SimpleNamespace(worker=SimpleNamespace(device=torch.device("cuda"))))
        yield


def has_memory(tensors: Any) -> bool:
    return all(each.untyped_storage().nbytes() for each in tensors)


@pytest.mark.parametrize("rests", [False, True])
def test_weights_and_moments_move_to_the_host_and_back(rests: bool, folder: Path, tmp_path: Path) -> None:
    found = []
    for moves in (False, True):
        with opened(None, tmp_path / f"{moves}", folder, {}, param_offload=rests, optimizer_offload=rests) as engine:
            weights = engine.runtime.parameters.values()
            for weight in weights:
                weight.data = weight.data.clone()  # on a CPU it is a part of the file's memory, which cannot be freed
            engine.train_batch(batch(), sequence_loss)
            moments = [each for state in engine.optimizer.state.values() for each in state.values()]
            if moves:
                with as_on_a_gpu(engine):
                    engine.to("cpu", model=not rests, optimizer=True, grad=False)
                    assert (has_memory(weights), has_memory(moments)) == (rests, False)
                    with engine.eval_mode():  # moves the weights, if verl wants them on the host between its calls
                        assert (has_memory(weights), has_memory(moments)) == (rests, False)
                    assert not has_memory(weights)
                    with engine.train_mode():
                        assert has_memory(weights) == has_memory(moments) == rests
                    engine.to("cuda")
                assert has_memory([*weights, *moments])
            engine.train_batch(batch(), sequence_loss)
            found.append({name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]})
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())
