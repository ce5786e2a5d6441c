"""AdamW goes on with the moments that torchtitan and users of FSDP stored beside the weights."""

from __future__ import annotations

import copy
import json
import re
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from cases.dcp_folders import language, save
from cases.tiny_wholes import save_as_the_hub_does
from dilatant import train
from dilatant.cli.export import ExportFormat, export
from dilatant.config import Config, UserError
from dilatant.config.config import parse_config
from dilatant.data.text.encode import encode_sample
from dilatant.hf.stored_moments import StoredMoments, find_moments
from dilatant.hf.stored_weights import read_pretrained
from dilatant.models.multimodal import MultimodalModel
from dilatant.plan.boxes import Box
from dilatant.planning.assemble import assemble_samples
from dilatant.training.prepare import open_model

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected an existing check")
RATE, BETAS, DECAY, EPS = 1e-2, (0.9, 0.95), 0.1, 1e-8
TALK = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "the left one"}]


def adamw(model: PreTrainedModel) -> torch.optim.AdamW:
    """Return torch's AdamW with the weight decay of a run: none for norms and biases."""
    groups = [
        {"params": [weight for weight in model.parameters() if (weight.ndim >= 2) == decays], "weight_decay": decay}
        for decays, decay in ((True, DECAY), (False, 0.0))
    ]
    return torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPS)


def learn(model: PreTrainedModel, optimizer: torch.optim.Optimizer, inputs: Any, steps: int) -> list[float]:
    """Train a model as its user would without a framework, on one sample."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def titan(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What torchtitan saves: weights at the top, the flat state of the optimizer, and the progress."""
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    return {**model.state_dict(), "optimizer": flat, "train_state": {"step": torch.tensor(3)}}


def fsdp(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What torch's tutorial on FSDP saves."""
    return {"app": {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}}


def config_of(folder: Path, model: dict[str, Any], **keys: Any) -> Config:
    tree = tree_of(folder, "run", **keys)
    return parse_config({**tree, "model": model}, folder)


def tree_of(folder: Path, name: str, optimizer: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    (folder / "talk.jsonl").write_text("\n".join([json.dumps({"messages": TALK})] * 8), encoding="utf-8")
    settings = {"learning_rate": RATE, "weight_decay": DECAY, "betas": BETAS, "eps": EPS, **(optimizer or {})}
    steps = {"steps": 3, "global_batch_size": 2, "max_grad_norm": None, "schedule": "constant", "report_to": []}
    return {
        "output_dir": str(folder / name),
        "model": {"language_model": {"id": str(folder / "m")}},
        "data": {"train": [{"path": str(folder / "talk.jsonl")}], "max_length": 128, "workers": 0},
        "train": {**steps, "optimizer": settings},
        **keys,
    }


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "export/language/model.safetensors")


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[key] - other[key]).abs().max()) for key in one)


@dataclass
class Story:
    """A plain loop of seven steps on `inputs`. The folder `m` holds its state after three; losses are those of the next
    three, weights and next_weights those after six and seven."""

    folder: Path
    inputs: dict[str, torch.Tensor]
    losses: list[float]
    weights: dict[str, torch.Tensor]
    next_weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("story")
    model = language(folder / "m")
    samples = assemble_samples(parse_config(tree_of(folder, "run"), folder))
    sample = encode_sample(samples.train[0], samples.encoding)
    inputs = {name: torch.as_tensor(getattr(sample, name))[None].long() for name in ("input_ids", "labels")}
    optimizer = adamw(model)
    before = learn(model, optimizer, inputs, 3)
    save(folder / "m", titan(model, optimizer))
    losses = learn(model, optimizer, inputs, 3)
    assert losses[-1] < before[0]
    weights = copy.deepcopy(dict(model.state_dict()))
    learn(model, optimizer, inputs, 1)
    return Story(folder, inputs, losses, weights, dict(model.state_dict()))


