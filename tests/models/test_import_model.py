"""The first artifact is the model and nothing that is next to it."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForTokenClassification,
    BartModel,
    BertForPreTraining,
    MarianMTModel,
)

import smelt
from smelt.core.errors import InputError
from smelt.core.messages import message_codes
from smelt.models.checkpoint import load_model
from smelt.models.import_model import import_model
from smelt.models.model_size import count_parameters
from smelt.models.weight_files import source_files
from smelt.pipeline.inspect.model_info import inspect_model
from tests.support.expected_errors import raises_code
from tests.support.models import classifiers, embedders, seq2seq, tiny


@pytest.fixture
def out(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def _tensors(folder):
    return load_model(folder)[0].state_dict()


def _require_same(folder, expected):
    tensors = _tensors(folder)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def _split(folder):
    """Split the weights over several files with an index; return the files' names."""
    size = (folder / "model.safetensors").stat().st_size
    MarianMTModel.from_pretrained(folder).save_pretrained(folder, max_shard_size=size // 3)
    (folder / "model.safetensors").unlink()  # which transformers leaves there
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(shards) > 2
    return shards


def test_stray_files_are_not_imported(tmp_path, out):
    folder = tiny.write_marian(tmp_path / "m")
    expected, count = _tensors(folder), count_parameters(folder)
    before = [path.name for path in source_files(folder)]
    tensors = {name: tensor + 1 for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors | {"stray": torch.zeros(9)}, folder / "model.variant.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    (folder / "pytorch_model.bin").write_bytes(b"x")
    (folder / "README.md").write_text("x")
    assert [path.name for path in source_files(folder)] == before
    import_model(folder, out)
    assert sorted(path.name for path in out.iterdir()) == before
    _require_same(out, expected)
    assert count_parameters(out) == count


def test_license_next_to_model_is_ignored(tmp_path):
    tiny.write_bert(tmp_path / "m")
    for name in ("LICENSE.txt", "requirements.txt", "dict.txt"):
        (tmp_path / "m" / name).write_text("not of the model")
    tiny.write_labeled(tmp_path / "data.jsonl", 6)
    (tmp_path / "recipe.yaml").write_text(
        "model: m\ntask: text-classification\ndata: {test: data.jsonl}\nstages: [onnx]\n"
        "score: {latency: false}\n"
    )
    result = smelt.run(tmp_path / "recipe.yaml", out=tmp_path / "run", quiet=True)
    assert result.exit_code == 0
    for step in ("model", "onnx"):
        assert {path.name for path in (tmp_path / "run" / "artifacts" / step).glob("*.txt")} == {"vocab.txt"}


def test_shards_are_imported_with_index(tmp_path, out):
    folder = tiny.write_marian(tmp_path / "m")
    expected, count = _tensors(folder), count_parameters(folder)
    shards = _split(folder)
    save_file({"model.shared.weight": torch.zeros(3)}, folder / "a-stray.safetensors")
    import_model(folder, out)
    assert sorted(path.name for path in out.glob("*.safetensors")) == shards
    assert (out / "model.safetensors.index.json").is_file()
    _require_same(out, expected)
    assert count_parameters(out) == count


HEADS = {
    # as bert-base-uncased, roberta-base and distilbert-base-uncased are stored
    "bert": BertForPreTraining, "roberta": AutoModelForMaskedLM, "distilbert": AutoModelForMaskedLM,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "bare"), [("bert", False), ("roberta", False), ("distilbert", False), ("bert", True)]
)
def test_pretraining_head_is_dropped(tmp_path, out, family, bare):
    folder = classifiers.MAKERS[family](tmp_path / "m")
    (AutoModel if bare else HEADS[family]).from_pretrained(folder).save_pretrained(folder)
    body = {k: v for k, v in AutoModel.from_pretrained(folder).state_dict().items() if "pooler" not in k}
    notes = import_model(folder, out, labels=["bad", "good", "other"])
    assert message_codes(notes) == ["new-classifier"]
    tensors = _tensors(out)
    assert all(torch.equal(tensors[f"{family}.{name}"], body[name]) for name in body)


def test_encoder_gets_head_of_any_name(tmp_path, out):
    folder = classifiers.MAKERS["roberta"](tmp_path / "m")
    AutoModel.from_pretrained(folder).save_pretrained(folder)
    auto_class = "AutoModelForQuestionAnswering"
    assert message_codes(import_model(folder, out, ["start", "end"], auto_class=auto_class)) == [
        "new-classifier"
    ]
    assert _tensors(out)["qa_outputs.weight"].shape[0] == 2


def test_unknown_tensor_of_bare_encoder_is_rejected(tmp_path, out):
    folder = classifiers.MAKERS["roberta"](tmp_path / "m")
    AutoModel.from_pretrained(folder).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors") | {"my_position_adapter.weight": torch.ones(2)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with raises_code("unknown-tensor", InputError) as caught:
        import_model(folder, out, labels=["bad", "good"])
    assert "my_position_adapter.weight" in str(caught.value)


def test_missing_weight_of_bare_encoder_is_rejected(tmp_path, out):
    folder = classifiers.distilbert(tmp_path / "m")
    AutoModel.from_pretrained(folder).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["transformer.layer.1.ffn.lin1.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with raises_code("missing-tensor", InputError) as caught:
        import_model(folder, out, labels=["bad", "good"])
    assert "distilbert.transformer.layer.1.ffn.lin1.weight" in str(caught.value)


def test_token_classifier_becomes_text_classifier(tmp_path, out):
    """Its head has other shapes."""
    folder = classifiers.distilbert(tmp_path / "m", labels=5)
    AutoModelForTokenClassification.from_pretrained(folder).save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["architectures"] == [
        "DistilBertForTokenClassification"
    ]
    import_model(folder, out, labels=["bad", "good"])
    assert load_model(out)[0].classifier.out_features == 2


def test_wrong_shape_in_bare_encoder_is_rejected(tmp_path, out):
    folder = classifiers.distilbert(tmp_path / "m")
    AutoModel.from_pretrained(folder).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.layer.1.ffn.lin1.weight"] = torch.zeros(3, 32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with raises_code("shape-mismatch", InputError) as caught:
        import_model(folder, out, labels=["bad", "good"])
    parts = (str(folder), "'distilbert.transformer.layer.1.ffn.lin1.weight'", "[3, 32]", "[64, 32]")
    assert all(part in str(caught.value) for part in parts)


@pytest.mark.parametrize(("change", "code", "named"), [
    ({"my_position_adapter.weight": torch.ones(2)}, "unknown-tensor", "my_position_adapter.weight"),
    ({"encoder.layers.1.fc1.weight": None}, "missing-tensor", "model.encoder.layers.1.fc1.weight"),
    ({"encoder.layers.1.fc1.weight": torch.ones(3, 3)}, "shape-mismatch", "fc1.weight' is [3, 3]"),
    ({"encoder.version": torch.ones(1)}, None, ""),
])  # fmt: skip
def test_bare_seq2seq_model_is_checked_for_tensors(tmp_path, out, change, code, named):
    folder = seq2seq.write_bart(tmp_path / "m")
    BartModel.from_pretrained(folder).save_pretrained(folder)
    tensors = {k: v for k, v in (load_file(folder / "model.safetensors") | change).items() if v is not None}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if code is None:
        assert message_codes(import_model(folder, out)) == ["tied-output-head"]
        return
    with raises_code(code, InputError) as caught:
        import_model(folder, out)
    assert named in str(caught.value)


def test_classifier_from_embedder_has_no_embedder_files(tmp_path, out):
    source = embedders.write_embedder(tmp_path / "model")
    (source / "config_sentence_transformers.json").write_text('{"prompts": {}}')
    import_model(source, out, ["no", "yes"], 0)
    assert not {"modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"} & {
        path.name for path in out.iterdir()
    }
    assert not (out / "1_Pooling").exists()
    model, _ = load_model(out)
    assert count_parameters(out) == sum(p.numel() for p in model.parameters())  # the pooler is used
    assert inspect_model(str(out)).task == "text-classification"  # as `smelt init` looks at it
