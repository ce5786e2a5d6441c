"""A mistake in the config names its key and the way out; a right config survives a round trip."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dilatant.config import UserError, load_config
from dilatant.config.config import _keys_at
from dilatant.config.others_keys import CALLED_HERE
from dilatant.cost.hardware import read_hardware_file
from dilatant.cost.model import CostModel

GOOD = {
    "model": {
        "language_model": {"config": {"model_type": "llama"}, "tokenizer": "bytes"},
        "encoders": {"vision": {"kind": "image", "config": {"model_type": "siglip_vision_model"}}},
    },
    "data": {"train": [{"path": "train.jsonl"}]},
}


def write(folder: Path, tree: object) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def changed(**top: object) -> dict:
    return {**GOOD, **top}


ROOT = Path(__file__).parents[2]
SHIPPED = sorted([*ROOT.glob("examples/*.yaml"), *ROOT.glob("src/dilatant/recipes/*.yaml")])
OVERRIDES: tuple[tuple[str, ...], ...] = (
    ("model.generators.image={config: {_class_name: SD3Transformer2DModel}}",),
    (
        "model.generators.image={config: {_class_name: SD3Transformer2DModel}, connector: transformer, "
        "connector_layers: 3}",
    ),
    ("model.generators.image={config: {_class_name: SD3Transformer2DModel}, target: {encoder: vision}}",),
    ("model={id: a/vlm}",),
    ("model={id: a/vlm}", "model.lora={r: 4}"),
    ("model.lora={r: 4}", "parallel=auto"),
    ("model.freeze=[vision.encoder]", "parallel={units: {vision: {pp: 1}, language: {tp: 2}}, microbatches: 2}"),
    (
        "cluster.groups=[{name: a, hardware: A40, gpus_per_node: 1}, "
        "{name: b, hardware: H100, nodes: 2, gpus_per_node: 1}]",
    ),
    ("cluster.nodes=2", "cluster.hardware=H100", "parallel={plan: plan.json}"),
    ("resilience.enabled=true",),
    ("train.steps=3", "train.recompute=block", "train.zero=all", "train.shard={language: weights}"),
    ("resilience.enabled=true", "train.shard=weights"),
)


@pytest.mark.parametrize("given", [*(str(path.relative_to(ROOT)) for path in SHIPPED), *OVERRIDES], ids=str)
def test_saved_config_reads_back_equal(tmp_path: Path, given: str | tuple[str, ...]) -> None:
    if isinstance(given, str):
        config = load_config(ROOT / given)
    else:
        config = load_config(write(tmp_path, GOOD), given)
    saved = tmp_path / "elsewhere"
    saved.mkdir()
    (saved / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    assert load_config(saved / "config.yaml") == config


def test_paths_are_taken_from_the_file_not_the_working_directory(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, changed(output_dir="../runs/a")))
    assert config.data.train[0].path == str(tmp_path / "train.jsonl")
    assert Path(config.output_dir).resolve() == (tmp_path.parent / "runs/a").resolve()


@pytest.mark.parametrize(
    ("key", "override"),
    [
        ("data.train.0.path", "data.train.0.path=HERE"),
        ("data.eval.0.path", "data.eval=[{path: HERE}]"),
        ("data.cache_dir", "data.cache_dir=HERE"),
        ("data.chat_template", "data.chat_template=HERE"),
        ("train.resume", "train.resume=HERE"),
        ("parallel.plan", "parallel={plan: HERE}"),
        ("plan.costs", "plan.costs=HERE"),
        ("cluster.hardware_file", "cluster={hardware: mine, hardware_file: HERE}"),
        ("output_dir", "output_dir=HERE"),
        ("model.language_model.id", "model.language_model={id: HERE}"),
        ("model.language_model.tokenizer", "model.language_model.tokenizer=HERE"),
        ("model.encoders.vision.id", "model.encoders.vision={kind: image, id: HERE}"),
        ("model.encoders.vision.processor", "model.encoders.vision.processor=HERE"),
        ("model.lora.adapter", "model.lora={adapter: HERE}"),
        ("model.id", "model={id: HERE}"),
        ("model.tokenizer", "model={id: a/b, tokenizer: HERE}"),
        ("model.processor", "model={id: a/b, processor: HERE}"),
        ("model.generators.image.id", "model.generators.image={id: HERE}"),
        ("model.generators.image.vae", "model.generators.image={id: a/b, vae: HERE}"),
        ("model.generators.image.target.encoder", "model.generators.image={id: a/b, target: {encoder: HERE}}"),
    ],
)
def test_every_path_is_taken_from_the_file(tmp_path: Path, key: str, override: str) -> None:
    (tmp_path / "it").mkdir()
    found: object = load_config(write(tmp_path, GOOD), [override.replace("HERE", "it")]).model_dump()
    for part in key.split("."):
        found = found[int(part) if part.isdigit() else part]  # type: ignore[index]
    assert found == str(tmp_path / "it")


@pytest.mark.parametrize(("enabled", "salvage"), [(True, True), (True, False), (False, True)])
def test_gradients_are_kept_for_a_salvage_that_may_come(tmp_path: Path, enabled: bool, salvage: bool) -> None:
    path = write(tmp_path, changed(resilience={"enabled": enabled, "salvage": salvage}))
    assert load_config(path).resilience.keeps_gradients == (enabled and salvage)


def test_a_local_model_id_becomes_absolute_and_a_hub_id_stays(tmp_path: Path) -> None:
    (tmp_path / "llm").mkdir()
    tree = changed(
        model={"language_model": {"id": "llm"}, "encoders": {"vision": {"kind": "image", "id": "google/siglip-base"}}}
    )
    config = load_config(write(tmp_path, tree))
    assert config.model.language_model.id == str(tmp_path / "llm")
    assert config.model.encoders["vision"].id == "google/siglip-base"


def test_overrides_reach_nested_keys_and_list_items(tmp_path: Path) -> None:
    config = load_config(
        write(tmp_path, GOOD), ["train.optimizer.learning_rate=0.5", "data.train.0.weight=3", "train.report_to=[]"]
    )
    assert config.train.optimizer.learning_rate == 0.5
    assert config.data.train[0].weight == 3
    assert config.train.report_to == ()


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trian.steps=3", "did you mean 'train'?"),
        (
            "model.generators.image={config: {_class_name: SD3Transformer2DModel}, connector_layers: 3}",
            "are those of `connector: transformer`",
        ),
        ("train.gradient_checkpointing=true", "write 'train.recompute: block' for true"),
        ("train.optimizer.lerning_rate=1", "did you mean 'train.optimizer.learning_rate'?"),
        ("data.train.0.wieght=1", "did you mean 'data.train.0.weight'?"),
        ("model.encoders.vision.projectr=mlp", "did you mean 'model.encoders.vision.projector'?"),
        ("train.optimizer.groups.vision.lr=1", "valid keys here: learning_rate, weight_decay"),
        ("train.steps=-1", "train.steps"),
        ("train.profile.steps=5", "train.profile.steps must be a list, as in [5]"),
        ("train.profile.steps=[7, 5]", "[7, 5] must be the first and the last step, counted from 1, as in [5, 7]"),
        ("train.profile.steps=[5]", "train.profile.steps: [5] must be the first and the last step"),
        ("train.profile.step=[1, 5]", "did you mean 'train.profile.steps'?"),
        ("train={steps: 4, profile: {steps: [5, 7]}}", "'profile.steps' begin after 'steps: 4'"),
        ("train.steps=many", "(given: 'many')"),
        ("train.preferences.method=ppo", "train.preferences.method"),
        ("train.preferences={desirable_weight: 2}", "'desirable_weight' is for kto, and the method is dpo"),
        ("train.preferences={method: kto, sft_weight: 1}", "'sft_weight' is for pairs, and the method is kto"),
        ("train.preferences={gamma: 1}", "'gamma' is for simpo, and the method is dpo"),
        ("train.preferences={method: ipo, label_smoothing: 0.1}", "'label_smoothing' is for dpo and simpo"),
        ("train={preferences: {}, loss: a.b}", "train.loss: 'train.preferences' is a loss already"),
        ("train={preferences: {}, label_smoothing: 0.1}", "train.label_smoothing: pairs have 'train.preferences."),
        ("train={preferences: {}, neftune_noise_alpha: 5}", "train.neftune_noise_alpha: pairs are compared without"),
        ("data.system=''", "at least 1 character"),
        ("train.label_smoothing=1", "less than 1"),
        ("train.neftune_noise_alpha=-1", "greater than 0"),
        ("train={pref_beta: 0.1}", "write 'train.preferences.beta'"),
        ("data.train.7.weight=1", "does not exist"),
        ("train.steps", "must look like"),
        ("model.language_model.tokenizer.a=1", "'model.language_model.tokenizer' is 'bytes' and not a section"),
        ("model.language_model.id=x", "either 'id'"),
        ("model.language_model.config={hidden_size: 8}", "model_type"),
        ("train.optimizer.betas=[1.5,2]", "train.optimizer.betas.0: Input should be less than 1 (given: 1.5)"),
        ("train.optimizer.betas=[0.9,.nan]", "train.optimizer.betas.1"),
        ("train.optimizer.betas=[-0.1,0.9]", "train.optimizer.betas.0"),
        ("train.optimizer.betas=[0.9]", "train.optimizer.betas.1"),
        ("train.optimizer.learning_rate=.inf", "train.optimizer.learning_rate: Input should be a finite"),
        ("train.optimizer.learning_rate=.nan", "train.optimizer.learning_rate"),
        ("train.optimizer.learning_rate=0", "train.optimizer.learning_rate"),
        ("train.optimizer.weight_decay=.inf", "train.optimizer.weight_decay"),
        ("train.optimizer.eps=.inf", "train.optimizer.eps"),
        ("train.optimizer.groups={vision: {learning_rate: .inf}}", "groups.vision.learning_rate"),
        ("train.epochs=.inf", "train.epochs"),
        ("data.train.0.weight=.inf", "data.train.0.weight: Input should be a finite"),
        ("train.steps=yes", "train.steps: give a number, or null for none (given: True)"),
        ("seed=off", "seed: give a number (given: False)"),
        ("output_dir=${OUT:-runs}", "path '${OUT:-runs}': of what shells replace, only $NAME and ${NAME} are"),
        ("output_dir=runs/$(date)", "only $NAME and ${NAME} are"),
        ("train.schedule.final_ratio=1.5", "train.schedule.final_ratio"),
        ("seed=99999999999999999999", "seed: Input should be less than 4294967296"),
        ("seed=-1", "seed"),
        ("data.train=x.jsonl", "data.train must be a list, as in [{path: x.jsonl}]"),
        ("data.train=[x.jsonl]", "data.train.0 must be a section, as in {path: x.jsonl}"),
        ("data.train={path: x.jsonl}", "data.train must be a list, as in [{path: x.jsonl}]"),
        ("model.freeze=vision.encoder", "model.freeze must be a list, as in [vision.encoder]"),
        ("model.freeze=null", "model.freeze must be a list, as in [] for none"),
        ("train.steps=1.5e0", "train.steps"),
        ("data.train.0={prompt: What is it? }: a", "not valid YAML: "),
        ("data.train.0={prompt: [}", "in quotes of its own"),
        ("train=3", "train must be a section with keys such as steps"),
        ("parallel={units: {visoin: {}, language: {}}}", "parallel.units: 'visoin' is no unit of this model; did"),
        ("parallel={units: {language: {}}}", "parallel.units: 'vision' has no layout"),
        ("parallel={units: {language: {}}, colocated: {vision: lang}}", "parallel.colocated: 'lang' is no unit"),
        ("train.learning_rate=1", "unknown key 'train.learning_rate'; did you mean 'train.optimizer.learning_rate'?"),
        ("learning_rate=1", "did you mean 'train.optimizer.learning_rate'?"),
        ("optimizer.betas=1", "unknown key 'optimizer'; did you mean 'train.optimizer'?"),
        (
            "train.report_to=nothing",
            "Input should be 'tensorboard', 'wandb', 'trackio', 'swanlab', 'mlflow' or 'comet_ml' (given: 'nothing')",
        ),
        ("evaluation.steps=2", "name held-out data in data.eval"),
        (
            "model.encoders.more={kind: image, config: {model_type: siglip_vision_model}}",
            "'vision' and 'more' share the marker '<image>'",
        ),
    ],
)
def test_a_mistake_names_key_and_remedy(tmp_path: Path, override: str, says: str) -> None:
    with pytest.raises(UserError) as error:
        load_config(write(tmp_path, GOOD), [override])
    assert says in str(error.value)


def test_one_tracker_needs_no_list(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, GOOD), ["train.report_to=wandb"]).train.report_to == ("wandb",)


@pytest.mark.parametrize("word", ["none", "[none]", "null", "[]"])
def test_no_tracker_is_said_as_elsewhere(tmp_path: Path, word: str) -> None:
    assert load_config(write(tmp_path, GOOD), [f"train.report_to={word}"]).train.report_to == ()


def test_a_whole_number_may_be_written_with_an_exponent(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, GOOD), ["train.steps=1e3", "train.optimizer.eps=1e-6", "output_dir=1e3"])
    assert (config.train.steps, config.train.optimizer.eps) == (1000, 1e-6)
    assert config.output_dir.endswith("/1e3")


def test_all_mistakes_are_listed_together(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        load_config(write(tmp_path, changed(seeed=1, train={"stepss": 1})))
    assert "'seed'" in str(error.value)
    assert "'train.steps'" in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (":\n -", "not valid YAML"),
        ("model: [1,\n", "line 2, column 1: expected"),
        ("3", "must be a mapping"),
        ("", "must be a mapping"),
    ],
)
def test_a_file_that_is_no_config(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=says):
        load_config(path)


def test_a_wrong_item_is_not_called_a_short_list_as_well(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        load_config(write(tmp_path, changed(data={"train": [{"weight": 2}]})))
    assert str(error.value).count("\n") == 1


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load_config(tmp_path / "none.yaml")


def test_an_encoder_cannot_take_the_language_models_name(tmp_path: Path) -> None:
    tree = changed(model={**GOOD["model"], "encoders": {"language": GOOD["model"]["encoders"]["vision"]}})
    with pytest.raises(UserError, match="cannot be called 'language'"):
        load_config(write(tmp_path, tree))


def test_a_folder_named_like_a_keyword_does_not_replace_it(tmp_path: Path) -> None:
    for word in ("auto", "bytes"):
        (tmp_path / word).mkdir()
    config = load_config(write(tmp_path, GOOD))
    assert config.data.chat_template == "auto"
    assert config.model.language_model.tokenizer == "bytes"


@pytest.mark.parametrize(
    ("given", "place"), [("vision", "train.recompute:"), ({"vision": "blok"}, "train.recompute.vision:")]
)
def test_a_word_or_a_mapping_is_corrected_as_what_it_is(tmp_path: Path, given: object, place: str) -> None:
    with pytest.raises(UserError) as error:
        load_config(write(tmp_path, changed(train={"recompute": given})))
    assert str(error.value).splitlines()[1:] == [
        f"  - {place} Input should be 'none', 'block', 'block_keep_attention' or 'block_offload' (given: "
        f"{given if isinstance(given, str) else 'blok'!r})"
    ]


@pytest.mark.parametrize(
    "text", ["a: " + "[" * 1000, "a: " + "9" * 5000, "a: 2001-99-99", "a: !!bool x", "a: !!int ''"]
)
def test_what_the_parser_fails_at_in_its_own_ways_is_no_yaml(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UserError, match="is not valid YAML"):
        load_config(tmp_path / "c.yaml")
    with pytest.raises(UserError, match="is not valid YAML"):
        load_config(write(tmp_path, GOOD), [f"seed={text[3:]}"])
    with pytest.raises(UserError, match="is not a cost model"):
        CostModel.from_yaml(text)
    with pytest.raises(UserError, match="is not YAML"):
        read_hardware_file(text, "hardware.yaml")


def test_answers_to_keys_of_other_tools_name_keys_that_there_are() -> None:
    for key, answer in CALLED_HERE.items():
        for named in re.findall(r"'([a-z_]+(?:\.[A-Za-z0-9_]+)+)", answer):
            *parents, last = named.split(".")
            if "UNIT" not in parents:
                assert last in _keys_at(parents), (key, named)
    assert "timeout_seconds" in CALLED_HERE["ddp_timeout"]
    assert "always packed" in CALLED_HERE["packing"]
    for mine in ("val_size", "max_samples", "truncation", "keep_best", "patience", "metrics", "ema"):
        assert mine not in CALLED_HERE


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.val_size=0", "greater than 0"),
        ("data.val_size=2.5", "a share below 1 or a whole number of samples (given: 2.5)"),
        ("data.max_samples=0", "greater than 0"),
        ("data.truncation=left", "'error' or 'right'"),
        ("evaluation.metrics=[bleu]", "'metrics' has 'bleu'; there are exact_match, anls, wer, and yours as module"),
        ("evaluation.metrics=[wer,wer]", "names one of them twice"),
        ("evaluation={keep_best: anls, steps: 1}", "'keep_best' is 'anls'; give one of loss, exact_match"),
        ("evaluation={keep_best: loss}", "'keep_best' needs 'steps'"),
        ("evaluation={patience: 2, steps: 1}", "'patience' is about 'keep_best'"),
        ("evaluation={metrics: ['a:b'], keep_best: 'a:b', steps: 1}", "say 'mode: max' or 'mode: min'"),
        ("evaluation={keep_best: loss, steps: 1}", "there is nothing to evaluate on"),
        ("train.optimizer.ema=1", "less than 1"),
        ("train.load_best_model_at_end=true", "write 'evaluation.keep_best: loss'"),
        ("train.early_stopping_patience=3", "'evaluation.patience'"),
        ("data.split_dataset_ratio=0.1", "write 'data.val_size'"),
    ],
)
def test_keys_of_judging_are_refused_by_their_reasons(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(write(tmp_path, GOOD), [override])
    assert message in str(caught.value)


def test_microbatches_by_tokens_fit_into_rows(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    assert load_config(path, ["plan.microbatch_tokens=[]"]).plan.microbatch_tokens == ()
    with pytest.raises(UserError, match="'microbatch_tokens' must list numbers from 1 on"):
        load_config(path, ["plan.microbatch_tokens=[0]"])
    with pytest.raises(UserError, match=r"plan.microbatch_tokens: 4096 are more than the 1024 that 'train.row_tokens'"):
        load_config(path, ["plan.microbatch_tokens=[512,4096]", "train.row_tokens=1024"])
    full = load_config(path, ["plan.microbatch_tokens=[512,1024]", "train.row_tokens=1024"])
    assert full.plan.microbatch_tokens == (512, 1024)


GROUP = {"name": "fast", "hardware": "H100", "gpus_per_node": 2}


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        ({"nodes": 2, "groups": [GROUP]}, "'groups' and 'nodes' are both given"),
        ({"hardware": "A40", "memory_gib": 8, "groups": [GROUP]}, "'groups' and 'hardware', 'memory_gib' are both"),
        ({"groups": [GROUP, GROUP]}, "'groups' has 'fast' more than once"),
        ({"groups": [{**GROUP, "nodes": 10**6}]}, "at most 131,072 devices, and these are 2,000,000"),
        ({"nodes": 10**9}, "at most 131,072 devices"),
        ({"gpus_per_node": 10**9}, "at most 131,072 devices"),
        ({"groups": []}, "cluster.groups"),
        ({"groups": [{"name": "fast", "hardware": "H100"}]}, "gpus_per_node"),
        ({"groups": [{**GROUP, "gpu": "H100"}]}, "gpu"),
        ({"groups": [{**GROUP, "memory_gib": 0}]}, "memory_gib"),
    ],
)
def test_invalid_cluster_groups_and_sizes_are_refused(tmp_path: Path, cluster: dict, expected: str) -> None:
    with pytest.raises(UserError) as found:
        load_config(write(tmp_path, changed(cluster=cluster)))
    assert expected in str(found.value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("train.shard=weights", "train.zero=none"), "'zero: none' has none; write 'zero: node' or 'all'"),
        (("train.shard={language: gradients}", "train.deterministic=true"), "'deterministic' sums the whole"),
        (("train.shard=all",), "train.shard"),
    ],
)
def test_shards_that_no_run_can_keep_are_refused(tmp_path: Path, given: tuple[str, ...], expected: str) -> None:
    with pytest.raises(UserError) as found:
        load_config(write(tmp_path, GOOD), given)
    assert expected in str(found.value)
    load_config(write(tmp_path, GOOD), ("train.shard=none", "train.deterministic=true"))


def test_media_masks_are_named_by_encoder(tmp_path: Path) -> None:
    def masks(**language: Any) -> Any:
        language = {**GOOD["model"]["language_model"], **language}
        return load_config(write(tmp_path, changed(model={**GOOD["model"], "language_model": language})))

    text = masks(media_attention={"vision": "modality"}).model.text
    assert (text.media_attention, text.needs_plans) == ({"vision": "modality"}, True)
    assert not masks(media_attention={"vision": "causal"}).model.text.needs_plans
    for said, message in (
        ({"media_attention": {"audio": "causal"}}, "names 'audio'; the encoders are vision"),
        ({"media_attention": {"vision": "all"}}, "media_attention"),
        ({"media_attention": {"vision": "embedded"}, "attn_implementation": "sdpa"}, "needs attn_implementation"),
    ):
        with pytest.raises(UserError, match=message):
            masks(**said)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.train_on=all", "data.train_on: preferences are about answers"),
        ("data.truncation=right", "data.truncation: pairs are not cut"),
        ("evaluation={metrics: [anls]}", "evaluation.metrics: pairs are judged without writing answers"),
        ("evaluation={keep_best: exact_match, steps: 1}", "evaluation.keep_best: of pairs, only 'loss' is known"),
        (
            "model.generators.image={config: {_class_name: SD3Transformer2DModel}}",
            "model.generators.image: pictures have no log-probabilities",
        ),
    ],
)
def test_keys_that_pairs_have_no_use_for_are_refused(tmp_path: Path, override: str, says: str) -> None:
    path = write(tmp_path, changed(train={"preferences": {}}))
    with pytest.raises(UserError, match=re.escape(says)):
        load_config(path, ["data.val_size=2", override])


def test_kto_repeats_steps_whole(tmp_path: Path) -> None:
    path = write(tmp_path, changed(train={"preferences": {"method": "kto"}}))
    with pytest.raises(UserError, match=r"resilience\.salvage: all samples decide the loss of kto, .* set it to false"):
        load_config(path, ["resilience.enabled=true"])
    assert not load_config(path, ["resilience={enabled: true, salvage: false}"]).resilience.keeps_gradients


def test_a_date_needs_no_quotation_marks(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, GOOD), ["data.template_date=2026-01-02"])
    assert config.data.template_date == "2026-01-02"
