"""What a plan knows of quantized models: who may follow, where they run, what is worth a warning."""

from __future__ import annotations

from pathlib import Path

import pytest

from smelt.core import packages
from smelt.core.errors import InputError, MissingDependencyError
from smelt.plan.load import load_plan
from smelt.plan.plan import Plan

pytest_plugins = ["planning"]


def plan(translator: Path, stages: str) -> Plan:
    path = translator / "recipe.yaml"
    head = "model: model\ntask: translation\ndata: {train: train.jsonl, test: test.jsonl}\n"
    path.write_text(f"{head}stages: {stages}\n")
    return load_plan(path)


def advice(made: Plan) -> list[str]:
    """Return what is said of the steps, not of the few rows of these tests."""
    return [text for text in made.warnings if text.startswith("line ")]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (
            "[quantize: {scheme: int4}, onnx: {target: tensorrt}]",
            "4: stages[1].onnx.target: TensorRT runs int4 with `symmetric: positive` and `accuracy_level: 0`"
            " alone; quantize so in 'quantize', or give `from: model`.",
        ),
        (
            "[quantize: {scheme: int4, group_size: 32, symmetric: false}, onnx: {target: tensorrt}]",
            "TensorRT runs int4 with `group_size: 64 or 128` and `symmetric: positive` and"
            " `accuracy_level: 0` alone; quantize so in 'quantize', or give `from: model`.",
        ),
        (
            "[quantize: {scheme: int4, symmetric: positive, accuracy_level: 0},"
            " onnx: {target: tensorrt, dtype: bf16}]",
            "4: stages[1].onnx.dtype: the scales of 'quantize' would lose digits; give dtype: fp32 or fp16.",
        ),
        (
            "[quantize: {scheme: int4, symmetric: positive, accuracy_level: 0, vocabulary: int8-static},"
            " onnx: {target: ort-tensorrt-rtx, dtype: fp16}]",
            "the scales of 'quantize' would lose digits; give dtype: fp32.",
        ),
        (
            "[quantize: {scheme: int4, symmetric: positive, accuracy_level: 0},"
            " onnx: {target: ort-tensorrt}]",
            "TensorRT in ONNX Runtime cannot run the int4 codes (MatMulNBits) of 'quantize'; give"
            " `from: model`, or target: ort-cpu or tensorrt or openvino or ort-tensorrt-rtx, or quantize with"
            " int8-static.",
        ),
        (
            "[quantize: {scheme: int2}, onnx: {target: tensorrt}]",
            "4: stages[1].onnx.target: TensorRT cannot run the int2 codes (MatMulNBits) of 'quantize';"
            " give `from: model`, or target: ort-cpu, or quantize with int8-static or int4.",
        ),
        (
            "[quantize: {scheme: int8-groupwise}, onnx: {target: tensorrt}]",
            "TensorRT cannot run the int8-groupwise codes (MatMulNBits) of 'quantize'; give `from: model`,"
            " or target: ort-cpu or openvino, or quantize with int8-static or int4.",
        ),
        (
            "[quantize: {scheme: binary}, distill: {}, onnx: {target: ort-cuda}]",
            "4: stages[2].onnx.target: ONNX Runtime on CUDA cannot run the binary codes (MatMulNBits)"
            " and dynamic int8 of 'quantize'; give `from: model`, or target: ort-cpu.",
        ),
        (
            "[quantize: {scheme: int8-static}, onnx: {target: ort-cuda}]",
            "ONNX Runtime on CUDA cannot run the static int8 of 'quantize'; give `from: model`, or target:"
            " ort-cpu or tensorrt or openvino",
        ),
        (
            "[quantize: {scheme: bnb-nf4}, onnx: {target: openvino}]",
            "OpenVINO cannot run the bnb-nf4 codes (MatMulBnb4) of 'quantize'; give `from: model`, or target:"
            " ort-cpu, or quantize with int8-static or int8-groupwise or int4.",
        ),
        (
            "[quantize: {scheme: bnb-int8}, onnx: {target: tensorrt}]",
            "TensorRT cannot run the bnb-int8 products of 'quantize'; give `from: model`, or quantize with"
            " int8-static or int4.",
        ),
        (
            "[quantize: {bits: {budget: 4.5}}, onnx: {target: openvino}]",
            "4: stages[1].onnx.target: OpenVINO cannot run the int2 codes (MatMulNBits) and int3 codes"
            " (MatMulNBits) of 'quantize'; give `from: model`, or target: ort-cpu, or 'quantize'"
            " `bits: {widths: [4, 8]}`, or quantize with int8-static or int8-groupwise or int4 in place of"
            " bits.",
        ),
        (
            "[quantize: {bits: {budget: 3}}, onnx: {target: openvino}]",
            "`bits: {widths: [4, 8]}` and a budget between 4.25 and 8.25, or",
        ),
        (
            "[quantize: {bits: {budget: 4.5}}, onnx: {target: tensorrt}]",
            "of 'quantize'; give `from: model`, or target: ort-cpu, or quantize with int8-static or int4 in"
            " place of bits.",
        ),
        (
            "[shortlist: {}, quantize: {scheme: bnb-nf4}, onnx: {}]",
            "4: stages[2].onnx: a shortlist cannot restrict an output layer of bnb-nf4 codes; give 'quantize'"
            " `vocabulary: int8-dynamic`, or this step `loop: false`.",
        ),
        (
            "[quantize: {}, share: {}]",
            "4: stages[1].share: share cannot work after 'quantize', which left int8-dynamic codes;"
            " move it before 'quantize', or give `from: model`.",
        ),
        (
            "[share: {difference: {rank: 4}}, finetune: {}, prune: {}]",
            "prune cannot work after 'share': its layers share a matrix beside their differences, so that"
            " what goes from one goes from all; move it before 'share', or give `from: model`.",
        ),
        (
            "[share: {difference: {rank: 4}}, finetune: {masks: {keep: 0.5}}]",
            "finetune cannot work after 'share': its layers share a matrix beside their differences",
        ),
        (
            "[quantize: {scheme: binary}, factorize: {}]",
            "factorize cannot work after 'quantize', which left binary codes; move it before 'quantize',"
            " or give `from: model`.",
        ),
        ("[quantize: {scheme: binary, symmetric: false}]", "symmetric means nothing to scheme binary"),
        (
            "[quantize: {granularity: group}]",
            "granularity group is not for scheme int8-dynamic; expected one of channel, tensor",
        ),
        (
            "[quantize: {granularity: matrix}]",
            "granularity: expected one of 'channel', 'tensor', 'group', 'row', read 'matrix'",
        ),
        ("[quantize: {group_size: 64}]", "group_size means nothing to scheme int8-dynamic; remove it"),
        ("[quantize: {scheme: binary, group_size: 16}]", "binary groups hold 32, 64 or 128 weights"),
        ("[quantize: {scheme: int4, group_size: 48}]", "expected one of 16, 32, 64, 128"),
        (
            "[quantize: {bits: {budget: 1.5}}]",
            "the widths take 2.25 to 8.25 bits a weight; expected a number",
        ),
        (
            "[quantize: {bits: {budget: 4}}, factorize: {}]",
            "factorize cannot work after 'quantize', which left int2 and int3 and int4 and int8-groupwise",
        ),
        ("[quantize: {bits: {max_drop: 0.5}}]", "validation"),
        ("[quantize: {scheme: itn4}]", "Did you mean 'int4'?"),
    ],
)
def test_what_cannot_be_is_said_before_work_starts(translator, stages, message):
    with pytest.raises(InputError) as caught:
        plan(translator, stages)
    assert message in str(caught.value)


