"""Edited models whose structure a config of transformers can hold: plain transformers computes the same."""

import json

import pytest
import torch
import transformers

from smelt.compress.drop_layers.settings import DropLayersSettings
from smelt.compress.drop_layers.stage import DropLayers
from smelt.compress.prune.settings import PruneSettings
from smelt.compress.prune.stage import Prune
from smelt.compress.trim_vocabulary.select_tokens import TrimVocabularySettings
from smelt.compress.trim_vocabulary.stage import TrimVocabulary
from smelt.export.package.huggingface import HuggingFaceFormat
from smelt.export.package.write_package import unsupported_format
from smelt.models.checkpoint import load_model
from smelt.models.edits import read_edits
from tests.support import harness
from tests.support.models import causal, every_family, tiny

DECODERS = ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma3_text", "starcoder2", "phi"]
HALF_OF_HEADS = PruneSettings(targets=["heads"], keep_ratio=0.5)


def read_plainly(folder):
    """Return what transformers alone reads, without smelt's edits."""
    unsupported = unsupported_format(HuggingFaceFormat(), tiny.as_artifact(folder, "language-modeling"))
    assert unsupported is None, unsupported
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    return model.eval()


@pytest.mark.parametrize(("stage", "settings", "keys"), [
    (Prune(), HALF_OF_HEADS, {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}),
    (Prune(), PruneSettings(targets=["ffn"], keep_ratio=0.5), {"intermediate_size": 48}),
    (Prune(), PruneSettings(targets=["width"], keep_ratio=0.5), {"hidden_size": 32, "head_dim": 16}),
    (DropLayers(), DropLayersSettings(keep_ratio=0.5), {"num_hidden_layers": 1}),
    (TrimVocabulary(), TrimVocabularySettings(size=280), {"vocab_size": 280}),
], ids=["heads", "ffn", "width", "layers", "vocabulary"])  # fmt: skip
def test_plain_transformers_reads_smaller_model(stage, settings, keys, tmp_path):
    source = every_family.model_with_layers("llama", 2)
    out = every_family.run_stage(stage, settings, source, "llama", tmp_path / "out").out
    config = json.loads((out / "config.json").read_text())
    assert {key: config[key] for key in keys} == keys
    assert torch.equal(harness.logits(read_plainly(out)), harness.logits(load_model(out)[0]))


@pytest.mark.parametrize("family", DECODERS)
def test_half_of_heads_is_in_config_of_family(family, tmp_path):
    source = every_family.model_with_layers(family, 1)
    if every_family.MODELS[family].config.get("num_key_value_heads") == 1:
        source = every_family.make_model(tmp_path / "source", family, num_key_value_heads=4)
    out = every_family.run_stage(Prune(), HALF_OF_HEADS, source, family, tmp_path / "out").out
    assert read_edits(out) == []
    assert torch.equal(harness.logits(read_plainly(out)), harness.logits(load_model(out)[0]))


def test_pruned_heads_neurons_and_width_are_read_together(tmp_path):
    settings = PruneSettings(targets=["heads", "ffn"], keep_ratio=0.5)
    source = every_family.model_with_layers("llama", 2)
    first = every_family.run_stage(Prune(), settings, source, "llama", tmp_path / "first").out
    settings = PruneSettings(targets=["width"], keep_ratio=0.5)
    out = every_family.run_stage(Prune(), settings, first, "llama", tmp_path / "out").out
    assert torch.equal(harness.logits(read_plainly(out)), harness.logits(load_model(out)[0]))


@pytest.mark.parametrize(("family", "config", "keep_ratio"), [
    # 64 is no multiple of 3, as Llama's config requires
    ("llama", {"num_attention_heads": 4, "num_key_value_heads": 4}, 0.75),
    # the width of a head is the model's by their number
    ("gpt2", {}, 0.5),
])  # fmt: skip
def test_heads_without_a_config_are_edits_and_refused(family, config, keep_ratio, tmp_path):
    source = causal.write_model(tmp_path / "source", family, **config)
    heads = "n_head" if family == "gpt2" else "num_attention_heads"
    settings = PruneSettings(targets=["heads"], keep_ratio=keep_ratio)
    out = every_family.run_stage(Prune(), settings, source, family, tmp_path / "out").out
    assert json.loads((out / "config.json").read_text())[heads] == 4
    assert read_edits(out)
    assert torch.isfinite(harness.logits(load_model(out)[0])).all()
    unsupported = unsupported_format(HuggingFaceFormat(), tiny.as_artifact(out, "language-modeling"))
    assert unsupported is not None
    assert unsupported.code == "unsupported-structure"
