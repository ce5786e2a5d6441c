"""Rows of measured runs are read in the words of any source, or refused with the reason."""

from __future__ import annotations

import pytest

from benchmarks.papers.corpus.facts import gpu_of, is_gated, low_precision, network_of, node_of, recompute_of, zero_of
from benchmarks.papers.corpus.programs import hides_tensor_parallelism, program_of, sums_of
from benchmarks.papers.corpus.rows import Measured, measured_runs

LLAMA = {
    "name": "Llama 3 8B", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14_336, "vocab": 128_256,
    "seq": 8192,
}  # fmt: skip


def row(**facts):
    """A row with the keys that no source leaves out."""
    return {
        "source_id": "someone", "model": LLAMA, "hardware": "H100 80GB", "gpus": 16, "tp": 2, "mbs": 1, "gbs": 64,
        "measured": {"step_seconds": 5.0}, **facts,
    }  # fmt: skip


def read(**facts):
    return next(measured_runs(iter([row(**facts)])))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"), ("a100_80gb", "A100"), ("8xH200 (141 GB)", "H200"),
        ("DGX-GB200", "GB200"),
        ("AMD Instinct MI300X", "MI300X"), ("nvidia h800", "H800"), ("HGX H20", "H20"), ("GH200 480GB", "GH200"),
        ("L40S", "L40S"), ("RTX4090", "RTX 4090"),
    ],
)  # fmt: skip
def test_gpus_are_known_by_each_spelling(text, name):
    assert gpu_of(text) == name


@pytest.mark.parametrize("text", ["A100 80GB PCIe", "H100-PCIE-80GB", "MI250X", "A10G", "TPU v4"])
def test_other_devices_are_refused_by_name(text):
    with pytest.raises(ValueError, match="hardware file"):
        gpu_of(text)


@pytest.mark.parametrize(
    ("text", "node", "network"),
    [
        ("H200 141GB, 4 a node, InfiniBand", 4, None),
        ("8 nodes, 4x NVIDIA H200 (141 GB) per node", 4, None),
        ("A100 80GB, 8 a node, 4 x 200 Gb/s a node", 8, 100e9),
        ("A100 40GB, 1600 Gbps a node", 8, 200e9),
        ("H100, 4 GPUs per node, 400 Gb/s a GPU", 4, 200e9),
    ],
)
def test_nodes_and_networks_are_read(text, node, network):
    assert node_of(text) == node
    assert network_of(text, node) == network


def test_replicas_on_small_nodes_exchange_over_the_network():
    small, large = read(hardware="H200, 4 a node", tp=1), read(hardware="H200, 8 a node", tp=1)
    assert (small.per_node, large.per_node) == (4, 8)
    assert small.hardware.between.bandwidth == large.hardware.between.bandwidth / 2  # half of the ports


@pytest.mark.parametrize(
    ("text", "zero", "shard"),
    [
        ("ZeRO-0", "none", "none"), ("DDP", "none", "none"), ("none", "none", "none"), (None, "all", "none"),
        ("ZeRO stage 1", "all", "none"), ("zero2(dp8)", "all", "gradients"), ("SHARD_GRAD_OP", "all", "gradients"),
        ("sharding stage2", "all", "gradients"), ("DeepSpeed ZeRO3", "all", "weights"),
        ("FULL_SHARD", "all", "weights"),
        ("FSDP HYBRID_SHARD", "node", "weights"), ("distributed optimizer", "all", "none"),
    ],
)  # fmt: skip
def test_sharding_is_read(text, zero, shard):
    assert zero_of(text) == (zero, shard)


@pytest.mark.parametrize(
    ("value", "how"),
    [
        ("full", "block"), ("Full, every layer", "block"), (True, "block"), ("activation checkpointing", "block"),
        ("gradient_checkpointing true", "block"), ("gradient_checkpointing: false", "none"), ("uniform", "block"),
        (None, "none"), (False, "none"), ("selective: core_attn", "none"), ("optional", "none"), ("not told", "none"),
        ("selective, per op", "block_keep_attention"),
    ],
)  # fmt: skip
def test_recomputation_is_read(value, how):
    assert recompute_of(value) == how


