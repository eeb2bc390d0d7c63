"""Whole recipes of images: trained, cut, coded, exported, asked; what a family cannot do is refused."""

import json
from pathlib import Path

import pytest
from PIL import Image

import smelt
from smelt.core.errors import InputError
from tests.support import harness
from tests.support.expected_errors import command_error, message_locations, raises_code
from tests.support.models import images
from tests.support.processes import forked_workers

TRAIN = "max_steps: 2, batch_size: 4, num_evals: 1, precision: fp32"
CUT = [
    "drop-layers: {layers: 1, calibration_samples: 4}",
    "prune: {targets: [heads, ffn], keep_ratio: 0.5, calibration_samples: 4}",
    f"distill: {{{TRAIN}}}",
    "factorize: {rank: 6, optimize_for: size, calibration_samples: 4}",
]


def recipe(folder: Path, stages: list[str], family: str = "vit", score: str = "latency: false") -> Path:
    images.write_model(folder / "model", family)
    images.write_rows(folder / "train.jsonl")
    images.write_class_folders(folder / "test")
    path = folder / "recipe.yaml"
    path.write_text(
        f'model: "model"\ntask: {images.TASK}\nthreads: 1\nscore: {{{score}}}\n'
        "data: {train: train.jsonl, validation: train.jsonl, test: ./test}\n"
        "stages:\n" + "".join(f"  - {line}\n" for line in stages)
    )
    return path


def finished(path: Path) -> dict:
    result = smelt.run(path, out=path.parent / "run")
    steps = result.report["steps"]
    assert [s["status"] for s in steps] == ["done"] * len(steps), [s["error"] for s in steps]
    return {step["name"]: step for step in steps}


def test_vision_transformer_is_pruned_quantized_and_exported(tmp_path):
    quantize_stage = "quantize: {scheme: int8-dynamic}"
    steps = finished(recipe(tmp_path, [*CUT, quantize_stage, "onnx: {target: ort-cpu}"]))
    sizes = [steps[name]["parameters"] for name in ("model", "drop-layers", "prune", "distill", "factorize")]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 2 * sizes[-1]
    last = steps["onnx"]
    assert {"accuracy", "f1"} <= set(last["quality"])
    assert last["details"]["parity"]["model"]["operators"] > 4
    folder, picture = tmp_path / "run" / last["artifact"], tmp_path / "test" / "light" / "1.png"
    with smelt.load(folder) as model:
        predictions = model.classify([picture, Image.open(picture)])
        assert predictions[0].label in images.LABELS
        assert predictions[0].probabilities == pytest.approx(dict(predictions[1].probabilities))
        with raises_code("does-not-fit-task", InputError):
            model.predict(["text"])
    line = json.loads(harness.smelt("predict", folder, picture, "--json", code=0).output)
    assert line["image"] == str(picture)
    assert line["label"] == predictions[0].label
    harness.smelt("predict", folder, tmp_path / "nothing.png", code=2)
    harness.smelt("package", folder, "--out", tmp_path / "package", code=0)


def test_resnet_is_trained_and_exported(tmp_path):  # ort-cpu and openvino: test_matrix.py
    path = recipe(tmp_path, [f"finetune: {{{TRAIN}}}", "onnx: {target: tensorrt, dtype: fp16}"], "resnet")
    onnx = finished(path)["onnx"]
    # batch norms are part of the convolutions before them
    assert "BatchNormalization" not in onnx["details"]["graphs"]["model"]["operators"]
    assert onnx["details"]["graphs"]["model"]["operators"]["Conv"] == 6
    checked = harness.smelt("tensorrt-check", "--json", tmp_path / "run" / onnx["artifact"]).output
    assert [graph["problems"] for graph in json.loads(checked)] == [[]]


def test_untrained_image_model_learns_and_records_image_size(tmp_path, monkeypatch):
    forked_workers.install(monkeypatch)
    path = recipe(
        tmp_path,
        [f"finetune: {{{TRAIN}}}"],
        score="latency: {batch_sizes: [1], texts: 2, rounds: 3, seconds: 1}",
    )
    config = tmp_path / "small.json"
    config.write_text(json.dumps({"model_type": "resnet"} | images.CONFIGS["resnet"]))
    text = path.read_text()
    path.write_text(text.replace('model: "model"', "model: {config: small.json}"))
    error = command_error(harness.smelt("plan", path, code=2))
    assert message_locations(error.messages) == [("missing-setting", "model.image_size", 1)]
    path.write_text(text.replace('model: "model"', "model: {config: small.json, image_size: 16}"))
    steps = finished(path)
    row = steps["finetune"]["latency"][0]
    assert row["unit"] == "images/s"
    assert row["parts"]["tokenizing_ms"] > 0


