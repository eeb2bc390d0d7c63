"""An adapter of peft as a model equals peft's own merge, and what cannot be merged is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from smelt.core.errors import InputError
from smelt.core.messages import message_codes
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
        ({"base_model_name_or_path": "a/b", "revision": "v1"}, "base-model-revision"),
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

    def download(model: str, allow_patterns: list[str]) -> str:
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


@pytest.mark.parametrize("problem", ["it fails.", "it fails.."])
def test_problem_of_a_mismatch_ends_with_one_full_stop(tmp_path: Path, problem: str) -> None:
    base = tiny.write_bert(tmp_path / "base")
    folder = write_adapter(tmp_path / "adapter", base, "AutoModelForSequenceClassification", **CLASSIFIER)
    text = str(_mismatch(read_adapter(folder), base, problem))
    assert text.replace("[...]", "").count("..") == 0


def test_adapter_is_planned_inspected_run_and_teaches(tmp_path: Path) -> None:
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
    harness.smelt("init", tmp_path / "adapter", "--out", tmp_path / "new.yaml", code=0)
    arguments = ("--store", tmp_path / "store", "--out", tmp_path / "out")
    result = harness.smelt("run", recipe, *arguments, code=0)
    assert result.error is None
    portable = tmp_path / "elsewhere.yaml"
    portable.write_text(plan.portable_recipe())
    assert str(tmp_path / "adapter") in portable.read_text()
    assert load_plan(portable).local_model == plan.local_model