REPLICAS = {"parallel": {"units": {"language": {"replicas": 2}}}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "pipeline": {"parallel": {"units": {"language": {"pp": 2}}}},
    "tensor parallel": {"parallel": {"units": {"language": {"tp": 2}}}},
    "divided state": REPLICAS,
    "whole state": {**REPLICAS, "train": {"zero": "none"}},
    "sharded gradients": {**REPLICAS, "train": {"zero": "all", "shard": "gradients"}},
    "sharded weights": {**REPLICAS, "train": {"zero": "all", "shard": "weights"}},
}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if not keys else pytest.mark.slow) for name, keys in LAYOUTS.items()]
)
def test_a_run_goes_on_as_the_plain_loop_does(layout: str, story: Story) -> None:
    folder = story.folder
    for steps in (2, 3):  # and its own checkpoints hold the moments, too
        tree, keys = tree_of(folder, layout), LAYOUTS[layout]
        of_run = {**tree["train"], **keys.get("train", {}), "steps": steps, "resume": "auto"}
        train({**tree, **keys, "train": of_run})
    lines = (folder / layout / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [record["loss"] for record in map(json.loads, lines) if "loss" in record]
    assert losses == pytest.approx(story.losses, rel=1e-5)
    # Three steps of AdamW at a rate of 1e-2; 1.2e-7 was measured in fp32, and 4.6e-2 without the moments.
    assert furthest(exported(folder / layout), story.weights) < 1e-5


def test_without_the_moments_a_run_goes_elsewhere(story: Story) -> None:
    folder = story.folder
    train(tree_of(folder, "without", optimizer={"stored_moments": False}))
    assert furthest(exported(folder / "without"), story.weights) > RATE / 2


def test_another_program_of_torch_goes_on_with_a_run(story: Story) -> None:
    folder = story.folder
    train(tree_of(folder, "ours"))
    export(folder / "ours", folder / "out", ExportFormat.DCP_MOMENTS)
    place = folder / "out/language"
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(place))
    optimizer = adamw(model)
    learn(model, optimizer, story.inputs, 1)  # makes the tensors that are read into
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {**model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer, options=flat)}
    checkpoint.load(state, checkpoint_id=place, no_dist=True)
    set_optimizer_state_dict(model, optimizer, state.pop("optimizer"), options=flat)
    model.load_state_dict(state)
    assert {float(each["step"]) for each in optimizer.state.values()} == {6}
    assert {(group["lr"], group["betas"], group["eps"]) for group in optimizer.param_groups} == {(RATE, BETAS, EPS)}
    optimizer.param_groups[1]["weight_decay"] = 0.0  # a checkpoint has one for all
    learn(model, optimizer, story.inputs, 1)
    # The seventh step of the loop, of which the run did three; the tolerance is that of the run.
    assert furthest(dict(model.state_dict()), story.next_weights) < 1e-5


