"""What a plan knows of quantized models: who may follow, where they run, what is worth a warning."""

from __future__ import annotations

from pathlib import Path

import pytest

from smelt.core import system
from smelt.core.errors import InputError, MissingDependencyError
from smelt.core.messages import Message
from smelt.pipeline.plan.load_plan import load_plan
from smelt.pipeline.plan.plan import Plan
from tests.support.expected_errors import message_locations, raises_code
from tests.support.pairs.matrix import matrix_cells

pytest_plugins = ["tests.support.standins.stage_stand_ins"]


def plan(translator: Path, stages: str) -> Plan:
    path = translator / "recipe.yaml"
    head = "model: model\ntask: translation\ndata: {train: train.jsonl, test: test.jsonl}\n"
    path.write_text(f"{head}stages: {stages}\n")
    return load_plan(path)


def advice(loaded_plan: Plan) -> list[Message]:
    """Return what is said of the steps, not of the few rows of these tests."""
    return [warning for warning in loaded_plan.warnings if warning.step is not None]


@pytest.mark.parametrize(("stages", "location", "named"), [
    ("[quantize: {scheme: int4}, onnx: {target: tensorrt}]",
     ("unsupported-options", "stages[1].onnx.target"),
     ("`symmetric: positive` and `accuracy_level: 0`", "'quantize'", "`from: model`")),
    ("[quantize: {scheme: int4, group_size: 32, symmetric: false}, onnx: {target: tensorrt}]",
     ("unsupported-options", "stages[1].onnx.target"),
     ("`group_size: 64 or 128` and `symmetric: positive` and `accuracy_level: 0`", "`from: model`")),
    ("[quantize: {scheme: int4, symmetric: positive, accuracy_level: 0},"
     " onnx: {target: tensorrt, dtype: bf16}]", ("low-precision-scales", "stages[1].onnx.dtype"),
     ("'quantize'", "dtype: fp32 or fp16.")),
    ("[quantize: {scheme: int4, symmetric: positive, accuracy_level: 0, embedding_scheme: int8-static,"
     " activations_symmetric: true}, onnx: {target: tensorrt, dtype: bf16}]",
     ("low-precision-scales", "stages[1].onnx.dtype"),
     ("'quantize'", "dtype: fp32 or fp16.")),
    ("[quantize: {scheme: int8-static}, onnx: {target: ort-tensorrt}]",
     ("unsupported-options", "stages[1].onnx.target"),
     ("int8-static with `activations_symmetric: true`", "'quantize'", "`from: model`")),
    ("[quantize: {scheme: int4, symmetric: positive, accuracy_level: 0}," " onnx: {target: ort-tensorrt}]",
     ("unsupported-scheme", "stages[1].onnx.target"),
     ("int4", "`from: model`", "target: ort-cpu or ort-cuda or tensorrt or openvino, ", "with int8-static.")),
    ("[quantize: {scheme: int2}, onnx: {target: tensorrt}]", ("unsupported-scheme", "stages[1].onnx.target"),
     ("int2", "'quantize'", "`from: model`", "target: ort-cpu or ort-cuda, ",
      "with int8-static or fp8 or nvfp4 or int4.")),
    ("[quantize: {scheme: binary}, distill: {}, onnx: {target: ort-cuda}]",
     ("unsupported-scheme", "stages[2].onnx.target"),
     ("int8", "'quantize'", "`from: model`", "target: ort-cpu, ", "binary or bnb-nf4")),
    ("[quantize: {scheme: int3}, onnx: {target: ort-cuda}]", ("unsupported-options", "stages[1].onnx.target"),
     ("int3 with `accuracy_level: 0`", "'quantize'", "`from: model`")),
    ("[quantize: {scheme: mxfp4, accuracy_level: 0}, onnx: {target: ort-cuda, dtype: fp16}]",
     ("low-precision-scales", "stages[1].onnx.dtype"), ("'quantize'", "dtype: fp32.")),
    ("[quantize: {scheme: int8-static}, onnx: {target: ort-cuda}]",
     ("unsupported-scheme", "stages[1].onnx.target"),
     ("static int8", "`from: model`", "target: ort-cpu or tensorrt or openvino")),
    ("[quantize: {scheme: bnb-nf4}, onnx: {target: openvino}]",
     ("unsupported-scheme", "stages[1].onnx.target"),
     ("bnb-nf4", "target: ort-cpu or ort-cuda, ", "with int8-static or int8-groupwise or int4.")),
    ("[quantize: {mixed_precision: {target_bits: 4.5}}, onnx: {target: openvino}]",
     ("unsupported-scheme", "stages[1].onnx.target"), ("int2", "int3", "target: ort-cpu or ort-cuda, ",
     "'quantize' `mixed_precision: {bit_widths: [4, 8]}`, ",
     "with int8-static or int8-groupwise or int4 in place of mixed_precision.")),
    ("[quantize: {mixed_precision: {target_bits: 3}}, onnx: {target: openvino}]",
     ("unsupported-scheme", "stages[1].onnx.target"),
     ("`mixed_precision: {bit_widths: [4, 8]}`", "between 4.25 and 8.25, ")),
    ("[quantize: {mixed_precision: {target_bits: 4.5}}, onnx: {target: tensorrt}]",
     ("unsupported-scheme", "stages[1].onnx.target"),
     ("target: ort-cpu or ort-cuda, or quantize with int8-static or fp8 or nvfp4 or int4 in place of"
      " mixed_precision.",
      )),
    ("[shortlist: {}, quantize: {scheme: bnb-nf4, output_layer: true}, onnx: {}]",
     ("unsupported-scheme", "stages[2].onnx"),
     ("bnb-nf4", "'quantize' `embedding_scheme: int8-dynamic`", "`generation_graph: false`")),
    ("[quantize: {}, share-weights: {}]", ("already-quantized", "stages[1].share-weights"),
     ("'quantize'", "int8-dynamic", "`from: model`")),
    ("[share-weights: {low_rank_delta: {rank: 4}}, finetune: {}, prune: {}]",
     ("impossible-order", "stages[2].prune"), ("'share-weights'", "`from: model`")),
    ("[share-weights: {low_rank_delta: {rank: 4}}, finetune: {learned_masks: {keep_ratio: 0.5}}]",
     ("impossible-order", "stages[1].finetune"), ("'share-weights'",)),
    ("[quantize: {scheme: kmeans4, symmetric: false}]", ("unused-setting", "stages[0].quantize"),
     ("symmetric", "kmeans4")),
    ("[quantize: {granularity: group}]", ("wrong-value", "stages[0].quantize"),
     ("group", "int8-dynamic", "channel, tensor")),
    ("[quantize: {group_size: 64}]", ("unused-setting", "stages[0].quantize"),
     ("group_size", "int8-dynamic")),
    ("[quantize: {scheme: binary, group_size: 16}]", ("wrong-value", "stages[0].quantize"),
     ("32, 64 or 128",)),
    ("[quantize: {mixed_precision: {target_bits: 1.5}}]", ("budget-out-of-range", "stages[0].quantize"),
     ("2.25", "8.25")),
    ("[quantize: {mixed_precision: {target_bits: 4}}, factorize: {}]",
     ("already-quantized", "stages[1].factorize"),
     ("'quantize'", "int2 and int3 and int4 and int8-groupwise")),
    ("[quantize: {mixed_precision: {max_degradation: 0.5}}]", ("missing-data", "stages[0].quantize"),
     ("validation",)),
    ("[quantize: {scheme: itn4}]", ("wrong-value", "stages[0].quantize.scheme"), ("'int4'?",)),
    ("[quantize: {scheme: {encoder: int4, decoder: itn4}}]",
     ("wrong-value", "stages[0].quantize.scheme.decoder"), ("'int4'",)),
    ("[quantize: {scheme: {encoder: int4, decodr: int4}}]",
     ("wrong-value", "stages[0].quantize.scheme.decodr"), ()),
    ("[quantize: {scheme: {encoder: int4, decoder: int8-dynamic}, group_size: 32}, onnx: {target: openvino}]",
     ("unsupported-scheme", "stages[1].onnx.target"),
     ("dynamic int8 of", "target: ort-cpu", "with int8-static or int8-groupwise or int4.")),
    ("[quantize: {scheme: {encoder: int4, decoder: int8-static}}, finetune: {lora: {use_dora: true}}]",
     ("unsupported-layer", "stages[1].finetune"), ("int4 and int8-static",)),
])  # fmt: skip
def test_impossible_quantized_plans_are_rejected(translator, stages, location, named):
    with raises_code(location[0], InputError) as excinfo:
        plan(translator, stages)
    [error] = excinfo.value.messages
    assert message_locations([error]) == [(*location, 4)]
    assert [value for value in named if value not in error.message] == []


