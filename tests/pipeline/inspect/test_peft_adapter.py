"""An adapter of peft as a model equals peft's own merge, and what cannot be merged is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from smelt.core.errors import InputError
from smelt.core.messages import message_codes
from smelt.data.labels import class_names
from smelt.models.checkpoint import load_model
from smelt.pipeline.inspect.find_model import fetch_model, local_model_folder
from smelt.pipeline.inspect.model_info import inspect_model
from smelt.pipeline.inspect.peft_adapter import ADAPTER_CONFIG, _mismatch, read_adapter
from smelt.pipeline.plan.load_plan import load_plan
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import causal, tiny

peft = pytest.importorskip("peft", reason="peft (the extra lora) is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of peft
CLASSIFIER: dict[str, Any] = {
    "task_type": "SEQ_CLS", "modules_to_save": ["classifier"], "target_modules": ["query", "value"],
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Merge into a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_adapter(folder: Path, base: Path, auto_class: str, labels: int | None = None, **lora: Any) -> Path:
    """Write an adapter of the model in `base` with random weights, as peft saves a trained one."""
    sizes = {} if labels is None else {"num_labels": labels}
    model = getattr(transformers, auto_class).from_pretrained(base, **sizes)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=6, **lora))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                scale = 1 + 0.2 * torch.rand_like(parameter) if "magnitude" in name else None
                parameter.copy_(0.2 * torch.randn_like(parameter) if scale is None else scale * parameter)
    adapted.save_pretrained(folder)
    return folder


def merged_by_peft(folder: Path, base: Path, auto_class: str, labels: int | None = None) -> Any:
    """Return the model as a user of transformers and peft reads it."""
    sizes = {} if labels is None else {"num_labels": labels}
    model = getattr(transformers, auto_class).from_pretrained(base, **sizes)
    return peft.PeftModel.from_pretrained(model, folder).merge_and_unload().eval()


@pytest.mark.parametrize(
    "variant", [{}, {"use_rslora": True}, {"use_dora": True}], ids=["lora", "rs", "dora"]
)
def test_merged_classifier_equals_peft(tmp_path: Path, variant: dict[str, Any]) -> None:
    base = tiny.write_bert(tmp_path / "base")
    kind = "AutoModelForSequenceClassification"
    folder = write_adapter(tmp_path / "adapter", base, kind, **CLASSIFIER, **variant)
    merged = fetch_model("adapter", tmp_path, "text-classification")
    model, _ = load_model(merged)
    expected = harness.logits(merged_by_peft(folder, base, kind))
    torch.testing.assert_close(harness.logits(model), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(expected, harness.logits(load_model(base)[0]), atol=1e-2)
    assert fetch_model("adapter", tmp_path, "text-classification") == merged


def test_head_of_the_adapter_is_added_to_a_base_without_one(tmp_path: Path) -> None:
    base, kind = tiny.write_bert(tmp_path / "classifier"), "AutoModelForSequenceClassification"
    encoder = tmp_path / "base"
    transformers.AutoModelForMaskedLM.from_pretrained(base).save_pretrained(encoder)
    for name in ("vocab.txt", "tokenizer_config.json"):
        (encoder / name).write_bytes((base / name).read_bytes())
    saved = CLASSIFIER | {"modules_to_save": ["classifier", "pooler"]}
    folder = write_adapter(tmp_path / "adapter", encoder, kind, labels=3, **saved)
    model, _ = load_model(fetch_model("adapter", tmp_path, "text-classification"))
    expected = harness.logits(merged_by_peft(folder, encoder, kind, labels=3))
    torch.testing.assert_close(harness.logits(model), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("family", "target"), [("gpt2", "c_attn"), ("llama", "q_proj")])
def test_merged_language_model_equals_peft(tmp_path: Path, family: str, target: str) -> None:
    """GPT-2 stores its matrices transposed."""
    base = causal.write_model(tmp_path / "base", family)
    kind = "AutoModelForCausalLM"
    folder = write_adapter(
        tmp_path / "adapter",
        base,
        kind,
        task_type="CAUSAL_LM",
        target_modules=[target],
        fan_in_fan_out=family == "gpt2",
    )
    model, _ = load_model(fetch_model("adapter", tmp_path, "language-modeling"))
    expected = harness.logits(merged_by_peft(folder, base, kind))
    torch.testing.assert_close(harness.logits(model), expected, rtol=1e-4, atol=1e-4)


def test_changed_adapter_is_merged_again(tmp_path: Path) -> None:
    base = tiny.write_bert(tmp_path / "base")
    folder = write_adapter(tmp_path / "adapter", base, "AutoModelForSequenceClassification", **CLASSIFIER)
    first = local_model_folder("adapter", tmp_path)
    write_config(folder, lora_alpha=60)
    second = local_model_folder("adapter", tmp_path)
    assert first is not None
    assert second not in (None, first)
    assert not torch.equal(*(harness.logits(load_model(path)[0]) for path in (first, second)))


def write_config(folder: Path, **changes: Any) -> None:
    """Change fields of an adapter's config."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"peft_type": "PREFIX_TUNING"}, "unsupported-adapter"),
        ({"layer_replication": [[0, 1], [0, 1]]}, "unsupported-adapter"),
        ({"megatron_config": {"a": 1}, "megatron_core": "os"}, "unsupported-adapter"),
        ({"base_model_name_or_path": None}, "missing-base-model"),
        ({"base_model_name_or_path": "/nowhere/base"}, "missing-base-model"),
        ({"r": 8}, "adapter-mismatch"),
        ({"target_modules": ["query", "key", "value"]}, "adapter-mismatch"),
        ({"target_modules": ["query"]}, "adapter-mismatch"),
        ({"r": None}, "damaged-file"),
    ],
)
def test_adapters_that_cannot_be_merged_are_refused(
    tmp_path: Path, changes: dict[str, Any], code: str
) -> None:
    base = tiny.write_bert(tmp_path / "base")
    folder = write_adapter(tmp_path / "adapter", base, "AutoModelForSequenceClassification", **CLASSIFIER)
    write_config(folder, **changes)
    with raises_code(code, InputError):
        local_model_folder("adapter", tmp_path)