def moments_of(config: Config) -> tuple[MultimodalModel, StoredMoments, str]:
    """Return the model of a run, the moments with which it begins, and what the user is told."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = open_model(config, assemble_samples(config))
    return model, find_moments(model, config), "; ".join(str(each.message) for each in caught)


def shaken(model: PreTrainedModel, kind: Any = torch.optim.AdamW, **options: Any) -> torch.optim.Optimizer:
    """Return an optimizer that has updated every weight by a random gradient."""
    optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=RATE, **options)
    for weight in model.parameters():
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("form", [titan, fsdp])
@pytest.mark.parametrize("whole", [False, True], ids=["language model", "whole model"])
def test_moments_are_those_of_their_weights(form: Any, whole: bool, tmp_path: Path) -> None:
    if whole:
        plain = save_as_the_hub_does("llava", tmp_path / "m")
        (tmp_path / "m/model.safetensors").unlink()
    else:
        plain = language(tmp_path / "m")
    optimizer = shaken(plain)
    save(tmp_path / "m", form(plain, optimizer))
    config = config_of(tmp_path, {"id": "m"} if whole else {"language_model": {"id": "m"}})
    model, moments, remark = moments_of(config)
    boxes = {name: Box.of(name, tuple(weight.shape)) for unit in model.units.values()
             for name, weight in unit.named_logical_parameters()}  # fmt: skip
    assert f"begins with AdamW's moments of {len(boxes)} weights" in remark
    weights = read_pretrained(model, config.model, boxes, 0)
    read = dict(moments.read(boxes))
    for name in boxes:
        (parameter,) = [each for each in plain.parameters() if torch.equal(each.data, weights[name])]
        for kind, expected in optimizer.state[parameter].items():
            assert torch.equal(read[kind][name].reshape(expected.shape), expected), (name, kind)
    part = Box(name, boxes[name].whole, tuple(((0, (n + 1) // 2),) for n in boxes[name].whole))
    cut = dict(moments.read({part.key: part}))
    assert torch.equal(cut["exp_avg"][part.key], read["exp_avg"][name][tuple(slice(0, n) for n in part.shape)])


def numbered(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optim": optimizer.state_dict()}


class AmsGrad(torch.optim.AdamW):
    def __init__(self, *values: Any, **options: Any) -> None:
        super().__init__(*values, **options, amsgrad=True)


FROZEN = {"language_model": {"id": "m"}, "freeze": ["language.layers.0.*"]}
LORA = {"language_model": {"id": "m"}, "lora": {"units": ["language"]}}


@pytest.mark.parametrize(
    ("kind", "form", "model", "optimizer", "says"),
    [
        (
            torch.optim.AdamW,
            numbered,
            None,
            {},
            "it has no weight that AdamW trains here, and names as 'optim.state.0.step'",
        ),
        (torch.optim.SGD, titan, None, {}, "is not read: it has momentum_buffer, and that of AdamW exp_avg"),
        (torch.optim.AdamW, titan, None, {"name": "my.own"}, "is not read: the run has an optimizer of your own"),
        (torch.optim.AdamW, titan, LORA, {}, "is not read: it has no weight that AdamW trains here"),
        (torch.optim.AdamW, titan, None, {"stored_moments": False}, ""),
        (
            torch.optim.AdamW,
            titan,
            None,
            {"muon": {"weights": ["language"]}},
            "of 7 weights in .*; 14 weights that the run trains begin without moments, such as 'language.layers.0",
        ),
        (AmsGrad, titan, None, {}, "of 21 weights in '.*', without their max_exp_avg_sq, and its schedule"),
        (torch.optim.AdamW, titan, FROZEN, {}, "begins with AdamW's moments of 12 weights in"),
    ],
    ids=["numbered", "sgd", "own", "lora", "declined", "muon", "amsgrad", "frozen"],
)
def test_moments_that_do_not_fit_are_named(
    kind: Any, form: Any, model: Any, optimizer: dict[str, Any], says: str, tmp_path: Path
) -> None:
    plain = language(tmp_path / "m")
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    save(tmp_path / "m", form(plain, shaken(plain, kind, **options)))
    tree = tree_of(tmp_path, "run")
    settings = optimizer if "name" in optimizer else {**tree["train"]["optimizer"], **optimizer}
    train_keys = {**tree["train"], "optimizer": settings}
    config = parse_config({**tree, "train": train_keys, "model": model or tree["model"]}, tmp_path)
    _, moments, remark = moments_of(config)
    assert re.search(says, remark)
    assert bool(moments.files) == (" weights in" in says)
    assert ("begins with AdamW" in remark or "is not read:" in remark) == bool(says)


def read_all(config: Config) -> None:
    model, moments, _ = moments_of(config)
    shapes = {name: w for unit in model.units.values() for name, w in unit.named_logical_parameters()}
    dict(moments.read({name: Box.of(name, tuple(w.shape)) for name, w in shapes.items()}))


def test_damaged_moments_are_one_line(tmp_path: Path) -> None:
    plain = language(tmp_path / "m")
    good = titan(plain, shaken(plain))
    config = config_of(tmp_path, {"language_model": {"id": "m"}})
    for kind, change, says in (
        ("exp_avg_sq", lambda tensor: tensor[:-1], r"exp_avg_sq' is \[\d+, 16\], where its weight needs"),
        ("exp_avg_sq", lambda tensor: -tensor, "has negative numbers"),
        ("exp_avg_sq", lambda tensor: tensor / 0, "NaN or infinity"),
        ("exp_avg", lambda tensor: tensor > 0, "has numbers of torch.bool"),
        ("exp_avg", lambda tensor: tensor.double() * 1e300, "has numbers beyond the range of fp32"),
        ("step", lambda tensor: tensor / 0, "has numbers beyond the range of fp32"),
        ("step", lambda tensor: tensor.repeat(2), r"step' is \[2\], where its weight needs \[\]"),
    ):
        key = next(key for key in good["optimizer"] if key.endswith(f"up_proj.weight.{kind}"))
        save(tmp_path / "m", {**good, "optimizer": {**good["optimizer"], key: change(good["optimizer"][key])}})
        with pytest.raises(UserError, match=says) as refused:
            read_all(config)
        assert len(str(refused.value).splitlines()) == 1


def test_shards_that_are_cut_off_are_one_line(tmp_path: Path) -> None:
    plain = language(tmp_path / "m")
    save(tmp_path / "m", titan(plain, shaken(plain)))
    config = config_of(tmp_path, {"language_model": {"id": "m"}})
    (shard,) = (tmp_path / "m").glob("*.distcp")
    content = shard.read_bytes()
    for length in (len(content) // 2, 1, 0):
        shard.write_bytes(content[:length])
        for reads in (partial(read_all, config), partial(train, tree_of(tmp_path, "run"))):
            with pytest.raises(UserError, match=r"distcp': '.*': the file ends before it; fetch the file again$"):
                reads()
    shard.unlink()
    missing = tree_of(tmp_path, "run")
    with pytest.raises(UserError, match=r"holds no weights \(\.safetensors, \.bin, \.distcp\)"):
        train(missing)


def test_a_resumed_run_says_nothing_of_moments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = language(tmp_path / "m")
    good = titan(plain, shaken(plain))
    save(tmp_path / "m", good)
    tree = tree_of(tmp_path, "run")
    for steps in (1, 2):
        train({**tree, "train": {**tree["train"], "steps": steps, "resume": "auto"}}, show="stdout")
        said = " ".join(capsys.readouterr().out.split())
        assert ("begins with AdamW's moments" in said) == (steps == 1)
        # A resumed run does not look at these moments, so it does not matter that they became unfit.
        key = next(key for key in good["optimizer"] if key.endswith("exp_avg"))
        save(tmp_path / "m", {**good, "optimizer": {**good["optimizer"], key: good["optimizer"][key][:-1]}})
