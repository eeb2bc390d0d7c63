"""What cannot follow a checkpoint of codes is said by the plan; and a whole run starts from one."""

import causal
import coded
import harness
import pytest

import smelt

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
    coded.gptq(causal.model(folder / "float", "llama"), folder / "gptq", symmetric=False)
    causal.lines(folder / "train.txt", 1)
    return folder


def recipe(folder, *stages, model="gptq"):
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.replace("MODEL", model).replace("STAGES", "\n".join(f"  - {s}" for s in stages)))
    return path


def test_stages_that_need_floats_and_targets_without_such_codes_are_refused(folder):
    path = recipe(folder, "factorize: {}", "onnx: {target: tensorrt}", "quantize: {}\n    from: model")
    told = harness.smelt("plan", path, code=2).stderr
    made = "the weights of the model are gptq codes; start from the model that these were made of"
    assert f"stages[0].factorize: factorize works on floats, and {made}" in told
    assert f"stages[2].quantize: quantize works on floats, and {made}" in told
    assert "stages[1].onnx: TensorRT cannot run the int4 codes (MatMulNBits) of the model (gptq)" in told
    assert "give target: ort-cpu or openvino" in told


def test_of_a_float_model_nothing_is_said(folder):
    harness.smelt("plan", recipe(folder, "prune: {rows: 4}", model="float"), code=0)


def test_learned_scales_need_codes(folder):
    learned = "finetune: {codes: {scales: lsq}}"
    told = harness.smelt("plan", recipe(folder, learned, "quantize: {}", model="float"), code=2).stderr
    assert "stages[0].finetune: codes says how a quantized model trains, and nothing is quantized" in told
    harness.smelt("plan", recipe(folder, "quantize: {}", learned, model="float"), code=0)
    harness.smelt("plan", recipe(folder, learned), code=0)  # of GPTQ's codes
    with_adapters = "finetune: {lora: {}, codes: {scales: lsq}}"
    told = harness.smelt("plan", recipe(folder, with_adapters), code=2).stderr
    assert "with lora codes stay as they are" in told
    told = harness.smelt("plan", recipe(folder, "finetune: {codes: {learning_rate: 0.1}}"), code=2).stderr
    assert "learning_rate is that of scales: lsq and activations: one-bit" in told


def test_scales_that_cannot_be_learned_are_said_before_work(folder):
    learned = "finetune: {codes: {scales: lsq}}"
    steps = ("quantize: {scheme: bnb-nf4}", "finetune: {}", f"{learned}\n    name: again")
    nf4 = recipe(folder, *steps, model="float")
    told = harness.smelt("plan", nf4, code=2).stderr
    assert "stages[2].finetune: codes: scales: lsq learns the scales of codes, and bnb-nf4 has none" in told
    # of a binary model those of the embeddings
    harness.smelt("plan", recipe(folder, "quantize: {scheme: binary}", learned, model="float"), code=0)
    alone = "embeddings: false, head: false"
    binary = recipe(folder, f"quantize: {{scheme: binary, {alone}}}", learned, model="float")
    assert "and binary has none" in harness.smelt("plan", binary, code=2).stderr
    ternary, split = f"quantize: {{scheme: ternary, {alone}}}", "finetune: {codes: {split: true}}"
    halves = recipe(folder, ternary, split, f"{learned}\n    name: again", model="float")
    assert "and binary has none" in harness.smelt("plan", halves, code=2).stderr


def test_only_ternary_layers_are_split_and_only_once(folder):
    ternary, split = "quantize: {scheme: ternary}", "finetune: {codes: {split: true}}"
    told = harness.smelt("plan", recipe(folder, "quantize: {}", split, model="float"), code=2).stderr
    assert "codes: split makes two layers of each ternary one, and those before it are int8-dynamic" in told
    harness.smelt("plan", recipe(folder, ternary, "finetune: {}", split, model="float"), code=0)
    twice = recipe(folder, ternary, split, f"{split}\n    name: again", model="float")
    assert "those before it are binary" in harness.smelt("plan", twice, code=2).stderr
    assert "before it are int4" in harness.smelt("plan", recipe(folder, split), code=2).stderr  # GPTQ's


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("granularity: row", "a scale for each row, and their halves one for each group"),
        ("low_rank: {rank: 2}", "a low-rank pair beside their codes, which cannot be split"),
        ("low_rank: {rank: 0}", None),
    ],
)
def test_ternary_layers_that_cannot_be_split_are_said_before_work(folder, more, said):
    ternary, split = f"quantize: {{scheme: ternary, {more}}}", "finetune: {codes: {split: true}}"
    path = recipe(folder, ternary, split, model="float")
    told = " ".join(harness.smelt("plan", path, code=2 if said else 0).stderr.split())
    assert said is None or said in told


def test_adapters_and_halves_of_layers_are_kept_apart(folder):
    ternary, split = "quantize: {scheme: ternary}", "finetune: {codes: {split: true}}"
    lora = "finetune: {lora: {targets: [ffn]}}\n    name: adapters"
    path = recipe(folder, ternary, split, lora, model="float")
    told = " ".join(harness.smelt("plan", path, code=2).stderr.split())
    assert "stages[2].finetune: lora: adapters stand beside layers of codes" in told
    told = harness.smelt("plan", recipe(folder, ternary, lora, split, model="float"), code=2).stderr
    assert "stages[2].finetune: codes: split: the layers before it have adapters beside their codes" in told
    # what they go on from was not split, or has float layers, which may be those that are meant
    apart = f"{lora}\n    from: quantize"
    harness.smelt("plan", recipe(folder, ternary, split, apart, model="float"), code=0)
    part = 'quantize: {scheme: ternary, skip: ["*.mlp.*"]}'
    harness.smelt("plan", recipe(folder, part, split, lora, model="float"), code=0)


