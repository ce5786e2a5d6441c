"""What transformers' own model is given of our media makes it compute what our units compute."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cases.cut_wholes import losses_of, opened
from cases.tiny_wholes import IMAGE, SOUND, WHOLES, reference, whole_config
from cases.whole_samples import samples_of, transformers_inputs
from dilatant.data.media.pixels import as_array
from dilatant.data.sample import EncodedSample
from dilatant.models.families.pretrained import PretrainedModel
from dilatant.models.families.pretrained_answers import composite_inputs, inputs_of_sample

CHEAP = ("qwen2_5_vl",)


def test_targets_of_a_family_with_prefixes_do_not_see_later_ones() -> None:
    whole = PretrainedModel.of(whole_config("paligemma"), "model")
    sample = EncodedSample("0", np.array([5, 6, 7, 8]), np.array([-100, -100, 7, 8]), sizes={"language": 4})
    inputs = inputs_of_sample(whole, sample, torch.device("cpu"))
    assert inputs["token_type_ids"].tolist() == [[0, 0, 1, 1]]


def test_a_forward_that_knows_kinds_of_tokens_gets_them() -> None:
    config = whole_config("gemma4")
    config.text_config.use_bidirectional_attention = None  # so that its mask is causal
    inputs = composite_inputs(PretrainedModel.of(config, "model"), torch.tensor([[5, IMAGE, 6]]), {}, torch.float32)
    assert inputs["mm_token_type_ids"].tolist() == [[0, 1, 0]]


@torch.no_grad()
@pytest.mark.parametrize(
    "family", [name if name in CHEAP else pytest.param(name, marks=pytest.mark.slow) for name in WHOLES]
)
def test_mixed_media_inputs_reach_transformers_model_unchanged(family: str) -> None:
    plain = reference(family).eval()
    ours = opened(family, dict(plain.state_dict())).eval()
    assert ours.whole is not None
    for sample in samples_of(ours):
        inputs = {
            unit: {k: torch.as_tensor(as_array(v)) for k, v in media.items() if k != "of_clip"}
            for unit, media in sample.media.items()
        }
        ids = torch.from_numpy(sample.input_ids)[None]
        given = composite_inputs(ours.whole, ids, inputs, torch.float32)
        if family == "paligemma":  # prompts alone are what it is asked for
            given["token_type_ids"][0, sample.prefix_tokens :] = 1
        logits = plain(attention_mask=torch.ones_like(ids), **given).logits[0, :-1]
        targets = torch.from_numpy(sample.labels)[1:]
        expected = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100)
        torch.testing.assert_close(losses_of(ours, [sample], cut=False), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(
    "family", [name if name in CHEAP else pytest.param(name, marks=pytest.mark.slow) for name in WHOLES]
)
def test_units_of_whole_models_write_what_transformers_does(family: str) -> None:
    plain = reference(family).eval()
    ours = opened(family, dict(plain.state_dict()))
    assert ours.whole is not None
    settings = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    written = set()
    for sample in samples_of(ours):
        inputs = {
            unit: {k: torch.as_tensor(as_array(v)) for k, v in media.items() if k != "of_clip"}
            for unit, media in sample.media.items()
        }
        ids = torch.from_numpy(sample.input_ids)[None]
        given = transformers_inputs(family, sample)
        if family == "paligemma":  # all of it is a prompt
            given["token_type_ids"] = torch.zeros_like(ids)
        sounds = (ids[0] == SOUND).long()
        if family == "qwen2_audio" and sounds.any() and not (sounds[1:] & sounds[:-1]).any():
            continue  # transformers takes sounds of one token each for some that are not expanded yet
        expected = plain.generate(**given, **settings)[0, ids.shape[1] :].tolist()
        assert ours.generate(ids, encoder_inputs=inputs, **settings)[0].tolist() == expected
        written |= set(expected)
    assert len(written) > 3
    assert ours.training
