"""The form `huggingface`: from_pretrained opens it; what no config can say is refused by name."""

import json
import re
import shlex
import subprocess
import sys

import huggingface_hub
import numpy as np
import pytest
import torch
import transformers

import smelt
from smelt.core.artifact import Artifact, read_artifact
from smelt.core.errors import InputError
from smelt.export.package.huggingface import HuggingFaceFormat
from smelt.export.package.package_format import OriginScore, PackageOrigin
from smelt.export.package.write_package import write_package
from tests.support.expected_errors import raises_code
from tests.support.graphs import exported_artifacts
from tests.support.models import tiny
from tests.support.shared_folders import make_once

TEXTS = [*tiny.SENTENCES[:3], "dogs"]
SCORE = OriginScore("BLEU", "1.00 [0.50, 2.00]", None, 6, "nrefs:1", "bleu", 1.0)


def package(kind):
    def make(folder):
        origin = PackageOrigin(
            run="a-run", license="mit", scores=(SCORE,), data="data.jsonl", generation={"num_beams": 1}
        )
        write_package(
            HuggingFaceFormat(),
            read_artifact(exported_artifacts.exported_artifact(kind, "model")),
            origin,
            folder,
        )

    return make_once(f"huggingface-{kind}", make)


def test_readme_uses_generation_settings_of_scores():
    readme = (package("translator") / "README.md").read_text()
    assert readme.count("model.generate(**inputs, num_beams=1)") == 2


@pytest.mark.parametrize("kind", ["translator", "writer"])
def test_transformers_generation_equals_smelt(kind):
    tokenizer = transformers.AutoTokenizer.from_pretrained(package(kind))
    name = "AutoModelForSeq2SeqLM" if kind == "translator" else "AutoModelForCausalLM"
    model = getattr(transformers, name).from_pretrained(package(kind))
    with smelt.load(exported_artifacts.exported_artifact(kind, "model")) as smelt_model:
        expected = smelt_model.generate(TEXTS, batch_size=1, max_new_tokens=6)
    for text, expected_text in zip(TEXTS, expected, strict=True):
        output_ids = model.generate(**tokenizer([text], return_tensors="pt"), max_new_tokens=6)
        assert tokenizer.decode(output_ids[0], skip_special_tokens=True) == expected_text


def test_transformers_classification_equals_smelt():
    tokenizer = transformers.AutoTokenizer.from_pretrained(package("classifier"))
    model = transformers.AutoModelForSequenceClassification.from_pretrained(package("classifier")).eval()
    with torch.no_grad():
        probabilities = model(**tokenizer(TEXTS, return_tensors="pt", padding=True)).logits.softmax(-1)
    with smelt.load(exported_artifacts.exported_artifact("classifier", "model")) as smelt_model:
        expected = [list(p.probabilities.values()) for p in smelt_model.predict(TEXTS)]
    np.testing.assert_allclose(probabilities, expected, atol=1e-5)


def test_package_is_loadable_as_artifact():
    with (
        smelt.load(package("classifier")) as packaged,
        smelt.load(exported_artifacts.exported_artifact("classifier", "model")) as original,
    ):
        assert packaged.predict(TEXTS) == original.predict(TEXTS)


def test_model_card_is_parsed_by_huggingface_hub():
    card = huggingface_hub.ModelCard.load(package("translator") / "README.md")
    (score,) = card.data.eval_results
    assert (score.metric_type, score.metric_value, score.dataset_name) == ("bleu", 1.0, "data.jsonl")
    assert card.data.license == "mit"
    assert card.text.lstrip().startswith("# ")


def test_tokenizer_files_support_old_and_new_transformers():
    content = json.loads((package("t5") / "tokenizer_config.json").read_text())
    assert content["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "backend" not in content


def test_readme_command_runs():
    text = (package("embedder") / "README.md").read_text()
    install, line = text.partition("```bash\n")[2].partition("\n```")[0].split("\n", 1)
    assert install.startswith("pip install ")
    done = subprocess.run(
        [sys.executable, *shlex.split(line)[1:]], cwd=package("embedder"), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tensor([[[")


@pytest.mark.parametrize(("edits", "values"), [
    ([{"op": "quantize"}] * 3, ["3", "quantize"]),
    ([{"op": "low_rank"}, {"op": "linear"}], ["1", "factorize", "1"]),
    ([{"op": "share"}], ["1", "share", "standalone"]), ([{"op": "new"}], ["'new'", "1"]),
])  # fmt: skip
def test_unrepresentable_structure_is_rejected_with_stage_name(edits, values, tmp_path):
    manifest = read_artifact(exported_artifacts.exported_artifact("classifier", "model")).manifest
    (tmp_path / "structure.json").write_text(json.dumps({"edits": edits}))
    with raises_code("unsupported-structure", InputError) as excinfo:
        HuggingFaceFormat().check(Artifact(tmp_path, manifest))
    assert re.search(".*".join(rf"(?<!\w){re.escape(value)}(?!\w)" for value in values), str(excinfo.value))
    (tmp_path / "structure.json").unlink()
    HuggingFaceFormat().check(Artifact(tmp_path, manifest))
