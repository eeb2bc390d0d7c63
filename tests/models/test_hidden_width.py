"""Fewer channels compute what the whole model computes whose norms and products see these alone."""

import copy
import json

import pytest
import torch
import transformers

from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.factorize.stage import Factorize
from smelt.compress.prune.importances.scores import hidden_norms
from smelt.compress.share_weights import ShareWeights, ShareWeightsSettings
from smelt.core.errors import InputError
from smelt.models.checkpoint import load_model, save_model
from smelt.models.edits import apply_edits
from smelt.models.families.limits import fixed_width_reason
from smelt.models.families.registry import FAMILIES, output_modules
from smelt.models.hidden_width import hidden_width, prune_hidden_width, write_width_to_config
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.models import every_family, images, taggers
from tests.support.models.every_family import DISTINCT_FAMILIES

EXPRESSED_IN_CONFIG = {"t5", "llama", "mistral", "qwen2", "qwen3", "phi3"}
"""Families whose config can state another width; a family that is not listed may be one too."""


def _kept(model):
    return [channel for channel in range(hidden_width(model)) if channel % 4 != 1]


def silenced(model, keep):
    """Let `model` compute on the channels `keep` alone: norms see no others and give zeros for them.

    Tables give zeros for the others, which is what products read where no norm stands before them.
    """
    for norm in hidden_norms(model):
        small = copy.deepcopy(norm)
        for name, parameter in norm.named_parameters():
            setattr(small, name, torch.nn.Parameter(parameter.detach()[keep]))
        if isinstance(small, torch.nn.LayerNorm):
            small.normalized_shape = (len(keep),)

        def alone(x, small=small):
            return torch.zeros_like(x).index_copy(-1, torch.tensor(keep), small(x[..., keep]))

        norm.forward = alone
    removed = [channel for channel in range(hidden_width(model)) if channel not in keep]
    for stack in FAMILIES[model.config.model_type].stacks(model.config.to_dict()):
        with torch.no_grad():
            if stack.stream.embedding_projection:
                projection = model.get_submodule(stack.stream.embedding_projection)
                projection.weight[removed], projection.bias[removed] = 0, 0
                continue
            for table in stack.stream.embeddings:
                owner, _, last = table.rpartition(".")
                getattr(model.get_submodule(owner), last)[:, removed] = 0


@pytest.mark.parametrize(
    "family", [name for name in DISTINCT_FAMILIES if fixed_width_reason({"model_type": name}) is None]
)
def test_pruned_width_equals_model_with_silenced_channels(family, tmp_path):
    source = every_family.model_with_layers(family, 2)
    model, edits = load_model(source)
    keep = _kept(model)
    edit = prune_hidden_width(model, keep)
    assert hidden_width(model) == len(keep)
    silenced_model, _ = load_model(source)
    silenced(silenced_model, keep)
    pruned_logits = harness.logits(model)
    assert torch.allclose(pruned_logits, harness.logits(silenced_model), atol=2e-5)
    edits = write_width_to_config(model, edits, edit)
    save_model(model, edits, tmp_path, source)
    reloaded, _ = load_model(tmp_path)
    assert torch.equal(harness.logits(reloaded), pruned_logits)
    assert edits in ([], [edit])
    assert not (edits and family in EXPRESSED_IN_CONFIG)
    if not edits:
        config = json.loads((tmp_path / "config.json").read_text())
        plain = getattr(transformers, config["architectures"][0]).from_pretrained(tmp_path).eval()
        assert torch.equal(harness.logits(plain), pruned_logits)


@pytest.mark.parametrize("family", taggers.FAMILIES)
def test_pruned_width_of_token_classifier_equals_silenced_channels(family, tmp_path):
    """Its head may be one layer that reads the hidden states, unlike that of a classifier of texts."""
    source = taggers.write_model(tmp_path / "m", family)
    model, _ = load_model(source)
    keep = _kept(model)
    prune_hidden_width(model, keep)
    silenced_model, _ = load_model(source)
    silenced(silenced_model, keep)
    assert torch.allclose(harness.logits(model), harness.logits(silenced_model), atol=2e-5)
    linear_layers = {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    heads = {n for n in linear_layers if not n.startswith(f"{model.base_model_prefix}.")}
    assert heads == linear_layers.intersection(output_modules(model)) != set()


def test_image_patches_are_narrowed(tmp_path):
    source = images.write_model(tmp_path / "model")
    model, edits = load_model(source)
    edits = write_width_to_config(model, edits, prune_hidden_width(model, _kept(model)))
    pixels = torch.randn(2, 3, *[model.config.image_size] * 2)
    (tmp_path / "out").mkdir()
    save_model(model, edits, tmp_path / "out", source)
    plain = transformers.ViTForImageClassification.from_pretrained(tmp_path / "out").eval()
    assert plain.config.hidden_size == hidden_width(model) == 24
    with torch.no_grad():
        assert torch.equal(plain(pixels).logits, model(pixels).logits)


def test_factorized_image_patches_are_narrowed(tmp_path):
    source = images.write_model(tmp_path / "model")
    rows = images.read_rows(images.write_rows(tmp_path / "rows.jsonl"))
    settings = FactorizeSettings(method="tucker", keep_ratio=0.5)
    thin = harness.run_stage(Factorize(), settings, source, tmp_path / "thin", images.TASK, rows).out
    model, edits = load_model(thin)
    pixels = torch.randn(2, 3, *[model.config.image_size] * 2)
    edits = write_width_to_config(model, edits, prune_hidden_width(model, _kept(model)))
    (tmp_path / "out").mkdir()
    save_model(model, edits, tmp_path / "out", thin)
    reloaded, _ = load_model(tmp_path / "out")
    steps = reloaded.vit.embeddings.patch_embeddings.projection.steps
    assert steps[-1].out_channels == hidden_width(reloaded) == 24
    with torch.no_grad():
        assert torch.equal(reloaded(pixels).logits, model(pixels).logits)


def test_low_rank_and_shared_layers_are_narrowed_once(tmp_path):
    source = every_family.model_with_layers("marian", 2)
    shared = every_family.run_stage(
        ShareWeights(), ShareWeightsSettings(groups=1), source, "marian", tmp_path / "shared"
    ).out
    thin = every_family.run_stage(
        Factorize(), FactorizeSettings(targets=["embeddings"], rank=12), shared, "marian", tmp_path / "thin"
    ).out
    model, edits = load_model(thin)
    edits = write_width_to_config(model, edits, prune_hidden_width(model, _kept(model)))
    (tmp_path / "out").mkdir()
    save_model(model, edits, tmp_path / "out", thin)
    reloaded, _ = load_model(tmp_path / "out")
    layers = reloaded.model.encoder.layers
    assert layers[0].fc1 is layers[1].fc1
    assert layers[0].fc1.in_features == reloaded.model.shared.embedding_dim == 24
    assert torch.equal(harness.logits(reloaded), harness.logits(model))


@pytest.mark.parametrize("keep", [[], [1, 0], [0, 0], [0, 64], [-1, 2], [0.5], [True], None, "01"])
def test_invalid_channels_are_rejected(keep):
    model, _ = load_model(every_family.model_with_layers("llama", 2))
    with raises_code("does-not-fit-model", InputError):
        apply_edits(model, [{"op": "width", "module": "", "keep": keep}])