@pytest.mark.parametrize("target", ["tensorrt", "ort-tensorrt-rtx"])
@pytest.mark.parametrize("size", [64, 128])
def test_tensorrt_runs_4_bits_in_half_precision_too(translator, size, target):
    codes = f"quantize: {{scheme: int4, group_size: {size}, symmetric: positive, accuracy_level: 0}}"
    made = plan(translator, f"[{codes}, onnx: {{target: {target}, dtype: fp16}}]")
    assert [s.stage for s in made.steps] == ["quantize", "onnx"]


@pytest.mark.parametrize("word", ["finetune", "distill"])
@pytest.mark.parametrize("scheme", ["int8-dynamic", "int4", "binary"])
def test_training_may_follow_every_scheme(translator, word, scheme):
    made = plan(translator, f"[quantize: {{scheme: {scheme}}}, {word}: {{}}, onnx: {{}}]")
    assert [s.stage for s in made.steps] == ["quantize", word, "onnx"]
    assert advice(made) == []


def test_binary_weights_that_nothing_trains_give_a_warning(translator):
    made = plan(translator, "[quantize: {scheme: binary}, onnx: {}]")
    assert advice(made) == [
        "line 4: onnx: the binary weights of 'quantize' were not trained and say little;"
        " put a distill after 'quantize', which trains through the codes.",
    ]


def test_a_step_that_takes_calibration_rows_asks_for_them(translator):
    path = translator / "untrained.yaml"
    path.write_text(
        "model: model\ntask: translation\ndata: {test: test.jsonl}\n"
        "stages: [quantize: {scheme: int8-static}]\n"
    )
    with pytest.raises(InputError, match=r"needs calibration or train data; .* data: \{calibration: FILE\}"):
        load_plan(path)


@pytest.mark.parametrize(
    ("codes", "graph"),
    [
        ("scheme: bnb-nf4, vocabulary: int8-dynamic", ""),
        ("scheme: bnb-nf4, head: false", ""),
        ("scheme: bnb-nf4", "loop: false"),
        ("scheme: int4", ""),
    ],
)
def test_a_shortlist_goes_with_codes_whose_rows_can_be_gathered(
    translator: Path, codes: str, graph: str
) -> None:
    plan(translator, f"[shortlist: {{}}, quantize: {{{codes}}}, onnx: {{{graph}}}]")


