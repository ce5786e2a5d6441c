"""Fits, the frozen rule, memory, the cost file and the hardware file."""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilatant.config.degrees import Degrees
from dilatant.config.errors import UserError
from dilatant.cost.analytic import (
    Runner,
    analytic_cost,
    analytic_costs,
    block_shape,
    embedding_shape,
    head_shape,
    linear_shape,
)
from dilatant.cost.hardware import Hardware, Link, fit_link, load_hardware, save_hardware
from dilatant.cost.layer import ZERO, LayerCost, frozen_work, trainable_before
from dilatant.cost.memory import BF16, FP32
from dilatant.cost.model import CostModel, load_costs, save_costs, save_group_costs
from dilatant.cost.quadratic import Quadratic, fit

COUNTS = (64, 256, 1024, 4096)


@settings(max_examples=80)
@given(
    st.floats(0, 1e-8).filter(lambda v: v == 0 or v > 1e-12),
    st.floats(1e-7, 1e-4),
    st.floats(0, 1e-2).filter(lambda v: v == 0 or v > 1e-6),
)
def test_a_fit_finds_the_quadratic_that_made_the_measurements(a, b, c):
    truth = Quadratic(a, b, c)
    found, error = fit(COUNTS, [truth(x) for x in COUNTS])
    # Coefficients are kept to six digits.
    assert error < 1e-5
    assert found(2000) == pytest.approx(truth(2000), rel=1e-4)


@settings(max_examples=80)
@given(st.lists(st.floats(0.5, 2.0), min_size=4, max_size=4))
def test_a_fit_has_no_negative_coefficient_and_reports_error(noise):
    values = [(1e-6 * x + 1e-4) * factor for x, factor in zip(COUNTS, noise, strict=True)]
    found, error = fit(COUNTS, values)
    assert min(found.a, found.b, found.c) >= 0
    assert error == pytest.approx(max(abs(found(x) / v - 1) for x, v in zip(COUNTS, values, strict=True)))

    # Against every single-term fit, in the squared relative error that is minimised.
    def loss(q):
        return sum((q(x) / v - 1) ** 2 for x, v in zip(COUNTS, values, strict=True))

    for power in range(3):
        weights = [x**power / v for x, v in zip(COUNTS, values, strict=True)]
        scale = sum(weights) / sum(w * w for w in weights)
        single = Quadratic(*[scale if 2 - power == place else 0.0 for place in range(3)])
        assert loss(found) <= loss(single) * (1 + 1e-4) + 1e-9


def test_fewer_token_counts_fit_fewer_coefficients():
    assert fit([100], [2.0])[0] == Quadratic(b=0.02)
    two, _ = fit([100, 200], [2.0, 3.0])
    assert (two.a, two.b, two.c) == (0.0, pytest.approx(0.01), pytest.approx(1.0))


def test_a_row_of_several_samples_fits_their_squares():
    truth, rows = Quadratic(1e-6, 1e-4, 0.01), [(count,) for count in COUNTS] + [(500,) * 40]
    values = [sum(truth.a * one**2 + truth.b * one for one in row) + truth.c for row in rows]
    found, error = fit([(sum(row), sum(one**2 for one in row)) for row in rows], values)
    assert error < 1e-5  # coefficients are kept to six digits
    assert found(2000) == pytest.approx(truth(2000), rel=1e-4)


@pytest.mark.parametrize(("tokens", "values"), [([], []), ([0], [1.0]), ([1, 2], [1.0]), ([1, 2], [1.0, -1.0])])
def test_a_fit_of_nonsense_is_refused(tokens, values):
    with pytest.raises(ValueError, match=r"positive"):
        fit(tokens, values)


# --- The frozen rule

COST = LayerCost(
    forward=Quadratic(b=1.0),
    input_gradient=Quadratic(b=1.2),
    weight_gradient=Quadratic(b=1.1),
    first_trainable=Quadratic(b=2.0),
    recompute=Quadratic(b=1.0),
    activation_bytes=Quadratic(b=8.0),
    weight_bytes=Quadratic(b=3.0),
    checkpoint_bytes=Quadratic(b=1.0),
    attention=Quadratic(b=0.4),
    attention_bytes=Quadratic(b=0.5),
)