def test_base_of_other_shapes_missing_head_and_two_models_are_refused(tmp_path: Path) -> None:
    base, kind = tiny.write_bert(tmp_path / "base"), "AutoModelForSequenceClassification"
    folder = write_adapter(tmp_path / "adapter", base, kind, **CLASSIFIER)
    wide = tiny.write_bert(tmp_path / "wide", hidden_size=64)
    write_config(folder, base_model_name_or_path=str(wide))
    with raises_code("adapter-mismatch", InputError) as caught:
        local_model_folder("adapter", tmp_path)
    shown, cause = str(caught.value), str(caught.value.__cause__)
    assert len(shown) < len(cause)  # peft names each matrix
    assert shown.partition(" [...]")[0].split()[-1] in cause.split()  # cut between words
    encoder = tmp_path / "encoder"
    transformers.AutoModelForMaskedLM.from_pretrained(base).save_pretrained(encoder)
    for name in ("vocab.txt", "tokenizer_config.json"):
        (encoder / name).write_bytes((base / name).read_bytes())
    write_config(folder, base_model_name_or_path=str(encoder))
    with raises_code("missing-head", InputError):
        local_model_folder("adapter", tmp_path)
    (folder / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes())
    with raises_code("model-and-adapter", InputError):
        local_model_folder("adapter", tmp_path)


def test_hub_base_is_downloaded_by_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    base = tiny.write_bert(tmp_path / "base")
    folder = write_adapter(tmp_path / "adapter", base, "AutoModelForSequenceClassification", **CLASSIFIER)
    write_config(folder, base_model_name_or_path="a/b")
    calls: list[bool] = []

    def download(model: str, **_: Any) -> str:
        from huggingface_hub import constants

        calls.append(bool(constants.HF_HUB_OFFLINE))
        if len(calls) < 3:
            raise OSError("not cached")
        return str(base)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert local_model_folder("adapter", tmp_path) is None
    monkeypatch.setattr("smelt.pipeline.inspect.find_model.hub_unreachable_reason", lambda: None)
    assert (fetch_model("adapter", tmp_path, "text-classification") / "model.safetensors").is_file()
    assert calls[0]


def test_error_of_a_hub_base_that_is_not_there_names_the_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny.write_bert(tmp_path / "base")
    folder = write_adapter(tmp_path / "adapter", base, "AutoModelForSequenceClassification", **CLASSIFIER)
    write_config(folder, base_model_name_or_path="nobody/nothing")
    reason = "the hub is not used"
    monkeypatch.setattr("smelt.pipeline.inspect.find_model.hub_unreachable_reason", lambda: reason)
    with raises_code("not-in-hub-cache", InputError) as caught:
        fetch_model("adapter", tmp_path, None)
    assert caught.value.file == str(folder / ADAPTER_CONFIG)
    assert str(folder) in str(caught.value)


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, without a connection."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def cache_repository(hub_cache: Path, name: str, folder: Path, revision: str = "main") -> Path:
    """Move `folder` into the hub's cache, as its client stores a repository; return the snapshot."""
    repository = hub_cache / f"models--{name.replace('/', '--')}"
    commit = revision.encode().hex().rjust(40, "0")
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / revision).write_text(commit)
    (repository / "snapshots").mkdir(exist_ok=True)
    return folder.rename(repository / "snapshots" / commit)


