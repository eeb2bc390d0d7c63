"""Model folders that are none: refused in words before any work."""

import json
import shutil
import struct

import pytest

from smelt.pipeline.plan.load_plan import load_plan
from tests.support import harness
from tests.support.expected_errors import message_locations
from tests.support.models import causal
from tests.support.standins.invalid_recipes import RECIPE, TRANSLATION_RECIPE, assert_refused

pytest_plugins = ["tests.support.standins.invalid_recipes"]


def _write(name, content):
    def change(home):
        path = home / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return change


def _config(**values):
    def change(home):
        path = home / "m" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def _header(change_header):
    """Write the header of the weights again; what follows it stays."""

    def change(home):
        path = home / "m" / "model.safetensors"
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        change_header(header)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])

    return change


EMBEDDING = "bert.embeddings.word_embeddings.weight"


def _swap_shape(header):
    header[EMBEDDING]["shape"].reverse()


def _wrong_bytes(header):
    header["classifier.weight"]["shape"] = [3, 32]


def _no_offsets(header):
    del header["classifier.weight"]["data_offsets"]


@pytest.mark.parametrize(
    ("change", "code", "named"),
    [
        (lambda home: (home / "m" / "model.safetensors").unlink(), "missing-weights", ()),
        (lambda home: (home / "m" / "model.safetensors").rename(home / "m" / "pytorch_model.bin"),
         "pickled-weights", ("(pytorch_model.bin)",)),
        (_write("m/config.json", "{'single': 'quotes'}"), "invalid-json", ("config.json: ",)),
        (_write("m/config.json", b"\xff\xfe"), "invalid-json", ("config.json: ",)),
        (_config(model_type="mamba"), "unsupported-family", ("'mamba'",)),
        (_write("m/model.safetensors", b"\xff" * 64), "damaged-weights", ()),
        (_write("m/model.safetensors", struct.pack("<Q", 2**63) + b"{}"), "damaged-weights", ()),
        (_write("m/model.safetensors", struct.pack("<Q", 12) + b'{"a": [1, 2]' + b"x" * 20),
         "damaged-weights", ()),
        (_header(_no_offsets), "damaged-weights", ()),
        (_header(_wrong_bytes), "damaged-header", ("'classifier.weight'", "F32 [3, 32]")),
        (_header(_swap_shape), "shape-mismatch", (f"'{EMBEDDING}'", "[32,")),
        (_write("m/tokenizer_config.json", "{"), "invalid-json", ("tokenizer_config.json: ",)),
        (_write("m/vocab.txt", "\n".join(f"w{i}" for i in range(900))),
         "tokenizer-mismatch", ("up to 899,",)),
    ],
)  # fmt: skip
def test_invalid_model_folders_are_rejected(home, change, code, named):
    change(home)
    error = assert_refused(home, None, code)
    assert message_locations(error.messages) == [(code, "model", 1)]
    assert [value for value in named if value not in str(error)] == []


def test_config_with_other_vocab_size_is_rejected(home):
    _config(vocab_size=20)(home)
    assert "[20, 32]" in str(assert_refused(home, None, "shape-mismatch", "tokenizer-mismatch"))


def test_marian_vocabulary_larger_than_embedding_is_rejected(home):
    path = home / "t" / "vocab.json"
    vocabulary = json.loads(path.read_text())
    path.write_text(json.dumps(vocabulary | {"one-more": len(vocabulary)}))
    assert f"up to {len(vocabulary)}," in str(assert_refused(home, TRANSLATION_RECIPE, "tokenizer-mismatch"))