@given(st.lists(st.booleans(), max_size=8), st.booleans())
def test_what_lies_before_a_layer_does_not_include_it(trainable, upstream):
    expected = tuple(upstream or any(trainable[:index]) for index in range(len(trainable)))
    assert trainable_before(trainable, upstream) == expected


@pytest.mark.parametrize(
    ("trainable", "before", "recompute", "backward", "kept"),
    [
        (True, True, "none", 2.3, 8.0),
        (True, True, "block", 3.3, 1.0),
        (True, True, "block_keep_attention", 2.9, 1.5),
        (False, True, "none", 1.2, 8.0),
        (False, True, "block", 2.2, 1.0),  # a frozen language model behind a trainable projector: 1 + 1.2
        (True, False, "none", 2.0, 8.0),
        (True, False, "block", 3.0, 1.0),
        (False, False, "none", 0.0, 0.0),
        (False, False, "block", 0.0, 0.0),  # nothing to recompute without a backward
        (False, False, "block_keep_attention", 0.0, 0.0),
    ],
)
def test_backward_and_memory_follow_the_frozen_rule(trainable, before, recompute, backward, kept):
    work = frozen_work(COST, trainable, before, recompute)
    assert work.backward(1) == pytest.approx(backward)
    assert work.kept_bytes(1) == kept
    assert work.forward == COST.forward
    assert (work.weight_gradient(1) > 0) == trainable
    assert (work.forward + work.backward)(1) == pytest.approx(1.0 + backward)
    whole = frozen_work(replace(COST, splits=False), trainable, before, recompute)
    assert whole.input_gradient(1) == pytest.approx(backward)
    assert whole.weight_gradient == whole.weight_bytes == ZERO


def test_frozen_parameters_hold_their_weights_only():
    assert BF16.of(10, trainable=True) == 180
    assert BF16.of(10, trainable=False) == 20
    assert FP32.of(10, trainable=True) == 160


# --- Files


def hardware_costs() -> CostModel:
    shapes = {
        "vision block": block_shape(1024, 4096, 16, gated=False, causal=False),
        "projector": linear_shape(1024, 2048, share=0.25, count=2),
        "embedding": embedding_shape(2048, 32000),
        "block": block_shape(2048, 8192, 32, 8),
        "head": head_shape(2048, 32000),
    }
    return analytic_costs(shapes, load_hardware("A40"), [Degrees(), Degrees(2), Degrees(2, 2)])


def test_a_cost_file_reads_back_equal_and_is_readable(tmp_path):
    costs = hardware_costs()
    save_costs(costs, tmp_path / "costs.yaml")
    assert load_costs(tmp_path / "costs.yaml") == costs
    text = (tmp_path / "costs.yaml").read_text()
    assert "origin: analytic" in text
    assert "not measured" in text
    assert "tp2 cp1:" in text


def test_groups_measured_one_after_another_share_a_cost_file(tmp_path):
    fast, slow, path = hardware_costs(), replace(hardware_costs(), hardware="L4"), tmp_path / "costs.yaml"
    save_group_costs(slow, "fast", path)
    save_group_costs(slow, "slow", path)
    save_group_costs(fast, "fast", path)  # again, on the device that it should have been
    found = load_costs(path)
    assert found.groups == {"fast": fast, "slow": slow}
    with pytest.raises(UserError, match=r"holds costs in bfloat16, those of 'slow' are in float32"):
        save_group_costs(replace(slow, dtype="float32"), "slow", path)
    assert load_costs(path) == found
    save_costs(fast, path)
    with pytest.raises(UserError, match=r"holds costs of 'A40' alone; name another file"):
        save_group_costs(slow, "slow", path)