@pytest.mark.parametrize("size", [64, 128])
def test_tensorrt_accepts_int4_in_half_precision(translator, size):
    codes = f"quantize: {{scheme: int4, group_size: {size}, symmetric: positive, accuracy_level: 0}}"
    tensorrt_plan = plan(translator, f"[{codes}, onnx: {{target: tensorrt, dtype: fp16}}]")
    assert [s.stage for s in tensorrt_plan.steps] == ["quantize", "onnx"]


@pytest.mark.parametrize(
    ("stage_name", "scheme"), matrix_cells(["finetune", "distill"], ["int8-dynamic", "int4", "binary"])
)
def test_training_may_follow_every_scheme(translator, stage_name, scheme):
    training_plan = plan(translator, f"[quantize: {{scheme: {scheme}}}, {stage_name}: {{}}, onnx: {{}}]")
    assert [s.stage for s in training_plan.steps] == ["quantize", stage_name, "onnx"]
    assert advice(training_plan) == []


@pytest.mark.parametrize("scheme", ["binary", "{encoder: int4, decoder: binary}"])
def test_untrained_binary_weights_warn(translator, scheme):
    binary_plan = plan(translator, f"[quantize: {{scheme: {scheme}}}, onnx: {{}}]")
    [warning] = advice(binary_plan)
    assert (warning.code, warning.step, warning.line) == ("untrained-scheme", "onnx", 4)
    assert all(value in warning.message for value in ("binary", "'quantize'"))