def test_tokenizer_with_few_tokens_warns(home):
    (home / "m" / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    (home / "m" / "tokenizer.json").unlink(missing_ok=True)
    [warning] = [
        message
        for message in load_plan(home / "recipe.yaml").warnings
        if message.code == "tokenizer-much-smaller"
    ]
    assert "6 tokens" in warning.message


def test_wrong_tensor_shape_is_reported_before_any_stage(home):
    from safetensors.numpy import load_file, save_file

    path = home / "m" / "model.safetensors"
    tensors = load_file(path)
    name = "bert.encoder.layer.1.intermediate.dense.weight"
    tensors[name] = tensors[name][:-1].copy()
    save_file(tensors, path, metadata={"format": "pt"})
    error = assert_refused(home, None, "shape-mismatch", command="run")
    assert all(value in str(error) for value in (f"'{name}'", "[63, 32]", "[64, 32]"))
    assert not (home / "r" / "report.json").exists()


LANGUAGE = "model: l\ntask: language-modeling\ndata: {train: t.txt, test: t.txt}\nscore: {latency: false}\n"


@pytest.mark.parametrize(("folder", "recipe", "name"), [
    ("l", LANGUAGE + "stages: [{prune: {keep_ratio: 0.5}}]\n", "model.layers.1.mlp.up_proj.weight"),
    ("l", LANGUAGE + "stages: [{quantize: {scheme: int4}}]\n", "model.layers.1.mlp.up_proj.weight"),
    ("m", RECIPE, "bert.encoder.layer.1.intermediate.dense.weight"),
    ("t", TRANSLATION_RECIPE.replace("prune: {keep_ratio: 0.5}", "quantize: {}"),
     "model.decoder.layers.0.fc1.weight"),
])  # fmt: skip
def test_non_finite_weights_are_reported_in_user_folder(home, folder, recipe, name):
    from safetensors.torch import load_file, save_file

    causal.write_model(home / "l", "llama")
    causal.write_lines(home / "t.txt", 2)
    path = home / folder / "model.safetensors"
    tensors = load_file(path)
    tensors[name][3, 2] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    message = str(assert_refused(home, recipe, "non-finite-weights", command="run"))
    assert all(value in message for value in (f"{path}: ", f"'{name}'", "1 NaN"))
    assert ".store" not in message
    assert not (home / "r" / "report.json").exists()


@pytest.mark.parametrize(("setting", "tensor", "new_head"), [
    ("teacher: {model: other}", "bert.encoder.layer.1.intermediate.dense.weight", False),
    ("teacher: [{model: m}, {model: other}]", "classifier.weight", False),
    ("student: other", "bert.encoder.layer.1.intermediate.dense.weight", True),
])  # fmt: skip
def test_non_finite_teacher_or_student_is_reported_before_any_step(home, setting, tensor, new_head):
    from safetensors.torch import load_file, save_file

    shutil.copytree(home / "m", home / "other")
    path = home / "other" / "model.safetensors"
    tensors = load_file(path)
    tensors[tensor][0, 2] = float("nan")
    if new_head:  # which is drawn again: what the file has of the one before is not read
        config = json.loads((home / "other" / "config.json").read_text())
        (home / "other" / "config.json").write_text(
            json.dumps(config | {"architectures": ["BertForMaskedLM"]})
        )
        tensors["cls.predictions.bias"] = tensors.pop("classifier.bias") * float("inf")
        del tensors["classifier.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    stages = f"stages:\n  - prune: {{}}\n  - distill: {{{setting}, max_steps: 1}}\n"
    recipe = RECIPE[: RECIPE.index("stages:")] + stages + "score: {latency: false}\n"
    line = recipe.splitlines().index(next(row for row in recipe.splitlines() if "distill" in row)) + 1
    error = assert_refused(home, recipe, "non-finite-weights", command="run")
    assert (error.file, error.line) == (str(home / "recipe.yaml"), line)
    assert all(value in str(error) for value in ("'distill': ", f"{path}: ", f"'{tensor}'", "1 NaN"))
    assert "others" not in str(error)
    assert not (home / "r").exists() or not list((home / "r").glob("artifacts/prune"))


def _distilled(setting):
    return f"{RECIPE[: RECIPE.index('stages:')]}stages: [{{prune: {{}}}}, {{distill: {{{setting}}}}}]\n"


@pytest.mark.parametrize("setting", ["teacher: {model: other}", "student: {model: other}"])
def test_invalid_teacher_folder_is_rejected_by_plan_under_given_name(home, setting):
    shutil.copytree(home / "m", home / "stored")
    (home / "other").symlink_to(home / "stored")  # as a run's artifacts lie in its store
    assert harness.smelt("plan", _written(home, _distilled(setting))).exit_code == 0
    weights = home / "stored" / "model.safetensors"
    weights.rename(home / "stored" / "encoder.onnx")
    message = str(assert_refused(home, _distilled(setting), "missing-weights"))
    assert f"{home / 'other'}: " in message
    assert message.count("other") == 1
    assert "(encoder.onnx)" in message
    (home / "other").unlink()
    (home / "other").touch()
    message = str(assert_refused(home, _distilled(setting), "not-a-folder"))
    assert f"{home / 'other'}: " in message
    assert "hub" not in message  # from where only `model:` is fetched


def test_folder_used_as_step_name_suggests_model_key(home):
    for teacher, suffix in (("m", ""), ("[model, m]", "[1]")):
        error = assert_refused(home, _distilled(f"teacher: {teacher}"), "unknown-step")
        assert [problem.setting for problem in error.messages] == [f"stages[1].distill.teacher{suffix}"]
        assert "`{model: m}`" in str(error)
    (home / "graphs").mkdir()  # an artifact without weights for torch, which teaches nobody
    (home / "graphs" / "config.json").write_text((home / "m" / "config.json").read_text())
    for other in ("nobody", "data.jsonl", "graphs"):
        message = str(assert_refused(home, _distilled(f"teacher: {other}"), "unknown-step"))
        assert f"'{other}'" in message
        assert "`{model: " not in message


def _written(home, recipe):
    path = home / "recipe.yaml"
    path.write_text(recipe)
    return path


@pytest.mark.parametrize("values", [{"num_attention_heads": 5}, {"hidden_size": "wide"}])
def test_configs_rejected_by_transformers_are_reported(home, values):
    _config(**values)(home)
    assert "config.json" in str(assert_refused(home, None, "wrong-config", command="run"))


def test_config_with_unknown_architecture_is_rejected(home):
    path = home / "t" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["pipeline"]}))
    error = assert_refused(home, TRANSLATION_RECIPE, "unknown-architecture", command="run")
    assert "['pipeline']" in str(error)