def test_a_cost_file_of_other_hardware_is_named(tmp_path):
    save_costs(hardware_costs(), tmp_path / "costs.yaml")
    with pytest.raises(UserError, match=r"costs\.yaml holds costs of A40, but this run is on H100"):
        load_costs(tmp_path / "costs.yaml", hardware="H100")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "- 1",
        "layers: 3",
        "hardware: x",
        "hardware: x\norigin: y\ndtype: z\nlayers: {block: {tp1 cp1: {seconds: 1}}}",
    ],
)
def test_a_file_that_is_no_cost_model_is_refused(tmp_path, text):
    with pytest.raises(UserError, match="is not a cost model"):
        CostModel.from_yaml(text, "costs.yaml")
    (tmp_path / "costs.yaml").write_bytes(b"\xff" + text.encode())
    with pytest.raises(UserError, match="is no text"):
        load_costs(tmp_path / "costs.yaml")


@pytest.mark.parametrize(
    ("says", "instead"),
    [
        ("forward: [1.0, 2.0, 3.0]", "forward: [.nan, 2.0, 3.0]"),
        ("forward: [1.0, 2.0, 3.0]", "forward: [1.0, -2.0, 3.0]"),
        ("forward: [1.0, 2.0, 3.0]", "forward: [1.0, .inf, 3.0]"),
        ("forward: [1.0, 2.0, 3.0]", "forward: [1" + "0" * 400 + ", 2.0]"),
        ("forward: [1.0, 2.0, 3.0]", "forward: 1.0"),
        ("forward: [1.0, 2.0, 3.0]", "forward: [true]"),
        ("parameters: 7", "parameters: -7"),
        ("parameters: 7", "parameters: x"),
        ("fit_error: null", "fit_error: -.inf"),
        ("fit_error: null", "fit_error: []"),
        ("tp1 cp1", "tp0 cp1"),
        ("hardware: A40", "hardware: [A40]"),
    ],
)
def test_amounts_that_nothing_can_take_are_no_costs(says, instead):
    numbers = [Quadratic(1.0, 2.0, 3.0)] * 4
    text = CostModel("A40", "measured", "float32", {"block": {Degrees(): LayerCost(*numbers, parameters=7)}}).to_yaml()
    assert CostModel.from_yaml(text).layer("block").parameters == 7
    assert says in text
    with pytest.raises(UserError, match="is not a cost model"):
        CostModel.from_yaml(text.replace(says, instead))


def test_missing_layers_and_degrees_are_named_with_the_remedy():
    costs = hardware_costs()
    with pytest.raises(UserError, match=r"no layer type 'decoder'.*'block'.*dilatant profile"):
        costs.layer("decoder")
    with pytest.raises(UserError, match=r"not at \(4, 1\)"):
        costs.layer("block", Degrees(4))


def test_shipped_hardware_is_complete_and_names_its_source():
    shipped = (
        "A40", "A100", "A100 40GB", "A800", "H100", "H200", "H800", "H20", "GH200", "L4", "L40S", "T4", "RTX 3090",
        "RTX 4090", "RTX 5090", "V100", "B200", "GB200", "B300", "GB300", "MI300X", "MI325X", "MI355X", "CPU",
    )  # fmt: skip
    for name in shipped:
        hardware = load_hardware(name)
        assert hardware.source
        assert hardware.memory < 2**39
        assert 1 <= hardware.ports <= 8
        # A network port of 10 to 800 Gb/s.
        assert name == "CPU" or 1.25e9 <= hardware.between.bandwidth / hardware.ports <= 100e9
        assert hardware.flops("float32") > 0
        assert hardware.inside.latency > 0
        peaks = [hardware.peak_flops[kind] for kind in ("bfloat16", "float8", "float4") if kind in hardware.peak_flops]
        assert name == "CPU" or all(more > 1.5 * less for less, more in itertools.pairwise(peaks))
    assert {name for name in shipped if "float4" in load_hardware(name).peak_flops} == {
        "B200", "GB200", "B300", "GB300", "MI355X", "RTX 5090",
    }  # fmt: skip
    assert {name for name in shipped if load_hardware(name).domain} == {"GB200", "GB300"}