def cache_adapter(tmp_path: Path, hub_cache: Path, **changes: Any) -> tuple[Path, Path]:
    """Put the adapter `user/adapter` and its base `org/base` into the hub's cache; return their snapshots."""
    base = tiny.write_bert(tmp_path / "base")
    folder = write_adapter(tmp_path / "adapter", base, "AutoModelForSequenceClassification", **CLASSIFIER)
    write_config(folder, base_model_name_or_path="org/base", **changes)
    snapshot = cache_repository(hub_cache, "user/adapter", folder)
    return snapshot, cache_repository(hub_cache, "org/base", base, str(changes.get("revision") or "main"))


def test_hub_adapter_is_inspected_planned_and_run(
    tmp_path: Path, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot, base = cache_adapter(tmp_path, hub_cache)
    monkeypatch.chdir(tmp_path)
    for name in ("train", "test"):
        tiny.write_labeled(tmp_path / f"{name}.jsonl")
    assert inspect_model("user/adapter").parameters == inspect_model(str(base)).parameters
    data = ("--data", "test.jsonl")
    harness.smelt("init", "user/adapter", *data, "--out", tmp_path / "new.yaml", code=0)
    assert "from-the-hub" in message_codes(load_plan(tmp_path / "new.yaml").notes)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: user/adapter\ntask: text-classification\ndata: {train: train.jsonl, test: test.jsonl}\n"
        "stages:\n  - finetune: {max_steps: 1}\nscore: {quality: [accuracy], latency: false}\n"
    )
    result = harness.smelt("run", recipe, "--store", tmp_path / "store", "--out", tmp_path / "out", code=0)
    assert result.error is None
    model, _ = load_model(fetch_model("user/adapter", tmp_path, "text-classification"))
    expected = harness.logits(merged_by_peft(snapshot, base, "AutoModelForSequenceClassification"))
    torch.testing.assert_close(harness.logits(model), expected, rtol=1e-5, atol=1e-5)


def test_revision_of_the_adapter_selects_the_base(tmp_path: Path, hub_cache: Path) -> None:
    snapshot, base = cache_adapter(tmp_path, hub_cache, revision="v1")
    other = tiny.write_bert(tmp_path / "other")
    weights = transformers.AutoModelForSequenceClassification.from_pretrained(other)
    with torch.no_grad():
        weights.bert.embeddings.word_embeddings.weight.mul_(2)
    weights.save_pretrained(other)
    cache_repository(hub_cache, "org/base", other)
    model, _ = load_model(fetch_model("user/adapter", tmp_path, "text-classification"))
    expected = harness.logits(merged_by_peft(snapshot, base, "AutoModelForSequenceClassification"))
    torch.testing.assert_close(harness.logits(model), expected, rtol=1e-5, atol=1e-5)


def test_inspecting_a_hub_adapter_reads_only_the_config_of_its_base(tmp_path: Path, hub_cache: Path) -> None:
    """The head and its number of labels are the adapter's; `smelt init` asks for no weights."""
    _, base = cache_adapter(tmp_path, hub_cache)
    merged = inspect_model("user/adapter", base=tmp_path)
    (base / "model.safetensors").unlink()
    config = json.loads((base / "config.json").read_text())
    encoder = {"architectures": ["BertModel"], "id2label": None}
    (base / "config.json").write_text(json.dumps(config | encoder))
    info = inspect_model("user/adapter", base=tmp_path)
    assert info.folder is None
    assert info.parameters is None
    assert (info.task, info.needs_classifier) == ("text-classification", False)
    assert info.config["architectures"] == merged.config["architectures"]
    assert class_names(info.config) == class_names(merged.config)


@pytest.mark.parametrize("has_config", [False, True])
def test_error_of_a_hub_adapter_names_its_missing_base(
    tmp_path: Path, hub_cache: Path, has_config: bool
) -> None:
    _, base = cache_adapter(tmp_path, hub_cache)
    if has_config:
        (base / "model.safetensors").unlink()
    else:
        base.rename(tmp_path / "gone")
    asks = [lambda: fetch_model("user/adapter", tmp_path, None)]
    asks += [] if has_config else [lambda: inspect_model("user/adapter", base=tmp_path)]
    for ask in asks:
        with raises_code("not-in-hub-cache", InputError) as caught:
            ask()
        assert all(name in str(caught.value) for name in ("user/adapter", "org/base", "HF_HUB_OFFLINE"))


