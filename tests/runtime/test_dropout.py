"""What is dropped follows from seed, draw and layer, and what cannot follow from them is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cases.engine_case import CASE, TEXT, build_model, build_samples
from dilatant import Encoder, MultimodalModel, ParallelSpec, UserError, parallelize
from dilatant.comm.comm import Comm
from dilatant.comm.launch import local_worker
from dilatant.data.sample import EncodedSample
from dilatant.models.core.random_draws import DoesNotFit, KeyedDraws, SampleLayout
from dilatant.models.dropout.keyed_dropout import KeyedDropout, StageDropout
from dilatant.models.language.embedding_noise import EmbeddingNoise
from dilatant.plan.plan import Plan, Replica, Stage, UnitPlan
from dilatant.runtime.runtime import Runtime

PHI = replace(CASE, language="phi", dropout=0.3, frozen=())


class Tower(nn.Module):
    """An encoder of one's own, with something random behind its patches."""

    def __init__(self, random: nn.Module) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 12, 4, 4)
        self.random = random

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.random(self.patches(pixel_values).flatten(2).transpose(1, 2))


class Call(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, hidden: Tensor) -> Tensor:
        return self.function(hidden)


def alone(model: MultimodalModel, **options: Any) -> Runtime:
    specs = {name: ParallelSpec() for name in model.units}
    return parallelize(model, specs, colocated={"vision": "language"}, **{"seed": CASE.seed, **options})


def with_tower(random: nn.Module, num_microbatches: int = 1, **encoder: Any) -> Runtime:
    stated = {"kind": "image", "row_shape": (3, 8, 8), "width": 12, "tokens_per_row": 4}
    text = {"model_type": "llama", **TEXT, "num_hidden_layers": 1}
    torch.manual_seed(CASE.seed)
    model = MultimodalModel({"vision": Encoder(Tower(random), **stated, **encoder)}, text, seed=CASE.seed, device="cpu")
    return alone(model, num_microbatches=num_microbatches)


def loss_of(runtime: Runtime, samples: Any = None, **options: Any) -> float:
    loss = runtime.execute(build_samples(PHI) if samples is None else samples, **options).loss
    runtime.close()
    return loss


def test_seed_step_and_draw_each_change_what_is_dropped() -> None:
    samples = build_samples(PHI)
    drawn = [replace(sample, draw=7 + place) for place, sample in enumerate(samples)]
    first = loss_of(alone(build_model(PHI)), step_number=3)
    assert loss_of(alone(build_model(PHI)), step_number=3) == first
    others = [
        loss_of(alone(build_model(PHI)), step_number=4),
        loss_of(alone(build_model(PHI), seed=CASE.seed + 1), step_number=3),
        loss_of(alone(build_model(PHI)), drawn, step_number=3),
        loss_of(alone(build_model(PHI)), [replace(s, draw=s.draw + 1) for s in drawn], step_number=3),
        loss_of(alone(build_model(replace(PHI, dropout=0.0))), step_number=3),
    ]
    assert len({first, *others}) == 6
    # With draws the step does not count: the same samples may come in another step of another batch size.
    assert loss_of(alone(build_model(PHI)), drawn, step_number=9) == others[2]


def test_no_two_of_a_step_share_their_numbers() -> None:
    draws = KeyedDraws(1, ["a", "b"], SampleLayout(packed=False, lengths=(2, 1)))
    device = torch.device("cpu")
    numbers = [draws.uniform(place, (3, 50), device)[0] for place in ("x/0", "x/1", "y/0")]
    assert len(set(map(tuple, torch.cat(numbers).tolist()))) == 9
    # 40,000 numbers: 0.1 is seven standard deviations from a share that is off by 0.01.
    many = KeyedDraws(1, [str(key) for key in range(200)], SampleLayout(True, (1,) * 200))
    row, _ = many.uniform("x/0", (1, 200, 200), device)
    assert abs((row < 0.1).float().mean().item() - 0.1) < 0.01
    assert abs(torch.corrcoef(row[0])[~torch.eye(200, dtype=torch.bool)].mean().item()) < 0.01


def test_tensors_that_are_not_made_of_samples_do_not_fit() -> None:
    row = KeyedDraws(1, ["a", "b"], SampleLayout(packed=True, lengths=(3, 4)))
    for shape in ((1, 6, 5), (2, 7, 5), (8, 5), (1, 5, 6, 7), ()):
        with pytest.raises(DoesNotFit):
            row.uniform("x/0", shape, torch.device("cpu"))


def noisy(alpha: float) -> MultimodalModel:
    model = build_model(CASE)
    model.language.extensions.insert(0, EmbeddingNoise("language", alpha))
    return model