def test_every_mistake_in_a_hardware_file_is_named(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("Mine: {memory: lots, bandwidth: 1e9, speed: 3, inside: 5}\n")
    with pytest.raises(UserError) as raised:
        load_hardware("Mine", path)
    for part in (
        "Mine.memory must be a number",
        "Mine.speed is unknown",
        "Mine.inside must be",
        "peak_flops is missing",
    ):
        assert part in str(raised.value)
    with pytest.raises(UserError, match=r"no hardware 'R100'.*'H100'"):
        load_hardware("R100")


# --- The analytic model


SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 24)


@settings(max_examples=50)
@given(st.floats(1e8, 1e12), st.floats(1e-6, 1e-3))
def test_a_link_is_found_from_the_seconds_of_its_messages(bandwidth, latency):
    found, error = fit_link(SIZES, [latency + size / bandwidth for size in SIZES])
    # Figures are kept to four digits.
    assert error < 1e-3
    assert found.latency + (1 << 22) / found.bandwidth == pytest.approx(latency + (1 << 22) / bandwidth, rel=2e-3)


def test_messages_that_take_equally_long_tell_no_bandwidth():
    with pytest.raises(ValueError, match="no bandwidth"):
        fit_link(SIZES, [2e-4, 1e-4, 1e-4, 1e-4, 1e-4])


def test_hardware_entries_join_one_file_and_read_back_equal(tmp_path):
    path = tmp_path / "hardware.yaml"
    for name in ("A40", "H100"):
        save_hardware(load_hardware(name), name, path)
    assert [load_hardware(name, path) for name in ("A40", "H100")] == [load_hardware("A40"), load_hardware("H100")]
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(UserError, match="is no hardware file"):
        save_hardware(load_hardware("A40"), "A40", tmp_path / "list.yaml")
    assert isinstance(load_hardware("A40", path), Hardware)


def test_analytic_costs_follow_flops_and_shrink_with_parallelism():
    hardware = load_hardware("H100")
    shape = block_shape(4096, 14336, 32, 8)
    assert shape.parameters == pytest.approx(218.1e6, rel=1e-3)  # a Llama-3 8B block
    one, two = analytic_cost(shape, hardware), analytic_cost(shape, hardware, degrees=Degrees(2))
    least = 2 * shape.matmul * 4096 / hardware.flops("bfloat16")
    # 678 ns a token are products; besides, 103 are attention at a third of the peak, 216 norms, rotary embeddings and
    # activations that read and write 290,000 numbers operation by operation, 44 the processors that last tiles leave
    # idle, 16 the launches.
    assert one.forward(4096) / least == pytest.approx(1.56, abs=0.005)  # the ratio's last digit
    assert one.forward(4096) / 2 < two.forward(4096) < one.forward(4096)
    assert two.activation_bytes(4096) == pytest.approx(one.activation_bytes(4096) / 2)
    backward = one.input_gradient(4096) + one.weight_gradient(4096)
    assert 1.8 < backward / one.forward(4096) < 2.5
    # The first trainable layer saves the products that read its input.
    assert one.weight_gradient(4096) < one.first_trainable(4096) < backward
    assert one.weight_bytes(100) <= one.activation_bytes(100)


