"""Cornstarch's third text (arXiv, version 3): figures that the thesis does not print or does not compare."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.attention.rows import build, count_visible_pairs, draw_row
from benchmarks.papers.models import CORNSTARCH_LLM, LLAMA_3_2_1B, Part, seconds, transformer_of
from benchmarks.papers.tables import Outcome, PaperTable, spread, untested
from dilatant.cost.hardware import Hardware, load_hardware
from dilatant.plan.costs.partition import partition_layers

# Ms of one attention layer and of the whole LLM by tokens and size of the LLM, under causal context parallelism and as
# Cornstarch places it: Table 3 (64k; its cells are lost in the text and are the thesis' Table 3.3) and Fig. 12.
_LONG = {
    (16_384, "S"): (23.54, 800.29, 18.23, 705.14),
    (16_384, "M"): (40.01, 3682.71, 34.47, 3491.53),
    (16_384, "L"): (48.02, 13089.76, 41.41, 12628.59),
    (32_768, "S"): (66.00, 1858.73, 57.32, 1705.38),
    (32_768, "M"): (113.37, 8345.84, 105.16, 8029.79),
    (32_768, "L"): (148.75, 29372.62, 143.28, 28518.80),
    (65_536, "S"): (243.44, 5541.25, 204.95, 4856.60),
    (65_536, "M"): (460.13, 24534.50, 417.31, 22815.79),
    (65_536, "L"): (568.18, 77378.44, 551.60, 74864.71),
}
_MASKS, _DRAWS = ("EP", "EE", "MP"), 5
_STAGES = 4  # of Fig. 2
_GAP = 0.05  # of the throughput of equal stages: the least that counts as a balance that breaks


def long_rows() -> PaperTable:
    """Table 3 and Fig. 12: how an LLM's time grows with its row, and with itself."""
    hardware = load_hardware("A40")
    ours: dict[tuple[int, str], tuple[float, float]] = {}
    for tokens in sorted({tokens for tokens, _ in _LONG}):
        seen = [
            count_visible_pairs(build(kind, draw_row(kind, tokens, seed))) / tokens**2
            for kind, seed in itertools.product(_MASKS, range(_DRAWS))
        ]
        for size, (part,) in CORNSTARCH_LLM.items():
            ours[tokens, size] = _model_and_attention(part, tokens, float(np.mean(seen)), hardware)
    rows: list[tuple[Any, ...]] = []
    for (tokens, size), (attention, model, placed, placed_model) in _LONG.items():
        layers = CORNSTARCH_LLM[size][0].count
        whole, inside = ours[tokens, size]
        half, small = (tokens // 2, size), (tokens, "S")
        rows.append(
            (tokens, size, model / _LONG[half][1] if half in _LONG else None,
             whole / ours[half][0] if half in ours else None,
             model / _LONG[small][1], whole / ours[small][0], layers * attention / model, inside / whole,
             model / placed_model, model / (model - layers * (attention - placed)))
        )  # fmt: skip
    growth = [(row[2], row[3]) for row in rows if row[2] is not None]
    sizes = [(row[4], row[5]) for row in rows if row[1] != "S"]
    shares = [(row[6], row[7]) for row in rows]
    gains = [(row[8], row[9]) for row in rows]
    return PaperTable(
        "Cornstarch v3 Table 3, Fig. 12",
        "whole LLMs on long rows under causal context parallelism",
        "predicted: shipped analytic A40, forward of Table 3.1's shapes, attending as EP, EE and MP masks drawn "
        f"{_DRAWS} times each do; ratios only, in which the number of GPUs cancels (the paper does not tell it). "
        "The last column is replayed: the paper's model less what its attention layers gain",
        (
            "tokens",
            "LLM",
            "paper: over half the tokens",
            "ours",
            "paper: over S",
            "ours ",
            "paper: attention's share",
            "ours  ",
            "paper: gain of the model",
            "from its layers",
        ),
        tuple(rows),
        (
            _ratios("time of a row of twice the tokens, 6 cells", growth, "predicted"),
            _ratios("time of the larger LLMs over the small one's, 6 cells", sizes, "predicted"),
            _ratios(
                "attention's share of the model's time, 9 cells",
                shares,
                "predicted",
                note="of the paper: its layers' times one layer's; ours counts operations at one rate for attention "
                "and matrix products, where attention under masks is slower",
            ),
            _ratios(
                "gain of the whole model from the gain of its attention, 9 cells",
                gains,
                "replayed",
                note="both from the paper: tells only that nothing but attention gained",
            ),
        ),
    )


def frozen_balance() -> PaperTable:
    """Fig. 2 (thesis Fig. 3.1a): Siglip and Llama 3.2 1b in four stages that are balanced when all trains."""
    hardware = load_hardware("A40")
    vision = transformer_of(27, 1152, 0.413e9, False, "vision")
    units = ((vision, 729), (LLAMA_3_2_1B, 2048))
    trained, frozen = [], []
    for parts, tokens in units:
        for part in parts:
            one = replace(part, count=1)
            forward, inputs, weights = (
                float(seconds((one,), hardware, tokens, of)) for of in ("forward", "input_gradient", "weight_gradient")
            )
            trained += [forward + inputs + weights] * part.count
            frozen += [forward if parts is vision else forward + inputs + weights] * part.count
    unaware, aware = (partition_layers(layers, _STAGES) for layers in (trained, frozen))
    rows = (
        ("all trained", "balanced for it", _balance(trained, unaware)),
        ("encoder frozen", "as if all trained", _balance(frozen, unaware)),
        ("encoder frozen", "balanced for it", _balance(frozen, aware)),
    )
    fits, breaks, mended = (row[2] for row in rows)
    return PaperTable(
        "Cornstarch v3 Fig. 2",
        f"Siglip and Llama 3.2 1b in {_STAGES} stages: throughput over that of perfectly equal stages",
        "predicted: shipped analytic A40 at 729 patches and 2,048 tokens (the paper tells neither), steady state: mean "
        "of the stages over the slowest. The figure's bars are not in the text",
        ("state", "stages", "ours"),
        rows,
        (
            Outcome(
                "freezing the encoder breaks the balance of the stages",
                "close to the optimum, then a large gap (drawn, not printed)",
                f"{fits:.2f} of the optimum, then {breaks:.2f}",
                "agrees" if fits - breaks >= _GAP else "falls short",
                "predicted",
                f"{mended:.2f} with stages that know it; the size of the gap cannot be compared",
            ),
        ),
    )


def untold() -> PaperTable:
    """Claims whose figures are not in the text or need a GPU."""
    return PaperTable(
        "Cornstarch v3, the rest",
        "carried over",
        "carried over from the paper; its Tables 1 and 2 and Fig. 8 are the thesis' Tables 3.1, 3.2 and Fig. 3.6",
        (),
        (),
        (
            untested("speed-up over all baselines, mean (Fig. 8)", "2.26", "FSDP and GraphPipe* are not here"),
            untested("activity of compute units (Fig. 9)", "drawn, not printed", "needs a GPU"),
            untested(
                "causal placement under another mask, over the optimum (Fig. 3)",
                "nearly 1.20",
                "the mask is drawn; twice the work on two of four GPUs, as it says, would be 1.33",
            ),
        ),
    )


def _model_and_attention(part: Part, tokens: int, attended: float, hardware: Hardware) -> tuple[float, float]:
    """Seconds of the whole LLM's forward over such a row, and of these what grows with its square."""
    attending = (replace(part, shape=replace(part.shape, attended_share=attended)),)
    blind = (replace(part, shape=replace(part.shape, attended_share=0.0)),)
    whole = float(seconds(attending, hardware, tokens))
    return whole, whole - float(seconds(blind, hardware, tokens))


def _balance(layers: Sequence[float], cuts: Sequence[int]) -> float:
    """Mean of the stages over the slowest."""
    stages = [sum(layers[first:end]) for first, end in itertools.pairwise((*cuts, len(layers)))]
    return sum(stages) / len(stages) / max(stages)


def _ratios(claim: str, pairs: Sequence[tuple[float, float]], basis: Any, note: str = "") -> Outcome:
    """Agrees where each of our figures is within a tenth of the paper's."""
    far = [abs(ours / paper - 1.0) for paper, ours in pairs]
    text = f"{len([one for one in far if one <= 0.1])} of {len(far)} within a tenth, mean distance {np.mean(far):.0%}"
    return Outcome(
        claim,
        spread(paper for paper, _ in pairs),
        spread(ours for _, ours in pairs),
        "agrees" if max(far) <= 0.1 else "falls short",
        basis,
        "; ".join(filter(None, (text, note))),
    )
