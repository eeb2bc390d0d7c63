"""What has no caches that could be int8 is refused in the plan, in words; and so by the stage."""

import json
import re

import pytest

from smelt.core.errors import InputError
from smelt.core.messages import message_codes
from smelt.export.graphs.attention import attention_modules
from smelt.export.graphs.decoder_only import unfused_heads_warning
from smelt.export.onnx_stage import Onnx
from smelt.export.settings import OnnxSettings, unsupported_head_dim, unsupported_model, unsupported_task
from tests.support import harness
from tests.support.expected_errors import raises_code, raises_setting_codes
from tests.support.graphs import graph_exports
from tests.support.models import causal, family_models, tiny

INT8 = OnnxSettings(kv_cache="int8")
TARGETS = ("ort-cuda", "tensorrt", "openvino", "ort-tensorrt")


@pytest.mark.parametrize("target", TARGETS)
def test_unsupported_targets_are_rejected(target):
    with raises_setting_codes("unused-setting"):
        OnnxSettings(target=target, kv_cache="int8")


@pytest.mark.quick
@pytest.mark.parametrize(("width", "rotary", "fits"), [(8, False, True), (8, True, False), (48, True, True)])
def test_supported_head_sizes_equal_operator_limits(width, rotary, fits):
    reason = unsupported_head_dim(width, width if rotary else 0)
    assert (reason is None) == fits
    assert fits or re.findall(r"\d+", reason.partition("GroupQueryAttention")[2]) == [
        "16",
        "32",
        "48",
        str(width),
    ]


@pytest.mark.parametrize(("config", "fits"), [
    ({"model_type": "llama", "head_dim": 24, "hidden_size": 64, "num_attention_heads": 4}, False),
    ({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}, True),
    ({"model_type": "llama", "hidden_size": 96, "num_attention_heads": 4, "head_dim": None}, False),
    ({"model_type": "gpt2", "n_embd": 36, "n_head": 3}, True),  # which the stage looks at
    ({"model_type": "bert", "hidden_size": 36, "num_attention_heads": 3}, True),  # its task is refused
    ({"model_type": "unheard of"}, True),
])  # fmt: skip
def test_head_size_is_read_from_config(config, fits):
    assert (unsupported_model(config) is None) == fits


def plan(folder, stages, task="language-modeling", data="{train: t.txt, test: t.txt}", code=2):
    (folder / "r.yaml").write_text(f"model: m\ntask: {task}\ndata: {data}\nstages: {stages}\n")
    return " ".join(harness.smelt("plan", folder / "r.yaml", code=code).output.split())


def test_plan_accepts_int8_cache_with_calibration_data(tmp_path):
    assert Onnx.needs_with(OnnxSettings(), ["train"]) == frozenset()
    assert Onnx.needs_with(INT8, ["train"]) == {"train"}
    assert Onnx.needs_with(INT8, ["train", "calibration"]) == {"calibration"}
    causal.write_model(tmp_path / "m", "llama")
    causal.write_lines(tmp_path / "t.txt", 2)
    plan(tmp_path, "[onnx: {kv_cache: int8}]", code=0)
    output = plan(tmp_path, "[onnx: {kv_cache: int8}]", data="{test: t.txt}")
    assert "onnx needs calibration or train data" in output
    output = plan(tmp_path, "[onnx: {kv_cache: int8, target: tensorrt}]")
    assert all(value in output for value in ("error[unused-setting]", "tensorrt", "kv_cache: float"))
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"head_dim": 12}))
    output = plan(tmp_path, "[onnx: {kv_cache: int8}]")
    assert "stages[0].onnx.kv_cache" in output
    assert all(value in output for value in (" 12.", "kv_cache: float"))


@pytest.mark.parametrize("make", ["marian", "bert"])
def test_plan_rejects_models_without_supported_caches(tmp_path, make):
    getattr(tiny, f"write_{make}")(tmp_path / "m")
    task = {"marian": "translation", "bert": "text-classification"}[make]
    data_file = (
        tiny.write_labeled(tmp_path / "d.jsonl", 6)
        if make == "bert"
        else tiny.write_pairs(tmp_path / "d.jsonl", 6)
    )
    data = f"{{train: {data_file.name}, test: {data_file.name}}}"
    output = plan(tmp_path, "[onnx: {kv_cache: int8}]", task, data)
    assert output.count("kv_cache") >= 1
    assert "error[unsupported-task]" in output
    assert all(value in output for value in ("language-modeling", f" {task}."))


@pytest.mark.parametrize(
    ("family", "config", "code"),
    [("gpt2", {"n_embd": 36, "n_head": 3}, "unsupported-cache"), ("llama", {}, "no-calibration-data")],
)
def test_stage_rejects_unsupported_model_unknown_to_plan(family, config, code, tmp_path):
    folder = causal.write_model(tmp_path / "m", family, **config)
    ctx = harness.make_context(tmp_path / "out", "language-modeling")
    with raises_code(code, InputError):
        Onnx()(tiny.as_artifact(folder, "language-modeling"), INT8, ctx)
    assert not list(ctx.out.glob("*.onnx"))


def test_stage_rejects_unsupported_tasks(tmp_path):
    source = graph_exports.FAMILIES["bert"][0](tmp_path / "m")
    ctx = graph_exports.make_context(tmp_path / "out", "text-classification")
    assert unsupported_task("text-classification")
    with raises_code("unsupported-task", InputError):
        Onnx()(tiny.as_artifact(source, "text-classification"), INT8, ctx)


@pytest.mark.parametrize(("fraction", "codes"), [(0.5, []), (0.25, ["attention-not-fused"])])
def test_rotated_part_of_a_head_decides_whether_attention_is_fused(fraction, codes):
    """Heads of 32 channels, of which 16 or 8 are rotated."""
    model = family_models.load("gpt_neox", rotary_pct=fraction)
    message = unfused_heads_warning(attention_modules(model), "ort-cpu")
    assert message_codes([message] if message else []) == codes