def only_products(name: str = "A100") -> Hardware:
    free = Link(math.inf)
    return replace(
        load_hardware(name), bandwidth=math.inf, launch=0.0, host=0.0, inside=free, between=free,
        attention={"packed": (math.inf, math.inf)},
    )  # fmt: skip


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_products_wait_for_their_last_tiles(tp):
    """Count tiles and rounds of processors for all lengths of a range, whose mean the model is to meet."""
    hardware, hidden, ffn = only_products(), 8192, 32_768
    cost = analytic_cost(block_shape(hidden, ffn, 64, gated=False), hardware, degrees=Degrees(tp))
    tile = 2 * 128 * 256 / (hardware.flops("bfloat16") / 108)  # seconds for an inner dimension of one
    products = ((hidden, 3 * hidden // tp), (hidden // tp, hidden), (hidden, ffn // tp), (ffn // tp, hidden))
    lengths = range(2048, 8192, 128)
    counted = {
        "forward": (
            sum(math.ceil(tokens // 128 * outer // 256 / 108) * inner * tile for inner, outer in products)
            for tokens in lengths
        ),
        "input_gradient": (
            sum(math.ceil(tokens // 128 * inner // 256 / 108) * outer * tile for inner, outer in products)
            for tokens in lengths
        ),
    }
    for name, seconds in counted.items():
        mean = sum(getattr(cost, name)(tokens) for tokens in lengths) / len(lengths)
        # The part of a round that is idle is a half only in the mean of many products; here are four.
        assert mean == pytest.approx(sum(seconds) / len(lengths), rel=0.01), name


def test_unfused_attention_moves_scores_of_all_pairs_and_heads():
    hardware, runner = load_hardware("A100"), Runner("megatron of 2021", "unfused", fused=True)
    few, many = (
        analytic_cost(block_shape(8192, 32_768, heads, gated=False), hardware, runner=runner) for heads in (64, 128)
    )
    score = 2 / (hardware.bandwidth * hardware.memory_efficiency)  # seconds in which a score is read or written
    # Written, read and written by the softmax and by dropout, whose mask has a byte, and read: 6.5; 9.5 in a backward.
    # Costs are rounded to six digits.
    assert many.forward.a - few.forward.a == pytest.approx(64 * 6.5 * score, rel=1e-4)
    assert many.input_gradient.a - few.input_gradient.a == pytest.approx(64 * 9.5 * score, rel=1e-4)
    products = 4 * 8192 / hardware.flops("bfloat16")
    assert few.forward.a == pytest.approx(64 * 6.5 * score + products, rel=1e-4)


def test_eight_bits_save_less_where_products_are_narrow():
    hardware, runner = load_hardware("H100"), Runner("megatron", fused=True)
    gains = []
    for hidden in (2048, 4096, 16_384):
        shape = block_shape(hidden, 4 * hidden, hidden // 128, fused=True)
        one, low = (analytic_cost(shape, hardware, runner=replace(runner, products=kind)) for kind in (None, "float8"))
        gains.append(one.pass_seconds(4096) / low.pass_seconds(4096))
    assert gains == sorted(gains)
    most = hardware.flops("float8") / hardware.flops("bfloat16")  # what products alone would gain
    assert gains[0] < 1.3 < 1.5 < gains[-1] < most
    head = head_shape(4096, 128_256)  # stays in 16 bits
    assert analytic_cost(head, hardware, runner=replace(runner, products="float8")) == analytic_cost(
        head, hardware, runner=runner
    )


def test_bytes_of_a_collective_hide_behind_products_but_not_its_latency():
    hardware, tp, hidden = load_hardware("H100"), 4, 4096
    whole, hidden_cost = (
        analytic_cost(
            block_shape(hidden, 16_384, 32), hardware, degrees=Degrees(tp), runner=Runner("any", hidden=share)
        )
        for share in (0.0, 0.75)
    )
    # A forward gathers and scatters the rows twice, in bf16; three quarters of each message are hidden.
    message = 2 * hidden * (tp - 1) / tp / hardware.inside.bandwidth
    for name in ("forward", "input_gradient"):
        before, after = getattr(whole, name), getattr(hidden_cost, name)
        assert before.b - after.b == pytest.approx(4 * 0.75 * message, rel=1e-3)  # six digits of each cost are kept
        assert before.c == after.c
    assert whole.weight_gradient == hidden_cost.weight_gradient


def test_slower_hardware_is_modelled_slower():
    shape = block_shape(2048, 8192, 32)
    seconds = [analytic_cost(shape, load_hardware(name)).forward(2048) for name in ("H200", "H100", "A100", "A40")]
    assert seconds == sorted(seconds)


def test_backward_halves_never_cost_more_than_the_whole():
    """Also where measurement found the whole backward quicker than the weight gradient alone."""
    cost = LayerCost(*(Quadratic(b=1.0) for _ in range(2)), Quadratic(b=1.0), Quadratic(b=0.8))
    work = frozen_work(cost, trainable=True, before=False)
    assert work.backward == Quadratic(b=0.8)


def test_what_does_not_train_keeps_nothing_for_weight_gradients():
    cost = replace(COST, activation_bytes=Quadratic(b=10.0), frozen_bytes=Quadratic(b=6.0))
    assert frozen_work(cost, trainable=True, before=True).kept_bytes == Quadratic(b=10.0)
    assert frozen_work(cost, trainable=False, before=True).kept_bytes == Quadratic(b=6.0)
    unknown = replace(cost, frozen_bytes=Quadratic())
    assert frozen_work(unknown, trainable=False, before=True).kept_bytes == Quadratic(b=10.0)


@pytest.mark.parametrize(("link", "forward", "backward"), [(10.0, 1.0, 3.3), (0.5, 2.0, 3.3), (0.25, 4.0, 5.1)])
def test_inputs_on_the_host_cost_what_their_copies_expose(link: float, forward: float, backward: float) -> None:
    """A block of 1 s forward and 2.2 s input gradient, half of it again, keeps an input of one byte."""
    work = frozen_work(COST, True, True, "block_offload", link)
    assert work.forward(1) == pytest.approx(forward)
    assert work.backward(1) == pytest.approx(backward)
    assert work.kept_bytes(1) == 0.0
    block = frozen_work(COST, True, True, "block")
    assert work.transient_bytes(1) == block.transient_bytes(1) + 2 * 1.0
    assert frozen_work(COST, True, True, "block_offload") == block  # no host apart


def test_a_layer_that_saves_no_memory_is_not_recomputed():
    head = replace(COST, activation_bytes=Quadratic(b=10.0), checkpoint_bytes=Quadratic(b=10.0))
    assert frozen_work(head, True, True, "block") == frozen_work(head, True, True, "none")


def test_files_of_costs_and_hardware_are_replaced_whole(tmp_path: Path) -> None:
    """Somebody may be reading them; what the user made a link stays one."""
    costs = hardware_costs()
    for name, save in (
        ("costs.yaml", lambda path: save_costs(costs, path)),
        ("hardware.yaml", lambda path: save_hardware(load_hardware("A40"), "node", path)),
    ):
        path, link = tmp_path / name, tmp_path / f"link-{name}"
        save(path)
        text = path.read_text()
        with path.open() as reader:
            save(path)
            assert os.fstat(reader.fileno()).st_ino != path.stat().st_ino
            assert reader.read() == text
        link.symlink_to(path)
        save(link)
        assert link.is_symlink()
        assert path.read_text() == text
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{link}{name}.yaml" for link in ("", "link-") for name in ("costs", "hardware")
    }


def test_a_backward_does_not_hold_what_only_forwards_hold() -> None:
    cost = replace(
        COST, activation_bytes=Quadratic(b=10.0), working_bytes=Quadratic(b=4.0), forward_bytes=Quadratic(b=6.0)
    )
    alone = frozen_work(cost, trainable=False, before=False)
    assert (alone.forward_bytes, alone.transient_bytes) == (cost.forward_bytes, ZERO)
    again = frozen_work(cost, trainable=True, before=True, recompute="block")
    assert (again.forward_bytes, again.transient_bytes) == (cost.forward_bytes, Quadratic(b=14.0))
    kept = frozen_work(cost, trainable=True, before=True)
    assert (kept.forward_bytes, kept.transient_bytes) == (cost.working_bytes, cost.working_bytes)


@pytest.mark.parametrize(("written", "name"), [("h100", "H100"), ("RTX4090", "RTX 4090"), ("a100-40gb", "A100 40GB")])
def test_hardware_is_found_however_its_name_is_written(written, name):
    assert load_hardware(written) == load_hardware(name)