def test_step_requiring_calibration_data_is_rejected_without_it(translator):
    path = translator / "untrained.yaml"
    path.write_text(
        "model: model\ntask: translation\ndata: {test: test.jsonl}\n"
        "stages: [quantize: {scheme: int8-static}]\n"
    )
    with raises_code("missing-data", InputError) as excinfo:
        load_plan(path)
    assert message_locations(excinfo.value.messages) == [("missing-data", "stages[0].quantize", 4)]
    assert "calibration or train" in str(excinfo.value)
    assert "data: {calibration: FILE}" in str(excinfo.value)


@pytest.mark.parametrize(("codes", "graph"), [
    ("scheme: bnb-nf4, embedding_scheme: int8-dynamic", ""), ("scheme: bnb-nf4, output_layer: false", ""),
    ("scheme: bnb-nf4", "generation_graph: false"), ("scheme: int4", ""),
])  # fmt: skip
def test_shortlist_works_with_row_gatherable_schemes(translator: Path, codes: str, graph: str) -> None:
    plan(translator, f"[shortlist: {{}}, quantize: {{{codes}}}, onnx: {{{graph}}}]")


def test_adapters_may_follow_quantize(translator: Path) -> None:
    plan(translator, "[quantize: {scheme: bnb-nf4}, finetune: {lora: {r: 4}}, onnx: {}]")


@pytest.mark.parametrize(("stages", "package", "release"), [
    ("[quantize: {scheme: bnb-nf4}]", "bitsandbytes", "0.48"),
    ("[quantize: {embedding_scheme: bnb-int8}]", "bitsandbytes", "0.48"),
    ("[finetune: {lora: {r: 4}}]", "peft", "0.18"),
])  # fmt: skip
def test_outdated_package_is_reported_by_step_that_needs_it(
    translator: Path, monkeypatch: pytest.MonkeyPatch, stages: str, package: str, release: str
) -> None:
    monkeypatch.setattr(system, "installed_version", lambda name: "0.17.1")
    with raises_code("step-unavailable", MissingDependencyError) as excinfo:
        plan(translator, stages).require_runnable()
    message = str(excinfo.value)
    assert all(value in message for value in (f"{package} {release}", "0.17.1"))
    assert f"(pip install '{package}>={release}')" in message


def test_other_schemes_need_no_package(translator: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "installed_version", lambda name: "0.1")
    plan(translator, "[quantize: {scheme: int4}]").require_runnable()


def scored_by(translator: Path, metric: str, score: str) -> Plan:
    path = translator / "scored.yaml"
    path.write_text(
        "model: model\ntask: translation\n"
        "data: {train: train.jsonl, validation: train.jsonl, test: test.jsonl}\n"
        f"stages:\n  - quantize: {{mixed_precision: {{max_degradation: 0.5, metric: {metric}}}}}\n{score}"
    )
    return load_plan(path)