def test_adapters_may_follow_quantize(translator: Path) -> None:
    plan(translator, "[quantize: {scheme: bnb-nf4}, finetune: {lora: {rank: 4}}, onnx: {}]")


@pytest.mark.parametrize(
    ("stages", "package", "release"),
    [
        ("[quantize: {scheme: bnb-nf4}]", "bitsandbytes", "0.48"),
        ("[quantize: {vocabulary: bnb-int8}]", "bitsandbytes", "0.48"),
        ("[finetune: {lora: {rank: 4}}]", "peft", "0.18"),
    ],
)
def test_a_package_that_is_too_old_is_told_before_work_by_the_step_that_needs_it(
    translator: Path, monkeypatch: pytest.MonkeyPatch, stages: str, package: str, release: str
) -> None:
    monkeypatch.setattr(packages, "version", lambda name: "0.17.1")
    with pytest.raises(MissingDependencyError) as caught:
        plan(translator, stages).require_runnable()
    said = str(caught.value)
    assert f"cannot run here: {package} {release} or later is needed, and 0.17.1 is installed" in said
    assert f"(pip install '{package}>={release}')" in said


def test_other_schemes_need_no_package(translator: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "version", lambda name: "0.1")
    plan(translator, "[quantize: {scheme: int4}]").require_runnable()


def scored_by(translator: Path, metric: str, score: str) -> Plan:
    path = translator / "scored.yaml"
    path.write_text(
        "model: model\ntask: translation\n"
        "data: {train: train.jsonl, validation: train.jsonl, test: test.jsonl}\n"
        f"stages:\n  - quantize: {{bits: {{max_drop: 0.5, metric: {metric}}}}}\n{score}"
    )
    return load_plan(path)


@pytest.mark.parametrize(
    ("metric", "score", "message"),
    [
        (
            "chrf",
            "score: {quality: [bleu]}\n",
            r"scored.yaml:5: stages\[0\].quantize.bits.metric: the recipe does not score 'chrf', only bleu\."
            r" Name one of these, or add it to score: \{quality: \[...\]\}\.$",
        ),
        ("blue", "", r"does not score 'blue', only bleu, chrf, .* Did you mean 'bleu'\?"),
    ],
)
def test_a_metric_that_the_recipe_does_not_score_is_told_before_work(
    translator: Path, metric: str, score: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        scored_by(translator, metric, score)


def test_a_metric_that_the_recipe_scores_is_taken(translator: Path) -> None:
    scored_by(translator, "chrf", "score: {quality: [bleu, chrf]}\n")
    scored_by(translator, "chrf", "")


def test_the_widths_that_a_plan_names_for_a_target_are_taken_there(translator: Path) -> None:
    assert plan(
        translator, "[quantize: {bits: {budget: 4.5, widths: [4, 8]}}, onnx: {target: openvino}]"
    ).steps
    assert plan(translator, "[quantize: {bits: {budget: 5, widths: [4, 8]}}, onnx: {target: openvino}]").steps


@pytest.mark.parametrize(
    ("stages", "chain"),
    [
        ("quantize: {}, finetune: {masks: {keep: 0.5}}", "- finetune: {masks: {keep: 0.5}}"),
        ("quantize: {}, distill: {sparsify: {}}", "- distill: {sparsify: {sparsity: 0.5}}"),
        ("quantize: {scheme: binary}, sparsify: {}", "- quantize: {scheme: int8-dynamic}"),
        ("quantize: {scheme: kmeans4}, depth: {}, sparsify: {}", "- quantize: {scheme: int8-dynamic}"),
        ("quantize: {low_rank: {rank: 4}}, sparsify: {}", "- finetune: {}"),
        ("quantize: {scheme: ternary}, distill: {codes: {split: true}}, prune: {}", "- prune: {}"),
        ("quantize: {scheme: ternary}, distill: {codes: {split: true}}, sparsify: {}", "- sparsify: {}"),
        ("quantize: {scheme: binary}, distill: {codes: {activations: one-bit}}, prune: {}", "- prune: {}"),
    ],
)
def test_what_codes_do_not_allow_is_refused_with_the_chain_that_does_it(translator, stages, chain):
    with pytest.raises(InputError) as caught:
        plan(translator, f"[{stages}]")
    assert caught.value.code == "behind-quantize"  # as the stage refuses it at work
    assert f"`{chain}`" in str(caught.value)


@pytest.mark.parametrize("scheme", ["int8-dynamic", "int4", "ternary", "binary", "kmeans4", "bnb-nf4"])
@pytest.mark.parametrize("later", ["prune: {what: [heads, ffn]}", "prune: {what: [width]}", "sparsify: {}"])
def test_units_and_weights_can_go_from_codes(translator, scheme, later):
    if later == "sparsify: {}" and scheme in ("binary", "kmeans4"):
        return
    assert plan(translator, f"[quantize: {{scheme: {scheme}}}, {later}, onnx: {{loop: false}}]").steps