def test_noise_on_embeddings_is_the_same_for_any_microbatches() -> None:
    samples = build_samples(CASE)
    whole = loss_of(alone(noisy(20.0)), samples, step_number=3)
    parts = loss_of(alone(noisy(20.0), num_microbatches=len(samples)), samples, step_number=3)
    assert parts == pytest.approx(whole, rel=1e-5)  # fp32 sums in another order
    others = [
        loss_of(alone(noisy(20.0)), samples, step_number=4),
        loss_of(alone(noisy(20.0), seed=CASE.seed + 1), samples, step_number=3),
        loss_of(alone(build_model(CASE)), samples, step_number=3),
    ]
    assert min(abs(other / whole - 1) for other in others) > 1e-4


def test_noise_on_embeddings_has_the_size_that_neftune_says() -> None:
    lengths, width = (3, 300), 64
    draws = KeyedDraws(1, ["a", "b"], SampleLayout(packed=True, lengths=lengths))
    row = SimpleNamespace(lengths=lengths, sample_of=torch.tensor([0] * 3 + [1] * 300), padded=lambda scale: scale)
    forward: Any = SimpleNamespace(draws=lambda: draws, packed=row)
    noise = EmbeddingNoise("language", 5.0).embed(forward, torch.zeros(1, 303, width))[0]
    for part, length in zip(noise.split(lengths), lengths):
        most = 5.0 / (length * width) ** 0.5
        assert 0.95 * most < part.abs().max() <= most
        # Numbers uniform in [-1, 1] have the variance 1/3; of 192 of them, five standard deviations are 0.11.
        assert abs(part.div(most).pow(2).mean() - 1 / 3) < 0.11
        assert abs(part.div(most).mean()) < 0.21
    forward.draws = None
    assert not EmbeddingNoise("language", 5.0).embed(forward, torch.zeros(1, 303, width)).any()


def test_closing_restores_plain_dropout() -> None:
    model = build_model(replace(PHI, recompute="block"))
    runtime = alone(model)
    runtime.execute(build_samples(PHI))
    assert any(isinstance(module, KeyedDropout) for module in model.modules())
    runtime.close()
    assert not any(
        isinstance(module, KeyedDropout) or module.__dict__.get("recompute_contexts") for module in model.modules()
    )
    assert any(type(module) is nn.Dropout for module in model.modules())


def test_what_is_not_trained_drops_nothing() -> None:
    frozen = build_model(replace(PHI, frozen=("language", "vision.encoder")))
    without = build_model(replace(PHI, dropout=0.0))
    # Only the projector trains, which has no dropout here.
    assert loss_of(alone(frozen)) == pytest.approx(loss_of(alone(without)), rel=1e-6)


def test_dropout_in_place_drops_and_scales_as_dropout_does() -> None:
    samples = build_samples(CASE)
    plain, in_place = (loss_of(with_tower(nn.Dropout(0.5, inplace)), samples) for inplace in (False, True))
    assert in_place == pytest.approx(plain, rel=1e-6)


def test_custom_module_that_draws_only_later_is_still_refused() -> None:
    calls: list[int] = []

    def late(hidden: Tensor) -> Tensor:
        calls.append(1)
        return hidden if len(calls) == 1 else hidden + torch.randn_like(hidden)

    runtime = with_tower(Call(late))
    runtime.execute(build_samples(CASE))
    with pytest.raises(UserError, match="belong to no sample"):
        runtime.execute(build_samples(CASE))
    runtime.close()


@pytest.mark.parametrize(
    "random",
    [
        Call(lambda h: h + torch.randn_like(h)),
        Call(lambda h: h * (torch.rand([]) < 0.9)),
        Call(lambda h: nn.functional.dropout(h, 0.5)),
        Call(lambda h: h * float(np.random.rand())),  # noqa: NPY002
    ],
)
def test_numbers_that_belong_to_no_sample_are_refused(random: nn.Module) -> None:
    runtime = with_tower(random)
    with pytest.raises(UserError, match=r"vision: .*belong to no sample"):
        runtime.execute(build_samples(CASE))
    runtime.close()


def test_dropout_of_tensors_that_are_not_made_of_samples_is_refused() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def forward(self, hidden: Tensor) -> Tensor:
            return hidden + self.dropout(torch.ones(5, 4, 12)).sum()

    runtime = with_tower(Table())
    with pytest.raises(UserError, match=r"vision\.encoder: dropout of a tensor of shape \[5, 4, 12\]"):
        runtime.execute(build_samples(CASE))
    runtime.close()


