"""Whole recipes of images with texts: trained, cut, quantized, exported, packaged, asked."""

import base64
import json
import subprocess
import sys

import numpy as np
import onnxruntime
import pytest
import torch
import transformers

import smelt
from smelt.models.checkpoint import load_tokenizer
from smelt.runtimes.images import read_processor
from tests.support import harness
from tests.support.expected_errors import command_error, error_codes, raises_code
from tests.support.models import image_text, images
from tests.support.processes.services import run_service

TRAIN = "max_steps: 2, batch_size: 4, num_evals: 1, precision: fp32"
STAGES = [
    f"finetune: {{{TRAIN}}}",
    "drop-layers: {text_layers: 1, calibration_samples: 4}",
    "prune: {targets: [heads, ffn], keep_ratio: 0.5, calibration_samples: 4}",
    f"distill: {{losses: {{sentence_embedding: 1.0, pairwise_similarity: 1.0, labels: 0.5}}, {TRAIN}}}",
    "quantize: {scheme: int8-dynamic}",
    "onnx: {target: ort-cpu}",
]


def run_recipe(folder, family, stages, test, quality=""):
    image_text.write_model(folder / "model", family)
    image_text.write_pairs(folder / "train.jsonl")
    path = folder / "recipe.yaml"
    path.write_text(
        f"model: model\ntask: {image_text.TASK}\nthreads: 1\nscore: {{latency: false{quality}}}\n"
        f"data: {{train: train.jsonl, validation: train.jsonl, test: {test.name}}}\n"
        "stages:\n" + "".join(f"  - {line}\n" for line in stages)
    )
    result = smelt.run(path, out=folder / "run")
    steps = result.report["steps"]
    assert [s["status"] for s in steps] == ["done"] * len(steps), [s["error"] for s in steps]
    return {step["name"]: step for step in steps}


