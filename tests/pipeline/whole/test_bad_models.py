"""Model folders that are none: refused in words before any work."""

import json
import shutil
import struct

import causal
import harness
import pytest
from refused_recipes import RECIPE, TRANSLATE, refused

pytest_plugins = ["refused_recipes"]


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
    """Write the header of the weights anew; what follows it stays."""

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
    ("change", "words"),
    [
        (lambda home: (home / "m" / "model.safetensors").unlink(), ("no weights in this folder",)),
        (lambda home: (home / "m" / "model.safetensors").rename(home / "m" / "pytorch_model.bin"),
         ("pickle files (pytorch_model.bin), which can run any code",)),
        (lambda home: (home / "m" / "vocab.txt").unlink(), ("no tokenizer",)),
        (lambda home: (home / "m" / "config.json").unlink(), ("no config.json in this folder",)),
        (_write("m/config.json", "{'single': 'quotes'}"), ("config.json: broken JSON: ",)),
        (_write("m/config.json", b"\xff\xfe"), ("config.json: broken JSON: ",)),
        (_write("m/config.json", "[1, 2]"), ("expected a JSON object with a model_type",)),
        (_config(model_type="mamba"), ("model_type 'mamba' is no family of models that this version knows",)),
        (_write("m/model.safetensors", b"\xff" * 64), ("not a safetensors file",)),
        (_write("m/model.safetensors", struct.pack("<Q", 2**63) + b"{}"), ("not a safetensors file",)),
        (_write("m/model.safetensors", struct.pack("<Q", 12) + b'{"a": [1, 2]' + b"x" * 20),
         ("not a safetensors file",)),
        (_header(_no_offsets), ("not a safetensors file",)),
        (_header(_wrong_bytes), ("a damaged header: the tensor 'classifier.weight' is said to be F32 [3, 32]",)),  # noqa: E501
        (_header(_swap_shape), (f"the tensor '{EMBEDDING}' is [32,", "and config.json asks for [", "(vocab_size")),  # noqa: E501
        (_config(vocab_size=20), ("config.json asks for [20, 32]",)),
        (_write("m/tokenizer_config.json", "{"), ("tokenizer_config.json: broken JSON",)),
        (_write("m/vocab.txt", "\n".join(f"w{i}" for i in range(900))),
         ("the tokenizer does not belong to this model: it gives token ids up to 899, and the embedding has",)),  # noqa: E501
    ],
)  # fmt: skip
def test_model_folders_that_are_none(home, change, words):
    change(home)
    refused(home, None, "recipe.yaml:1: model: ", *words)


def test_a_marian_whose_vocabulary_is_larger_than_its_embedding_is_refused(home):
    path = home / "t" / "vocab.json"
    words = json.loads(path.read_text())
    path.write_text(json.dumps(words | {"one-more": len(words)}))
    refused(home, TRANSLATE, "the tokenizer does not belong to this model", f"up to {len(words)}, and")