@pytest.mark.parametrize(
    ("random", "said"),
    [
        (nn.AlphaDropout(0.5), r"vision: p of module 'model\.random' \(AlphaDropout\) is 0\.5"),
        (
            nn.TransformerEncoderLayer(12, 2, 8, dropout=0.1, batch_first=True),
            r"dropout of module 'model\.random\.self_attn' \(MultiheadAttention\) is 0\.1",
        ),
    ],
)
def test_dropout_within_other_modules_is_refused_before_a_step(random: nn.Module, said: str) -> None:
    with pytest.raises(UserError, match=said):
        with_tower(random).execute([])


def test_frozen_modules_may_have_dropout_without_keys() -> None:
    text = {"model_type": "llama", **TEXT, "num_hidden_layers": 1}
    stated = {"kind": "image", "row_shape": (3, 8, 8), "width": 12, "tokens_per_row": 4}
    model = MultimodalModel({"vision": Encoder(Tower(nn.AlphaDropout(0.5)), **stated)}, text, seed=0, device="cpu")
    model.freeze(["vision.encoder"])
    alone(model).close()


def test_dropout_by_functions_of_transformers_is_refused_by_key() -> None:
    settings = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 30}
    opt = {"model_type": "opt", "ffn_dim": 16, "word_embed_proj_dim": 16, "dropout": 0.1, **settings}
    said = r"(?s)language: attention_dropout is 0\.2; set it to 0.*language: dropout is 0\.1; set it to 0"
    runtime = parallelize(MultimodalModel({}, {**opt, "attention_dropout": 0.2}), {"language": ParallelSpec()})
    with pytest.raises(UserError, match=said):
        runtime.execute(build_samples(CASE))
    ids = np.arange(5, 12)
    words = EncodedSample("words", ids, ids.copy(), sizes={"language": len(ids)}, draw=0)
    runtime.train(False)
    first, second = (runtime.execute([words]).loss for _ in range(2))
    assert first == second  # nothing is dropped in evaluation mode
    runtime.close()


def test_callbacks_may_draw_only_with_a_generator_of_their_own() -> None:
    runtime = with_tower(nn.Identity(), after_projector=lambda _, h: nn.functional.dropout(h, 0.5))
    with pytest.raises(UserError, match="belong to no sample"):
        runtime.execute(build_samples(CASE))
    runtime.close()
    own = torch.Generator().manual_seed(0)
    loss_of(with_tower(Call(lambda h: h + torch.randn(h.shape, generator=own))), build_samples(CASE))


def test_layers_left_out_by_chance_are_refused_before_a_step() -> None:
    model = build_model(PHI)
    model["vision"].model.config.drop_path_rate = 0.1
    model.language.model.config.layerdrop = 0.2
    with pytest.raises(UserError, match=r"(?s)vision: drop_path_rate is 0.1.*language: layerdrop is 0.2"):
        alone(model).execute([])
    model.freeze(["vision.encoder", "language"])
    alone(model).close()


def test_two_samples_of_one_draw_are_refused() -> None:
    samples = [replace(sample, draw=4) for sample in build_samples(PHI)]
    runtime = alone(build_model(PHI))
    with pytest.raises(UserError, match="the same draw, 4"):
        runtime.execute(samples)
    runtime.close()


def test_a_stage_drops_beside_a_frozen_one_on_its_rank() -> None:
    """The embedding is tied and trains; what is behind it is frozen, but for the head."""
    frozen = ("language.*norm*", "language.layers.*")
    case = replace(PHI, tied=True, encoders=(), frozen=frozen, texts=((6, ()),) * 3)

    def loss(*borders: int) -> float:
        stages = tuple(Stage(first, end, (0,)) for first, end in pairwise(borders))
        worker = local_worker()
        plan = Plan((UnitPlan("language", (Replica(stages),)),))
        return loss_of(Runtime(build_model(case), plan, Comm(worker.store, 0, 1)), build_samples(case))

    assert loss(0, 1, 4) == pytest.approx(loss(0, 4), rel=1e-6)  # roundings of fp32 sums


def test_dropout_around_an_encoder_s_blocks_is_refused_on_its_later_stages() -> None:
    model = build_model(CASE)
    unit = model["vision"]
    unit.model.drop = nn.Dropout(0.25)
    StageDropout(unit.stage(0, len(unit.layers)), unit).close()
    StageDropout(unit.stage(0, 2), unit).close()
    with pytest.raises(UserError, match=r"vision: model.drop drops 0.25 outside of the encoder's blocks"):
        StageDropout(unit.stage(2, len(unit.layers)), unit)