def test_binary_inputs_are_for_binary_layers_alone(folder):
    binary, both = "quantize: {scheme: binary}", "finetune: {codes: {activations: one-bit}}"
    again = f"{both}\n    name: again"

    def refused(said, *steps, model="float"):
        told = harness.smelt("plan", recipe(folder, *steps, model=model), code=2).stderr
        assert said in " ".join(told.split())

    need = "finetune: codes: activations: one-bit is for layers of scheme binary, and those before it are"
    refused(f"stages[1].{need} int8-dynamic; quantize with scheme: binary", "quantize: {}", both)
    refused(f"stages[0].{need} int4", both, model="gptq")
    refused("codes says how a quantized model trains, and nothing is quantized", both, binary)
    refused("a low-rank pair beside their codes", "quantize: {scheme: binary, low_rank: {rank: 2}}", both)
    refused("a low-rank pair beside their codes", binary, "finetune: {lora: {}}", again)
    refused("with lora codes stay as they are", binary, "finetune: {lora: {}, codes: {activations: one-bit}}")
    # a graph leaves where the codes do
    openvino = "OpenVINO cannot run the binary codes (MatMulNBits)"
    refused(openvino, binary, both, "onnx: {target: openvino}")
    refused(need, "quantize: {scheme: ternary}", both)
    split = recipe(
        folder,
        "quantize: {scheme: ternary}",
        "finetune: {codes: {split: true, activations: one-bit}}",
        model="float",
    )
    harness.smelt("plan", split, code=0)


def test_that_binary_inputs_gain_no_speed_is_said_before_work(folder):
    both = "finetune: {codes: {activations: one-bit}}"
    made = recipe(
        folder, "quantize: {scheme: binary}", "finetune: {}", f"{both}\n    name: both", model="float"
    )
    told = " ".join(harness.smelt("plan", made, code=0).output.split())
    assert told.count("both: codes: activations: one-bit costs quality and gains no speed") == 1
    assert "finetune: codes: activations" not in told
    assert "gains no speed" in harness.smelt("stages", "finetune").output


def test_a_layout_that_is_not_read_is_said_before_work(folder, tmp_path):
    coded.gptq(folder / "float", tmp_path / "gptq", bits=3)
    (tmp_path / "train.txt").write_text((folder / "train.txt").read_text())
    told = harness.smelt("plan", recipe(tmp_path, "onnx: {}"), code=2).stderr
    assert "gptq codes of 3 bits; smelt reads 4" in told
    assert "start from the float model and quantize: {scheme: int4}" in told


def test_a_training_that_decides_the_codes_anew_is_warned_of(folder):
    told = "and those that gptq chose with care are lost; codes: {scales: lsq} starts from these"

    def warned(*stages, model="gptq"):
        output = harness.smelt("plan", recipe(folder, *stages, model=model), code=0).output
        return " ".join(output.split()).count(told)

    assert warned("finetune: {}", "finetune: {}\n    name: again") == 1
    assert warned("finetune: {}", "distill: {teacher: model}\n    from: model") == 2
    assert warned("finetune: {lora: {}}", "finetune: {}\n    name: again") == 1
    assert warned("finetune: {codes: {scales: follow}}") == 1
    assert warned("finetune: {codes: {scales: lsq}}", "onnx: {}") == warned("finetune: {lora: {}}") == 0
    assert warned("onnx: {}") == warned("finetune: {}", model="float") == 0
    assert warned("distill: {teacher: model, student: {model: float}}") == 0  # goes on with floats


def test_codes_that_do_not_fit_their_config_are_said_before_work(folder, tmp_path):
    coded.gptq(folder / "float", tmp_path / "gptq", group=32, group_size=16)
    (tmp_path / "train.txt").write_text((folder / "train.txt").read_text())
    told = " ".join(harness.smelt("plan", recipe(tmp_path, "onnx: {}"), code=2).stderr.split())
    assert "codes of a layer of 96 inputs" in told
    assert "in groups of 16, have int32 [6, 8]" in told


def test_a_run_starts_from_codes_and_says_so(folder):
    result = smelt.run(recipe(folder, "onnx: {loop: false}"), out=folder / "run")
    steps = {step["name"]: step for step in result.report["steps"]}
    assert "gptq codes are taken as they are: 14 layers" in " ".join(steps["model"]["warnings"])
    assert steps["onnx"]["status"] == "done"


@pytest.mark.parametrize("setting", ["masks: {keep: 0.5}", "sparsify: {sparsity: 0.5}"])
def test_zeros_of_a_training_are_of_floats(folder, setting):
    told = harness.smelt("plan", recipe(folder, f"finetune: {{{setting}}}"), code=2).stderr
    word = setting.split(":")[0]
    assert f"{word} works on floats, and the weights of the model are gptq codes" in " ".join(told.split())