def test_hub_adapter_without_its_weights_is_not_in_the_cache(tmp_path: Path, hub_cache: Path) -> None:
    snapshot, _ = cache_adapter(tmp_path, hub_cache)
    (snapshot / "adapter_model.safetensors").unlink()
    with raises_code("not-in-hub-cache", InputError) as caught:
        fetch_model("user/adapter", tmp_path, None)
    assert "user/adapter" in str(caught.value)
    (snapshot / ADAPTER_CONFIG).unlink()
    with raises_code("not-in-hub-cache", InputError):
        inspect_model("user/adapter", base=tmp_path)


def test_files_fetched_of_an_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    base = tiny.write_bert(tmp_path / "base")
    folder = write_adapter(tmp_path / "adapter", base, "AutoModelForSequenceClassification", **CLASSIFIER)
    wanted = [ADAPTER_CONFIG, "adapter_model.safetensors", "tokenizer.json", "vocab.txt"]
    wanted += ["tokenizer.model", "chat_template.jinja", "added_tokens.json"]
    others = ["adapter_model.bin", "training_args.bin", "checkpoint-9/adapter_model.safetensors", "a.py"]
    fetched: list[str] = []

    def download(model: str, allow_patterns: list[str], ignore_patterns: list[str], **_: Any) -> str:
        fetched.extend(
            filter_repo_objects(
                [*wanted, *others], allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
            )
        )
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr("smelt.pipeline.inspect.find_model.hub_unreachable_reason", lambda: None)
    fetch_model("user/adapter", tmp_path, "text-classification")
    assert fetched == wanted


@pytest.mark.parametrize(("source", "with_head"), [
    ("adapter", True), ("adapter", False), ("base", False), (None, False),
])  # fmt: skip
def test_labels_are_read_from_the_adapter_or_its_base(
    tmp_path: Path, source: str | None, with_head: bool
) -> None:
    base, kind = tiny.write_bert(tmp_path / "base"), "AutoModelForSequenceClassification"
    if not with_head:
        transformers.AutoModelForMaskedLM.from_pretrained(base).save_pretrained(base)
    saved = CLASSIFIER | {"modules_to_save": ["classifier", "pooler"]}
    write_adapter(tmp_path / "adapter", base, kind, labels=2, **saved)
    for name in ("base", "adapter"):
        path = tmp_path / name / "config.json"
        config = json.loads((base / "config.json").read_text()) | {"id2label": None, "label2id": None}
        if name == source:
            config |= {"id2label": {"0": "ham", "1": "spam"}, "label2id": {"ham": 0, "spam": 1}}
        path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    config = load_model(fetch_model("adapter", tmp_path, "text-classification"))[0].config
    names = ["LABEL_0", "LABEL_1"] if source is None else ["ham", "spam"]
    assert config.id2label == dict(enumerate(names))
    assert config.label2id == {name: i for i, name in enumerate(names)}


@pytest.mark.parametrize("problem", ["it fails.", "it fails.."])
def test_problem_of_a_mismatch_ends_with_one_full_stop(tmp_path: Path, problem: str) -> None:
    base = tiny.write_bert(tmp_path / "base")
    folder = write_adapter(tmp_path / "adapter", base, "AutoModelForSequenceClassification", **CLASSIFIER)
    text = str(_mismatch(read_adapter(folder), base, problem))
    assert text.replace("[...]", "").count("..") == 0


def test_adapter_is_planned_inspected_run_and_teaches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny.write_bert(tmp_path / "base")
    write_adapter(tmp_path / "adapter", base, "AutoModelForSequenceClassification", **CLASSIFIER)
    for name in ("train", "test"):
        tiny.write_labeled(tmp_path / f"{name}.jsonl")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: adapter\ntask: text-classification\ndata: {train: train.jsonl, test: test.jsonl}\n"
        "stages:\n  - distill: {teacher: {model: adapter}, max_steps: 1, student: {layers: 1}}\n"
        "score: {quality: [accuracy], latency: false}\n"
    )
    plan = load_plan(recipe)
    assert "peft-adapter" in message_codes(plan.notes)
    assert (
        inspect_model("adapter", base=tmp_path).parameters == inspect_model("base", base=tmp_path).parameters
    )
    monkeypatch.chdir(tmp_path)
    harness.smelt("init", "adapter", "--out", tmp_path / "new.yaml", code=0)
    assert yaml.safe_load((tmp_path / "new.yaml").read_text())["model"] == "adapter"
    arguments = ("--store", tmp_path / "store", "--out", tmp_path / "out")
    result = harness.smelt("run", recipe, *arguments, code=0)
    assert result.error is None
    portable = tmp_path / "elsewhere.yaml"
    portable.write_text(plan.portable_recipe())
    assert str(tmp_path / "adapter") in portable.read_text()
    assert load_plan(portable).local_model == plan.local_model