def test_a_tokenizer_that_knows_few_of_the_tokens_is_warned_about(home):
    (home / "m" / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    (home / "m" / "tokenizer.json").unlink(missing_ok=True)
    result = harness.smelt("plan", home / "recipe.yaml")
    assert result.exit_code == 0
    assert "the tokenizer knows 6 tokens and the embedding has" in result.output


def test_a_shape_deep_inside_is_named_before_any_stage_works(home):
    from safetensors.numpy import load_file, save_file

    path = home / "m" / "model.safetensors"
    tensors = load_file(path)
    name = "bert.encoder.layer.1.intermediate.dense.weight"
    tensors[name] = tensors[name][:-1].copy()
    save_file(tensors, path, metadata={"format": "pt"})
    refused(home, None, f"the tensor '{name}' is [63, 32], and its place is [64, 32].", command="run")
    assert not (home / "r" / "report.json").exists()


LANGUAGE = "model: l\ntask: language-modeling\ndata: {train: t.txt, test: t.txt}\nscore: {latency: false}\n"


@pytest.mark.parametrize(
    ("folder", "recipe", "name"),
    [
        ("l", LANGUAGE + "stages: [{prune: {keep: 0.5}}]\n", "model.layers.1.mlp.up_proj.weight"),
        ("l", LANGUAGE + "stages: [{quantize: {scheme: int4}}]\n", "model.layers.1.mlp.up_proj.weight"),
        ("m", RECIPE, "bert.encoder.layer.1.intermediate.dense.weight"),
        ("t", TRANSLATE.replace("prune: {keep: 0.5}", "quantize: {}"), "model.decoder.layers.0.fc1.weight"),
    ],
)
def test_weights_that_are_no_numbers_are_named_in_the_users_own_folder(home, folder, recipe, name):
    from safetensors.torch import load_file, save_file

    causal.model(home / "l", "llama")
    causal.lines(home / "t.txt", 2)
    path = home / folder / "model.safetensors"
    tensors = load_file(path)
    tensors[name][3, 2] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    said = refused(home, recipe, f"{path}: the tensor '{name}' holds 1 NaN among", command="run")
    assert ".store" not in said
    assert not (home / "r" / "report.json").exists()


@pytest.mark.parametrize(
    ("setting", "tensor", "new_head"),
    [
        ("teacher: {model: other}", "bert.encoder.layer.1.intermediate.dense.weight", False),
        ("teacher: [{model: m}, {model: other}]", "classifier.weight", False),
        ("student: other", "bert.encoder.layer.1.intermediate.dense.weight", True),
    ],
)
def test_a_teacher_or_student_that_is_no_numbers_is_named_before_any_step(home, setting, tensor, new_head):
    from safetensors.torch import load_file, save_file

    shutil.copytree(home / "m", home / "other")
    path = home / "other" / "model.safetensors"
    tensors = load_file(path)
    tensors[tensor][0, 2] = float("nan")
    if new_head:  # which is drawn anew: what the file has of the one before is not read
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
    said = refused(home, recipe, f"step 'distill': {path}: the tensor '{tensor}' holds 1 NaN", command="run")
    assert f"recipe.yaml:{line}: " in said
    assert "others" not in said
    assert not (home / "r").exists() or not list((home / "r").glob("artifacts/prune"))


def _distilled(setting):
    return f"{RECIPE[: RECIPE.index('stages:')]}stages: [{{prune: {{}}}}, {{distill: {{{setting}}}}}]\n"


@pytest.mark.parametrize("setting", ["teacher: {model: other}", "student: {model: other}"])
def test_a_folder_that_is_no_torch_model_is_refused_by_the_plan_under_the_name_that_was_given(home, setting):
    shutil.copytree(home / "m", home / "stored")
    (home / "other").symlink_to(home / "stored")  # as a run's artifacts lie in its store
    assert harness.smelt("plan", _written(home, _distilled(setting))).exit_code == 0
    weights = home / "stored" / "model.safetensors"
    weights.rename(home / "stored" / "encoder.onnx")
    said = refused(home, _distilled(setting), f"{home / 'other'}: no weights in this folder; expected model.")
    assert said.count("other") == 1
    assert "It has graphs (encoder.onnx), which have no weights for torch." in said
    (home / "other").unlink()
    (home / "other").touch()
    said = refused(home, _distilled(setting), f"{home / 'other'}: not a folder; expected a model's folder")
    assert "hub" not in said  # from where only `model:` is fetched


def test_a_folder_in_the_place_of_a_step_is_told_how_to_name_it(home):
    said = refused(home, _distilled("teacher: m"), "distill.teacher: no earlier step 'm'.")
    assert "A model in a folder is named as `{model: m}`." in said
    several = refused(home, _distilled("teacher: [model, m]"), "no earlier step 'm'")
    assert "A model in a folder is named as `{model: m}`." in several
    (home / "graphs").mkdir()  # an artifact without weights for torch, which teaches nobody
    (home / "graphs" / "config.json").write_text((home / "m" / "config.json").read_text())
    for other in ("nobody", "data.jsonl", "graphs"):
        told = refused(home, _distilled(f"teacher: {other}"), f"no earlier step '{other}'")
        assert "A model in a folder" not in told


def _written(home, recipe):
    path = home / "recipe.yaml"
    path.write_text(recipe)
    return path


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"num_attention_heads": 5}, "multiple of the number of attention heads"),
        ({"hidden_size": "wide"}, "config.json"),
    ],
)
def test_configs_that_transformers_makes_nothing_of(home, values, word):
    _config(**values)(home)
    refused(home, None, "config.json", word, command="run")


def test_a_config_that_names_no_class_of_models_is_refused(home):
    path = home / "t" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["pipeline"]}))
    refused(home, TRANSLATE, "'architectures' is ['pipeline']; expected one class", command="run")