@pytest.mark.parametrize(("family", "first"), [("clip", 0), ("siglip", 1)])
def test_towers_are_trained_pruned_quantized_and_exported(family, first, tmp_path):
    test = image_text.write_pairs(tmp_path / "test.jsonl", labeled=True)
    steps = run_recipe(
        tmp_path, family, STAGES[first:], test, ", quality: [accuracy, text_retrieval_recall@1]"
    )
    sizes = [steps[name]["parameters"] for name in ("model", "drop-layers", "prune")]
    assert sizes[0] > sizes[1] > sizes[2]
    last = steps["onnx"]
    assert {"accuracy", "text_retrieval_recall@1"} == set(last["quality"])
    for name in ("vision_model", "text_model"):
        assert last["details"]["parity"][name]["operators"] >= 4
    folder, picture = tmp_path / "run" / last["artifact"], tmp_path / "test-images" / "1.png"
    texts = ["a dark photo", "a light photo"]
    with smelt.load(folder) as model:
        [match] = model.match([picture], texts)
        with raises_code("does-not-fit-task"):
            model.classify([picture])
    package = tmp_path / "package"
    assert harness.smelt("package", folder, "--format", "standalone", "--out", package).exit_code == 0
    line = "\t".join([str(picture), *texts])
    predicted = harness.smelt("predict", folder, line, code=0).stdout
    best = next(iter(match))
    assert predicted.split("\n")[0] == f"{best}\t{match[best]:.4f}"
    command = [sys.executable, "-B", "infer.py", line]
    done = subprocess.run(command, cwd=package, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == predicted.strip()


@pytest.mark.parametrize("family", ["clip", "siglip"])
def test_exported_graphs_equal_transformers_on_200_pairs(family, tmp_path):
    test = image_text.write_pairs(tmp_path / "test.jsonl", 200)
    steps = run_recipe(tmp_path, family, ["onnx: {target: ort-cpu}"], test)
    folder, source = tmp_path / "run" / steps["onnx"]["artifact"], tmp_path / "model"
    rows = [json.loads(line) for line in test.read_text().splitlines()]
    padding = "max_length" if family == "siglip" else "longest"
    batch = load_tokenizer(source)([row["text"] for row in rows], padding=padding, return_tensors="pt")
    mask = {} if family == "siglip" else {"attention_mask": batch["attention_mask"]}
    processor = read_processor(source)
    pixels = np.stack([processor(images.make_image(number)) for number in range(200)])
    model = transformers.AutoModel.from_pretrained(source).eval()
    with torch.no_grad():
        expected = model(input_ids=batch["input_ids"], pixel_values=torch.from_numpy(pixels), **mask)
    feeds = {
        "vision_model": {"pixel_values": pixels},
        "text_model": {"input_ids": batch["input_ids"].numpy()},
    }
    vectors = [
        onnxruntime.InferenceSession(str(folder / f"{name}.onnx")).run(None, inputs)[0]
        for name, inputs in feeds.items()
    ]
    for actual, name in zip(vectors, ("image_embeds", "text_embeds"), strict=True):
        assert np.abs(actual - getattr(expected, name).numpy()).max() < 1e-5
    config = json.loads((folder / "config.json").read_text())
    logits = config["smelt_logit_scale"] * vectors[0] @ vectors[1].T + config.get("smelt_logit_bias", 0)
    assert np.abs(logits - expected.logits_per_image.numpy()).max() < 1e-3


def test_service_of_package_answers_as_the_model(tmp_path):
    test = image_text.write_pairs(tmp_path / "test.jsonl", 4)
    steps = run_recipe(tmp_path, "clip", ["onnx: {target: ort-cpu}"], test)
    folder, package = tmp_path / "run" / steps["onnx"]["artifact"], tmp_path / "package"
    harness.smelt("package", folder, "--format", "standalone", "--out", package, code=0)
    picture, texts = tmp_path / "test-images" / "0.png", ["a dark photo", "a light photo"]
    data = base64.b64encode(picture.read_bytes()).decode()
    with smelt.load(folder) as model:
        [match] = model.match([picture], texts)
    with run_service("-B", "serve.py", "--port", "0", folder=package) as service:
        status, answers = service.predict({"image": data, "text": texts}, {"image": data, "text": "a"})
        assert status == 200
        first, second = answers
        assert first["probabilities"] == pytest.approx(match)
        assert -1 <= second["similarity"] <= 1
        status, _ = service.predict({"image": data, "text": ["a", "a"]})
        assert status == 422


def test_init_recognizes_images_with_texts(tmp_path):
    image_text.write_model(tmp_path / "model")
    rows = image_text.write_pairs(tmp_path / "rows.jsonl", 40)
    path = tmp_path / "made.yaml"
    done = harness.smelt("init", tmp_path / "model", "--data", rows, "--out", path)
    assert done.exit_code == 0, done.output
    assert "task: image-text" in path.read_text()
    assert harness.smelt("plan", path).exit_code == 0


REFUSED = {
    "onnx: {target: ort-cuda}": ("unsupported-task", "stages[0].onnx.target"),
    "onnx: {target: ort-cpu, batch_size: 1, sequence_length: 8}": (
        "unsupported-task",
        "stages[0].onnx.batch_size",
    ),
    "prune: {targets: [ffn], budget: {flops: 0.5}}": ("does-not-fit-model", "stages[0].prune.budget"),
    "prune: {targets: [width]}": ("fixed-width", "stages[0].prune.targets"),
    "distill: {losses: {hidden_states: 1.0}}": ("unknown-loss", "stages[0].distill.losses.hidden_states"),
}


@pytest.mark.parametrize("stage", REFUSED)
def test_unsupported_stages_are_rejected_by_plan(stage, tmp_path):
    image_text.write_model(tmp_path / "model")
    image_text.write_pairs(tmp_path / "train.jsonl")
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"model: model\ntask: {image_text.TASK}\nscore: {{latency: false}}\n"
        f"data: {{train: train.jsonl, test: train.jsonl}}\nstages:\n  - {stage}\n"
    )
    error = command_error(harness.smelt("plan", path))
    locations = [(message.code, message.setting) for message in error.messages]
    locations = locations or [(error.code, error.setting)]
    assert REFUSED[stage] in locations


def test_folders_of_classes_are_read(tmp_path):
    image_text.write_model(tmp_path / "model")
    images.write_class_folders(tmp_path / "data", 40)
    path = tmp_path / "made.yaml"
    harness.smelt("init", tmp_path / "model", "--data", tmp_path / "data", "--out", path, code=0)
    assert harness.smelt("plan", path).exit_code == 0


def test_model_from_config_is_refused(tmp_path):
    image_text.write_pairs(tmp_path / "train.jsonl")
    (tmp_path / "clip.json").write_text(json.dumps({"model_type": "clip"}))
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"model: {{config: clip.json}}\ntask: {image_text.TASK}\nscore: {{latency: false}}\n"
        "data: {train: train.jsonl, test: train.jsonl}\nstages:\n  - finetune: {max_steps: 1}\n"
    )
    assert "does-not-fit-task" in error_codes(command_error(harness.smelt("plan", path)))
