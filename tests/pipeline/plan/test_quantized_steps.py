"""What cannot follow quantized weights, and an export with nothing to tune, are said by the plan."""

import pytest

import smelt
from smelt.core.errors import InputError
from smelt.core.messages import message_codes
from smelt.pipeline.plan.load_plan import load_plan
from tests.support import harness
from tests.support.expected_errors import message_locations
from tests.support.models import causal, quantized_checkpoints

RECIPE = """\
model: MODEL
task: language-modeling
data: {train: train.txt, test: train.txt, windows: {length: 32}}
stages:
STAGES
score: {latency: false}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("coded")
    quantized_checkpoints.write_gptq(
        causal.write_model(folder / "float", "llama"), folder / "gptq", symmetric=False
    )
    causal.write_lines(folder / "train.txt", 1)
    return folder


def recipe(folder, *stages, model="gptq"):
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.replace("MODEL", model).replace("STAGES", "\n".join(f"  - {s}" for s in stages)))
    return path


def refused(folder, *stages, model="gptq"):
    """Return code and setting of each error that the plan reports."""
    with pytest.raises(InputError) as excinfo:
        load_plan(recipe(folder, *stages, model=model))
    return [(error.code, error.setting) for error in excinfo.value.messages]


def text_of(folder, *stages, model="gptq"):
    """Return the text of the one error that the plan reports."""
    with pytest.raises(InputError) as excinfo:
        load_plan(recipe(folder, *stages, model=model))
    [error] = excinfo.value.messages
    return error.message


def test_stages_requiring_floats_and_unsupported_targets_are_rejected(folder):
    with pytest.raises(InputError) as excinfo:
        load_plan(
            recipe(folder, "factorize: {}", "onnx: {target: tensorrt}", "quantize: {}\n    from: model")
        )
    assert message_locations(excinfo.value.messages) == [
        ("already-quantized", "stages[0].factorize", 5),
        ("unsupported-scheme", "stages[1].onnx", 6),
        ("already-quantized", "stages[2].quantize", 7),
    ]
    _, graph, _ = excinfo.value.messages
    assert all(value in graph.message for value in ("int4", "(gptq)", "target: ort-cpu or openvino"))


def test_float_model_gives_no_quantization_messages(folder):
    harness.smelt("plan", recipe(folder, "prune: {calibration_samples: 4}", model="float"), code=0)


def test_learned_scales_require_quantized_weights(folder):
    learned = "finetune: {qat: {scales: lsq}}"
    assert refused(folder, learned, "quantize: {}", model="float") == [
        ("not-quantized", "stages[0].finetune")
    ]
    harness.smelt("plan", recipe(folder, "quantize: {}", learned, model="float"), code=0)
    harness.smelt("plan", recipe(folder, learned), code=0)  # of GPTQ's codes
    with_adapters = "finetune: {lora: {}, qat: {scales: lsq}}"
    assert refused(folder, with_adapters) == [("settings-conflict", "stages[0].finetune")]
    assert refused(folder, "finetune: {qat: {learning_rate: 0.1}}") == [
        ("unused-setting", "stages[0].finetune.qat")
    ]


@pytest.mark.parametrize("stage", ["finetune", "distill"])
def test_compiled_training_of_quantized_weights_is_rejected(stage, folder, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/c++")
    compiled = f"{stage}: {{torch_compile: true}}"
    assert refused(folder, compiled) == [("settings-conflict", f"stages[0].{stage}")]
    with_adapters = f"{stage}: {{torch_compile: true, lora: {{}}}}"
    for steps, model in (((with_adapters,), "gptq"), ((compiled, "quantize: {}"), "float")):
        harness.smelt("plan", recipe(folder, *steps, model=model), code=0)


def test_unlearnable_scales_are_rejected_by_plan(folder):
    learned = "finetune: {qat: {scales: lsq}}"
    steps = ("quantize: {scheme: bnb-nf4}", "finetune: {}", f"{learned}\n    name: again")
    assert refused(folder, *steps, model="float") == [("scales-not-learned", "stages[2].finetune")]
    assert "bnb-nf4" in text_of(folder, *steps, model="float")
    # of a binary model those of the embeddings
    harness.smelt("plan", recipe(folder, "quantize: {scheme: binary}", learned, model="float"), code=0)
    without_embeddings = "embeddings: false, output_layer: false"
    binary = (f"quantize: {{scheme: binary, {without_embeddings}}}", learned)
    assert refused(folder, *binary, model="float") == [("scales-not-learned", "stages[1].finetune")]
    ternary, split = (
        f"quantize: {{scheme: ternary, {without_embeddings}}}",
        "finetune: {qat: {weight_splitting: true}}",
    )
    halves = (ternary, split, f"{learned}\n    name: again")
    assert refused(folder, *halves, model="float") == [("scales-not-learned", "stages[2].finetune")]
    assert "binary" in text_of(folder, *halves, model="float")


def test_only_ternary_layers_are_split_and_only_once(folder):
    ternary, split = "quantize: {scheme: ternary}", "finetune: {qat: {weight_splitting: true}}"
    twice_split = (ternary, split, f"{split}\n    name: again")
    for stages, model, setting, scheme in (
        (("quantize: {}", split), "float", "stages[1].finetune", "int8-dynamic"),
        (twice_split, "float", "stages[2].finetune", "binary"),
        ((split,), "gptq", "stages[0].finetune", "int4"),
    ):
        assert refused(folder, *stages, model=model) == [("unsupported-scheme", setting)]
        text = text_of(folder, *stages, model=model)
        assert all(value in text for value in (f"are {scheme}.", "scheme: ternary"))
    harness.smelt("plan", recipe(folder, ternary, "finetune: {}", split, model="float"), code=0)


@pytest.mark.parametrize(("more", "code"), [
    ("granularity: channel", "row-scales-not-splittable"),
    ("low_rank_correction: {rank: 2}", "low-rank-not-splittable"), ("low_rank_correction: {rank: 0}", None),
])  # fmt: skip
def test_unsplittable_ternary_layers_are_rejected_by_plan(folder, more, code):
    ternary, split = f"quantize: {{scheme: ternary, {more}}}", "finetune: {qat: {weight_splitting: true}}"
    if code is None:
        harness.smelt("plan", recipe(folder, ternary, split, model="float"), code=0)
    else:
        assert refused(folder, ternary, split, model="float") == [(code, "stages[1].finetune")]


def test_adapters_on_split_layers_are_rejected(folder):
    ternary, split = "quantize: {scheme: ternary}", "finetune: {qat: {weight_splitting: true}}"
    lora = "finetune: {lora: {targets: [ffn]}}\n    name: adapters"
    assert refused(folder, ternary, split, lora, model="float") == [
        ("lora-on-split-layers", "stages[2].finetune")
    ]
    assert refused(folder, ternary, lora, split, model="float") == [
        ("adapters-not-splittable", "stages[2].finetune")
    ]
    # what they go on from was not split, or has float layers, which may be those that are meant
    branched_lora = f"{lora}\n    from: quantize"
    harness.smelt("plan", recipe(folder, ternary, split, branched_lora, model="float"), code=0)
    partial = 'quantize: {scheme: ternary, exclude: ["*.mlp.*"]}'
    harness.smelt("plan", recipe(folder, partial, split, lora, model="float"), code=0)


def test_unsupported_layout_is_rejected_by_plan(folder, tmp_path):
    quantized_checkpoints.write_gptq(folder / "float", tmp_path / "gptq", bits=3)
    (tmp_path / "train.txt").write_text((folder / "train.txt").read_text())
    assert refused(tmp_path, "onnx: {}") == [("unsupported-bits", "model")]
    text = text_of(tmp_path, "onnx: {}")
    assert all(value in text for value in ("gptq", "3 bits", "quantize: {scheme: int4}"))


def test_requantizing_training_warns(folder):
    def warned(*stages, model="gptq"):
        return message_codes(load_plan(recipe(folder, *stages, model=model)).warnings).count(
            "quantized-weights-lost"
        )

    assert warned("finetune: {}", "finetune: {}\n    name: again") == 1
    assert warned("finetune: {}", "distill: {teacher: model}\n    from: model") == 2
    assert warned("finetune: {lora: {}}", "finetune: {}\n    name: again") == 1
    assert warned("finetune: {qat: {scales: dynamic}}") == 1
    assert warned("finetune: {qat: {scales: lsq}}", "onnx: {}") == warned("finetune: {lora: {}}") == 0
    assert warned("onnx: {}") == warned("finetune: {}", model="float") == 0
    assert warned("distill: {teacher: model, student: {model: float}}") == 0  # goes on with floats


def test_quantized_weights_not_matching_config_are_rejected_by_plan(folder, tmp_path):
    quantized_checkpoints.write_gptq(folder / "float", tmp_path / "gptq", group=32, group_size=16)
    (tmp_path / "train.txt").write_text((folder / "train.txt").read_text())
    assert refused(tmp_path, "onnx: {}") == [("shape-mismatch", "model")]
    output = text_of(tmp_path, "onnx: {}")
    assert all(value in output for value in ("96 inputs", "groups of 16", "int32 [6, 8]"))


def test_run_from_quantized_model_warns(folder):
    result = smelt.run(recipe(folder, "onnx: {generation_graph: false}"), out=folder / "run")
    steps = {step["name"]: step for step in result.report["steps"]}
    [warning] = [message for message in steps["model"]["warnings"] if message["code"] == "already-quantized"]
    assert "14 layers" in warning["message"]
    assert steps["onnx"]["status"] == "done"


@pytest.mark.parametrize("setting", ["learned_masks: {keep_ratio: 0.5}", "sparsify: {sparsity: 0.5}"])
def test_zeroing_settings_are_rejected_for_quantized_training(folder, setting):
    assert refused(folder, f"finetune: {{{setting}}}") == [("behind-quantize", "stages[0].finetune")]
    output = text_of(folder, f"finetune: {{{setting}}}")
    assert all(value in output for value in (setting.split(":")[0], "gptq"))


TUNED = "onnx: {autotune: true}"


def autotune_warnings(folder, *stages, model="float"):
    """Return the warnings of the plan on `autotune`."""
    plan = load_plan(recipe(folder, *stages, model=model))
    return [warning for warning in plan.warnings if warning.setting == "autotune"]


def test_autotune_without_quantized_layers_warns(folder):
    (warning,) = autotune_warnings(folder, "prune: {targets: [ffn], importance: magnitude}", TUNED)
    assert (warning.code, warning.line, warning.step) == ("nothing-quantized", 6, "onnx")
    assert autotune_warnings(folder, "onnx: {}") == []


@pytest.mark.parametrize(("scheme", "chooses"), [
    ("{scheme: int8-dynamic}", True), ("{scheme: int4}", True), ("{scheme: int4, accuracy_level: 0}", False),
    ("{scheme: int8-groupwise}", False), ("{scheme: pow2}", False),
    ("{scheme: pow2, embedding_scheme: int4}", True), ("{mixed_precision: {target_bits: 4.5}}", True),
])  # fmt: skip
def test_autotune_of_single_operator_scheme_warns(folder, scheme, chooses):
    warnings = autotune_warnings(folder, f"quantize: {scheme}", "finetune: {}", TUNED)
    assert message_codes(warnings) == ([] if chooses else ["nothing-to-tune"])
    assert all("'quantize'" in warning.message for warning in warnings)


def test_unknown_model_gives_no_autotune_warning(folder):
    assert autotune_warnings(folder, TUNED, model="somebody/model") == []
    (folder / "artifact").mkdir()
    for path in (folder / "float").iterdir():
        (folder / "artifact" / path.name).write_bytes(path.read_bytes())
    edit = '{"schema": 1, "edits": [{"op": "quantize", "module": "lm_head", "scheme": "int4"}]}'
    (folder / "artifact" / "structure.json").write_text(edit)
    assert autotune_warnings(folder, "onnx: {autotune: true}", model="artifact") == []


def test_autotune_considers_checkpoint_but_not_replaced_by_student(folder):
    assert autotune_warnings(folder, TUNED, model="gptq") == []
    other = "distill: {student: {model: float}}"
    assert message_codes(autotune_warnings(folder, "quantize: {scheme: int4}", other, TUNED)) == [
        "nothing-quantized"
    ]


def test_dora_of_quantized_layers_is_rejected(folder):
    lora = "finetune: {lora: {use_dora: true}}"
    assert [code for code, _ in refused(folder, lora)] == ["unsupported-layer"]
    assert [code for code, _ in refused(folder, "quantize: {scheme: int4}", lora, model="float")] == [
        "unsupported-layer"
    ]
    assert load_plan(recipe(folder, lora, model="float")).steps


@pytest.mark.parametrize("option", ["use_dora", "save_adapter"])
def test_adapters_that_fill_zeros_are_rejected_after_sparsify(folder, option):
    lora = f"finetune: {{lora: {{{option}: true, targets: [attention]}}}}"
    sparse = "sparsify: {method: magnitude, targets: [TARGET]}"
    attention, ffn = (sparse.replace("TARGET", target) for target in ("attention", "ffn"))
    expected = [("unsupported-layer", f"stages[1].finetune.lora.{option}")]
    assert refused(folder, attention, lora, model="float") == expected
    trained = "finetune: {sparsify: {targets: [attention]}}"
    assert [code for code, _ in refused(folder, trained, lora, model="float")] == ["unsupported-layer"]
    assert load_plan(recipe(folder, ffn, lora, model="float")).steps
    assert load_plan(recipe(folder, lora, attention, model="float")).steps