def test_formats_of_numbers_are_read():
    assert [low_precision(text) for text in ("bf16+fp8", "MXFP8", "E4M3", "NVFP4", "BF16, sums in fp32")] == [
        "float8", "float8", "float8", "float4", None,
    ]  # fmt: skip
    assert read(precision="fp32") == "products in fp32 are not modelled"


def test_feed_forwards_are_gated_as_their_rows_say():
    assert is_gated({"model": LLAMA})
    for facts in ({"gated": False}, {"activation": "squared-relu"}, {"note": "GELU MLP"}, {"name": "Nemotron4 15B"}):
        assert not is_gated({"model": {**LLAMA, **facts}})
    # Of a Llama 8B's layers, with and without the gate's product.
    assert is_gated({"model": {**LLAMA, "parameters": 8.0e9}})
    assert not is_gated({"model": {**LLAMA, "parameters": 6.2e9}})


def test_programs_are_known_by_what_rows_say_of_them():
    torch = program_of(row(zero="FSDP2", notes="")), program_of(row(zero="FSDP2", compile=True, notes=""))
    assert [one.fused for one in torch] == [False, True]
    assert torch[0].stops_early
    names = {
        "megatron": row(zero="Megatron FSDP"),
        "xla": row(zero="FSDP", notes="MaxText"),
        "megatron of 2023": row(zero=None, framework="Megatron-LM of 2023"),
        "automodel": row(zero="FSDP2", source="NVIDIA-NeMo/Automodel"),
    }
    assert {name: program_of(own).name for name, own in names.items()} == {name: name for name in names}
    assert program_of(row(zero=None, framework="Megatron, FlashAttention 2")).attention == "flash"
    early = program_of(row(zero=None, source="NVIDIA/NeMo-Framework-Launcher (2022-09-07)", recompute="none"))
    assert early.attention == "unfused"


def test_overlaps_are_those_that_rows_and_dates_tell():
    nemo = {"source": "NVIDIA/dgxc-benchmarking, NeMo 24.12", "zero": None, "multimodal": False}
    assert hides_tensor_parallelism(row(**nemo))
    assert not hides_tensor_parallelism(row(**nemo, notes="ub_tp_comm_overlap: False"))
    assert not hides_tensor_parallelism(row(zero=None, multimodal=False, framework="megatron-core 0.6"))
    assert sums_of(row(**nemo)).bytes == 2.0
    assert not sums_of(row(zero=None, framework="Megatron-LM (2023-05)")).overlap
    assert not sums_of(row(zero=None, notes="no overlap of communication")).overlap
    assert sums_of(row(zero=None, framework="Megatron-LM (2024-05)")).overlap


def test_rows_may_leave_out_what_follows_from_others():
    bare = {key: value for key, value in row(measured={"tokens_per_s_per_gpu": 4096.0}).items() if key != "hardware"}
    run = next(measured_runs(iter([{**bare, "hardware": "H100"}])))
    assert isinstance(run, Measured)
    assert (run.dp, run.pp, run.cp, run.chunks, run.zero) == (8, 1, 1, 1, "all")
    assert run.seconds == pytest.approx(64 * 8192 / (16 * 4096))
    assert run.held_out  # no constant was fitted to a source that is not listed
    assert next(measured_runs(iter([{"source_id": "nothing else"}]))) == "incomplete"


def test_numbers_may_be_texts_and_steps_may_be_rates():
    same = (
        read(gpus="16", gbs="1,024", measured={"step_ms": 50_000}),
        read(gbs=1024, cp=0, measured={"samples_per_s": 1024 / 50}),
        read(gbs=1024, measured={"tokens_per_second": 1024 * 8192 / 50}),
        read(gbs=1024, vpp="NA", measured="50 s", derived_step_seconds="50.0"),
    )
    assert [(run.batch, run.dp, run.cp, run.chunks, run.seconds) for run in same] == [(1024, 8, 1, 1, 50.0)] * 4


def test_rows_that_contradict_themselves_are_refused():
    assert read(dp=4) == "its degrees contradict its number of devices"
    experts = {**LLAMA, "moe": {"experts": 8, "top_k": 2, "ffn": 14_336}}
    run = read(dp=1, ep=8, model=experts)  # the replicas of experts
    assert run.dp == 8
