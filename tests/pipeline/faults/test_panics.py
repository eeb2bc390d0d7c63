"""A panic of the tokenizers library, which is no Exception, is an explained error everywhere."""

import hashlib
import json
import shutil

import pytest
from transformers import BertTokenizer

import smelt
from smelt.core.errors import RunError
from smelt.core.files import write_hashed_json
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.graphs import exported_artifacts
from tests.support.models import tiny

TEXT = "a" * 60 + "!"
SPLIT = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}


def panicking(folder):
    """Have the tokenizer of the model or artifact in `folder` panic at TEXT, and no other text."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["normalizer"] = None
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, SPLIT]}
    path.write_text(json.dumps(content))
    if (folder / "manifest.json").is_file():
        manifest = json.loads((folder / "manifest.json").read_text())
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        manifest["files"][path.name] = {"sha256": digest, "size_bytes": path.stat().st_size}
        write_hashed_json(folder / "manifest.json", manifest)


@pytest.fixture
def artifact(tmp_path):
    shutil.copytree(exported_artifacts.exported_artifact("classifier").resolve(), tmp_path / "a")
    panicking(tmp_path / "a")
    return tmp_path / "a"


def test_predict_reports_library_panic_with_exit_code_1(artifact):
    assert harness.smelt("predict", artifact, "a man", code=0)
    assert "error[library-panic]: " in harness.smelt("predict", artifact, TEXT, code=1).output


def test_loaded_model_raises_library_panic_and_works_afterwards(artifact):
    with smelt.load(artifact) as model:
        with raises_code("library-panic", RunError):
            model.predict([TEXT])
        assert len(model.predict(["a man"])) == 1


def test_run_reports_library_panic(tmp_path):
    tiny.write_bert(tmp_path / "m")
    BertTokenizer.from_pretrained(tmp_path / "m").save_pretrained(tmp_path / "m")
    tokenizer_config = (
        tmp_path / "m" / "tokenizer_config.json"
    )  # a BertTokenizer has rules of its own, whatever the file says
    tokenizer_config.write_text(
        json.dumps(json.loads(tokenizer_config.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    panicking(tmp_path / "m")
    tiny.write_labeled(tmp_path / "data.jsonl", 8)
    with (tmp_path / "data.jsonl").open("a") as file:
        rows = [json.loads(line) for line in (tmp_path / "data.jsonl").read_text().splitlines()]
        file.write(json.dumps(rows[0] | {"text": TEXT}) + "\n")
    (tmp_path / "recipe.yaml").write_text(
        "model: m\ntask: text-classification\ndata: {test: data.jsonl}\nstages: [onnx]\n"
        "score: {latency: false}\n"
    )
    result = smelt.run(tmp_path / "recipe.yaml", out=tmp_path / "run", quiet=True)
    assert result.exit_code == 1
    assert result.report["status"] == "error"
    assert (tmp_path / "run" / "report.json").is_file()
