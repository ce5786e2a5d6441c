"""The loss is a sum over targets over a denominator, so parts of a batch add up to the whole."""

from __future__ import annotations

import pytest
import torch

from cases.tiny_models import LANGUAGE_MODELS, gradients, language_only, positions, tokens, vision_language
from dilatant.models.core.loss import shift_labels, smoothed_cross_entropy


@pytest.mark.parametrize("family", LANGUAGE_MODELS)
def test_loss_of_a_batch_is_that_of_transformers(family: str) -> None:
    mllm = language_only(family)
    ids = tokens(2, 9)
    labels = ids.clone()
    labels[:, :4] = -100
    expected = mllm.language.model(input_ids=ids, labels=labels).loss
    assert mllm(ids, labels=labels).loss.item() == pytest.approx(expected.item(), rel=1e-6)  # fp32, other sum order


@pytest.mark.parametrize("family", LANGUAGE_MODELS)
def test_leaving_out_logits_leaves_loss_and_gradients(family: str) -> None:
    mllm = language_only(family)
    ids, where = tokens(1, 14), positions(9, 5)
    labels = ids.clone()
    labels[0, [0, 3, 4, 9]] = -100
    whole = mllm(ids, position_ids=where, labels=labels)
    whole.loss.backward()
    expected = gradients(mllm)
    short = mllm(ids, position_ids=where, labels=labels, return_logits=False)
    short.loss.backward()
    assert short.logits is None
    assert whole.logits.shape == (1, 14, 64)
    assert short.loss.item() == pytest.approx(whole.loss.item(), rel=1e-6)  # fp32 sums over fewer zeros
    for name, gradient in gradients(mllm).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def test_the_head_runs_only_where_there_are_targets() -> None:
    mllm = language_only()
    seen = []
    mllm.language.model.lm_head.register_forward_hook(lambda module, args, output: seen.append(args[0].shape[1]))
    labels = torch.full((1, 12), -100)
    labels[0, [5, 6, 11]] = 3
    mllm(tokens(1, 12), labels=labels, return_logits=False)
    assert seen == [3]


def test_lengths_say_what_positions_say_of_where_samples_begin() -> None:
    labels, lengths = tokens(1, 21), (7, 3, 11)
    expected = shift_labels(labels, positions(*lengths), None)
    assert torch.equal(shift_labels(labels, positions(*lengths), None, lengths), expected)
    assert (expected == -100).nonzero()[:, 1].tolist() == [6, 9, 20]


def test_losses_of_rows_over_a_common_denominator_add_up() -> None:
    mllm = language_only()
    lengths = (7, 3, 11)
    samples = [tokens(1, length, seed=length) for length in lengths]
    denominator = sum(lengths) - len(lengths)
    together = torch.cat(samples, dim=1)
    whole = mllm(together, position_ids=positions(*lengths), labels=together, loss_denominator=denominator).loss
    parts = [mllm(sample, labels=sample, loss_denominator=denominator).loss for sample in samples]
    # fp32 sums of 18 terms of order 4
    assert whole.item() == pytest.approx(sum(part.item() for part in parts), rel=1e-6)
    assert whole.item() == pytest.approx(mllm(together, position_ids=positions(*lengths), labels=together).loss.item())


def test_no_sample_predicts_the_first_token_of_the_next() -> None:
    mllm = language_only()
    ids = tokens(1, 10)
    labels = torch.full_like(ids, -100)
    labels[0, 6] = 5  # the first token of the second sample
    assert mllm(ids, position_ids=positions(6, 4), labels=labels).loss.item() == 0.0
    assert mllm(ids, position_ids=positions(10), labels=labels).loss.item() > 0.0


def test_padding_predicts_nothing() -> None:
    mllm = language_only()
    ids = tokens(1, 8)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    labels = ids.where(mask.bool(), -100)  # the first real token has a label, and padding before it
    alone = mllm(ids[:, 3:], labels=ids[:, 3:], position_ids=positions(5)).loss
    padded = mllm(ids, labels=labels, attention_mask=mask, loss_denominator=4).loss
    assert padded.item() == pytest.approx(alone.item(), rel=1e-5)  # rotary positions are shifted by the padding


@pytest.mark.parametrize("return_logits", [True, False])
def test_a_row_without_targets_has_loss_zero(return_logits: bool) -> None:
    mllm = vision_language()
    ids = tokens(1, 5)
    loss = mllm(ids, labels=torch.full_like(ids, -100), return_logits=return_logits).loss
    loss.backward()
    assert loss.item() == 0.0


def test_loss_is_computed_in_fp32() -> None:
    mllm = language_only()
    mllm.language.model.to(torch.bfloat16)
    output = mllm(tokens(1, 8), labels=tokens(1, 8))
    assert output.logits.dtype == torch.bfloat16
    assert output.loss.dtype == torch.float32


def test_targets_of_every_row_of_a_batch_count() -> None:
    mllm = language_only()
    ids = tokens(2, 6)
    labels = torch.full_like(ids, -100)
    labels[0, 1], labels[1, 4] = ids[0, 1], ids[1, 4]
    mask = torch.ones_like(ids)
    whole = mllm(ids, labels=labels, attention_mask=mask).loss.item()
    short = mllm(ids, labels=labels, attention_mask=mask, return_logits=False).loss.item()
    assert short == pytest.approx(whole, rel=1e-6)  # fp32 sums over fewer zeros


def test_label_smoothing_shares_the_loss_among_all_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 11, generator=generator, requires_grad=True)
    targets = torch.tensor([0, 3, 10, 3, 7])
    wide = logits.detach().double()
    for position, target in enumerate(targets.tolist()):
        likely = wide[position] - wide[position].exp().sum().log()
        expected = -0.9 * likely[target] - 0.1 * likely.sum() / 11
        found = smoothed_cross_entropy(0.1, logits, targets)[position].item()
        assert found == pytest.approx(expected.item(), rel=1e-5)  # fp32 beside fp64
    half = smoothed_cross_entropy(0.1, logits.bfloat16(), targets)
    assert half.dtype == torch.float32