REFUSED = pytest.mark.parametrize(
    ("stage", "code", "setting"),
    [
        ("prune: {}", "does-not-fit-model", "prune.targets"),
        ("drop-layers: {}", "does-not-fit-model", "drop-layers"),
        ("share-weights: {}", "does-not-fit-model", "share-weights"),
        ("sparsify: {}", "does-not-fit-model", "sparsify"),
        ("quantize: {scheme: int8-dynamic}", "unsupported-scheme", "quantize.scheme"),
        (
            "quantize: {scheme: int8-static, smoothquant_alpha: 0.5}",
            "does-not-fit-model",
            "quantize.smoothquant_alpha",
        ),
        ("trim-vocabulary: {}", "unsupported-task", "trim-vocabulary"),
        ("distill: {losses: {hidden_states: 1}}", "does-not-fit-task", "distill.losses"),
        ("factorize: {method: svd}", "does-not-fit-model", "factorize.method"),
        ("onnx: {autotune: true}", "unsupported-task", "onnx.autotune"),
    ],
)


def refusal(path: Path, step_index: int) -> list[tuple[str, str | None]]:
    """Return code and place of what the plan has against the step `step_index`."""
    error = command_error(harness.smelt("plan", path, code=2))
    start = f"stages[{step_index}]."
    return [(message.code, (message.setting or "").removeprefix(start)) for message in error.messages]


@REFUSED
def test_stages_unsupported_for_convolutions_are_rejected_by_plan(stage, code, setting, tmp_path):
    assert (code, setting) in refusal(recipe(tmp_path, [stage], "resnet"), 0)


@REFUSED
def test_stages_unsupported_for_untrained_convolutions_are_rejected_by_plan(stage, code, setting, tmp_path):
    path = recipe(tmp_path, [f"finetune: {{{TRAIN}}}", stage], "resnet")
    config = tmp_path / "small.json"
    config.write_text(json.dumps({"model_type": "resnet"} | images.CONFIGS["resnet"]))
    path.write_text(path.read_text().replace('model: "model"', "model: {config: small.json, image_size: 16}"))
    assert (code, setting) in refusal(path, 1)


@pytest.mark.parametrize(
    ("stage", "code", "setting"),
    [
        ("prune: {targets: [width]}", "fixed-width", "prune.targets"),
        ("finetune: {learned_masks: {targets: [width]}}", "fixed-width", "finetune.learned_masks.targets"),
        ("rotate: {}", "fixed-basis", "rotate.targets"),
    ],
)
def test_other_width_of_a_concatenating_head_is_rejected_by_plan(stage, code, setting, tmp_path):
    """DINOv2's head reads the first token and the mean of the others as one vector."""
    assert (code, setting) in refusal(recipe(tmp_path, [stage], "dinov2"), 0)


def test_vision_transformer_with_layer_scale_is_pruned_quantized_and_exported(tmp_path):
    stages = [*CUT, "quantize: {scheme: int8-dynamic}", "onnx: {target: ort-cpu}"]
    steps = finished(recipe(tmp_path, stages, "dinov2"))
    sizes = [steps[name]["parameters"] for name in ("model", "drop-layers", "prune", "distill", "factorize")]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 2 * sizes[-1]
    assert {"accuracy", "f1"} <= set(steps["onnx"]["quality"])


@pytest.mark.parametrize(
    ("family", "stages"),
    [
        ("convnext", ["factorize: {method: tucker, keep_ratio: 0.5}", "quantize: {scheme: int8-static}"]),
        ("convnextv2", ["quantize: {scheme: int8-dynamic}"]),
        ("mobilenet_v2", ["quantize: {scheme: int8-static}"]),
        ("efficientnet", ["quantize: {scheme: int8-static}"]),
    ],
)
def test_convolutional_families_are_distilled_quantized_and_exported(family, stages, tmp_path):
    steps = finished(recipe(tmp_path, [f"distill: {{{TRAIN}}}", *stages, "onnx: {target: ort-cpu}"], family))
    assert steps["onnx"]["details"]["parity"]["model"]["operators"] > 0
    assert {"accuracy", "f1"} <= set(steps["onnx"]["quality"])


@pytest.mark.parametrize(
    ("family", "stage", "setting"),
    [
        ("convnext", "prune: {targets: [channels]}", "prune.targets"),
        ("convnext", "prune: {}", "prune.targets"),
        ("convnext", "factorize: {}", "factorize.method"),
        ("mobilenet_v2", "factorize: {method: tucker}", "factorize"),
        ("efficientnet", "factorize: {method: cp}", "factorize"),
    ],
)
def test_stages_unsupported_for_other_convolutions_are_rejected_by_plan(family, stage, setting, tmp_path):
    assert ("does-not-fit-model", setting) in refusal(recipe(tmp_path, [stage], family), 0)