@pytest.mark.parametrize(("metric", "score", "named"), [
    ("chrf", "score: {quality: [bleu]}\n", ("'chrf'", "only bleu.")),
    ("blue", "", ("'blue'", "only bleu, chrf, ", "'bleu'?")),
    ("agreement", "score: {quality: [bleu, agreement]}\n", ("'agreement'", "only bleu.")),
])  # fmt: skip
def test_metric_not_scored_by_recipe_is_rejected(
    translator: Path, metric: str, score: str, named: tuple[str, ...]
) -> None:
    with raises_code("metric-not-scored", InputError) as excinfo:
        scored_by(translator, metric, score)
    [error] = excinfo.value.messages
    assert message_locations([error]) == [
        ("metric-not-scored", "stages[0].quantize.mixed_precision.metric", 5)
    ]
    assert [value for value in named if value not in error.message] == []


def test_metric_scored_by_recipe_is_accepted(translator: Path) -> None:
    scored_by(translator, "chrf", "score: {quality: [bleu, chrf]}\n")
    scored_by(translator, "chrf", "")


def test_suggested_bit_widths_are_accepted_for_target(translator: Path) -> None:
    assert plan(
        translator,
        "[quantize: {mixed_precision: {target_bits: 4.5, bit_widths: [4, 8]}}, onnx: {target: openvino}]",
    ).steps
    assert plan(
        translator,
        "[quantize: {mixed_precision: {target_bits: 5, bit_widths: [4, 8]}}, onnx: {target: openvino}]",
    ).steps


@pytest.mark.parametrize(("stages", "chain"), [
    ("quantize: {}, finetune: {learned_masks: {keep_ratio: 0.5}}",
     "- finetune: {learned_masks: {keep_ratio: 0.5}}"),
    ("quantize: {}, distill: {sparsify: {}}", "- distill: {sparsify: {sparsity: 0.5}}"),
    ("quantize: {scheme: binary}, sparsify: {}", "- quantize: {scheme: int8-dynamic}"),
    ("quantize: {scheme: kmeans4}, drop-layers: {}, sparsify: {}", "- quantize: {scheme: int8-dynamic}"),
    ("quantize: {low_rank_correction: {rank: 4}}, sparsify: {}", "- finetune: {}"),
    ("quantize: {scheme: additive}, prune: {}", "- prune: {}"),
    ("quantize: {scheme: additive}, finetune: {}", "- finetune: {lora: {}}"),
    ("quantize: {scheme: additive, method: aqlm}, distill: {}", "- distill: {}"),
    ("quantize: {scheme: ternary}, distill: {qat: {weight_splitting: true}}, prune: {}", "- prune: {}"),
    ("quantize: {scheme: ternary}, distill: {qat: {weight_splitting: true}}, sparsify: {}", "- sparsify: {}"),
])  # fmt: skip
def test_stage_unsupported_after_quantize_is_rejected_with_valid_order(translator, stages, chain):
    with raises_code("behind-quantize", InputError) as excinfo:  # as the stage refuses it at work
        plan(translator, f"[{stages}]")
    assert f"`{chain}`" in str(excinfo.value)


@pytest.mark.parametrize(("scheme", "later"), [
    *matrix_cells(["int8-dynamic", "binary", "ternary", "kmeans4", "int4", "bnb-nf4"],
        ["prune: {targets: [heads, ffn]}", "prune: {targets: [width]}"]),
    *((scheme, "sparsify: {}") for scheme in ("int8-dynamic", "int4", "ternary", "bnb-nf4")),
])  # fmt: skip
def test_units_and_weights_can_be_removed_after_quantize(translator, scheme, later):
    assert plan(
        translator, f"[quantize: {{scheme: {scheme}}}, {later}, onnx: {{generation_graph: false}}]"
    ).steps


@pytest.mark.parametrize(("quantize", "is_other"), [
    ("{scheme: int4}", False), ("{scheme: int4, group_size: 64, method: gptq}", False),
    ("{scheme: int3}", True), ("{scheme: int4, group_size: 32}", True),
    ("{mixed_precision: {target_bits: 4}}", False),
])  # fmt: skip
def test_rotations_learned_for_other_weights_warn(translator: Path, quantize: str, is_other: bool) -> None:
    rotate = "{rotate: {targets: [heads], learned: {scheme: int4}}}"
    warnings = advice(plan(translator, f"[{rotate}, {{quantize: {quantize}}}]"))
    assert [w.step for w in warnings if w.code == "poor-order"] == ["quantize"] * is_other
