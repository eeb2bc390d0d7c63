"""Models survive being saved and loaded, also those that no longer fit their config."""

import json
import subprocess
import sys

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import BertModel, MarianMTModel

from smelt.core.errors import InputError
from smelt.core.messages import message_codes
from smelt.models.checkpoint import load_model, save_model
from smelt.models.edits import apply_edits
from smelt.models.import_model import import_model
from smelt.models.model_size import count_parameters
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import tiny


def test_loaded_model_equals_from_pretrained(tmp_path):
    folder = tiny.write_marian(tmp_path / "m")
    model, edits = load_model(folder)
    assert edits == []
    torch.testing.assert_close(
        harness.logits(model), harness.logits(MarianMTModel.from_pretrained(folder).eval()), rtol=0, atol=0
    )
    assert model.lm_head.weight is model.model.shared.weight


def test_saved_model_loads_in_transformers_without_duplicates(tmp_path):
    folder = tiny.write_marian(tmp_path / "m")
    model, _ = load_model(folder)
    out = tmp_path / "out"
    out.mkdir()
    save_model(model, [], out, folder)
    assert set(load_file(out / "model.safetensors")) == set(load_file(folder / "model.safetensors"))
    torch.testing.assert_close(
        harness.logits(MarianMTModel.from_pretrained(out).eval()), harness.logits(model), rtol=0, atol=0
    )
    assert (
        count_parameters(out)
        == sum(p.numel() for p in model.parameters() if p.requires_grad) + model.final_logits_bias.numel()
    )


def test_edits_allow_low_rank_and_smaller_layers(tmp_path):
    folder = tiny.write_marian(tmp_path / "m")
    model, _ = load_model(folder)
    edits = [
        {"op": "low_rank", "module": "model.encoder.layers.0.fc1", "rank": 3},
        {"op": "linear", "module": "model.decoder.layers.1.fc1", "in_features": 32, "out_features": 16},
        {"op": "linear", "module": "model.decoder.layers.1.fc2", "in_features": 16, "out_features": 32},
    ]
    apply_edits(model, edits)
    out = tmp_path / "out"
    out.mkdir()
    save_model(model, edits, out, folder)
    reloaded, stored_edits = load_model(out)
    assert stored_edits == edits
    torch.testing.assert_close(harness.logits(reloaded), harness.logits(model), rtol=0, atol=0)


def test_damaged_or_missing_weights_are_explained(tmp_path):
    folder = tiny.write_marian(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    shape = {**tensors, "model.encoder.layers.0.fc1.weight": torch.zeros(3, 3)}
    save_file(shape, folder / "model.safetensors")
    with raises_code("shape-mismatch", InputError) as caught:
        load_model(folder)
    assert "fc1.weight" in str(caught.value)
    save_file({k: v for k, v in tensors.items() if "fc1" not in k}, folder / "model.safetensors")
    with raises_code("missing-tensor", InputError) as caught:
        load_model(folder)
    assert "fc1" in str(caught.value)
    (folder / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00garbage")
    with raises_code("damaged-weights", InputError):
        load_model(folder)


def test_bare_encoder_gets_new_classifier_with_warning(tmp_path):
    folder = tiny.write_bert(tmp_path / "bert")
    BertModel.from_pretrained(folder).save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["BertModel"]
    out = tmp_path / "out"
    out.mkdir()
    notes = import_model(folder, out, labels=["bad", "good", "other"], seed=3)
    assert message_codes(notes) == ["new-classifier"]
    model, _ = load_model(out)
    assert isinstance(model.classifier, nn.Linear)
    assert model.classifier.out_features == 3
    assert model.config.id2label == {0: "bad", 1: "good", 2: "other"}


def test_half_precision_checkpoint_is_imported_unchanged_without_warnings(tmp_path):
    folder = tiny.write_marian(tmp_path / "marian")
    tensors = {k: v.half() for k, v in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    (tmp_path / "out").mkdir()
    assert import_model(folder, tmp_path / "out") == []
    copied = [(f / "model.safetensors").read_bytes() for f in (folder, tmp_path / "out")]
    assert copied[0] == copied[1]


def test_new_classifier_has_dtype_of_checkpoint(tmp_path):
    folder = tiny.write_bert(tmp_path / "bert")
    BertModel.from_pretrained(folder).half().save_pretrained(folder)
    (tmp_path / "out").mkdir()
    import_model(folder, tmp_path / "out", labels=["bad", "good"], seed=3)
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.float16}


def test_concurrent_tokenizer_loading_emits_no_warnings(tmp_path):
    """transformers recommends sacremoses at every load of a Marian tokenizer, which changes nothing."""
    folder = tiny.write_marian(tmp_path / "m")
    code = (
        "import sys, warnings\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from pathlib import Path\n"
        "from smelt.models.checkpoint import load_tokenizer\n"
        "sys.setswitchinterval(1e-5)\n"
        "warnings.simplefilter('always')\n"
        "before = list(warnings.filters)\n"
        "with ThreadPoolExecutor(6) as pool:\n"
        "    list(pool.map(load_tokenizer, [Path(sys.argv[1])] * 48))\n"
        "assert warnings.filters == before, warnings.filters\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
