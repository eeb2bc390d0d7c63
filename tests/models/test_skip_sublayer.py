"""A part that is gone computes and stores nothing, in torch and in graphs; caches count what is left."""

import numpy as np
import onnx
import pytest
import torch

from smelt.compress.distill.inner_losses import InnerLosses
from smelt.compress.distill.settings import LossWeights
from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.export.onnx_stage import Onnx
from smelt.export.settings import OnnxSettings
from smelt.generation.config import GenerationSettings
from smelt.models.checkpoint import load_model, load_tokenizer, save_model
from smelt.models.edits import apply_edits
from smelt.models.families.registry import FAMILIES, blocks_of, norm_consumers
from smelt.models.layers import skip_sublayer
from smelt.runtimes.predict_texts import generate_texts
from smelt.runtimes.registry import open_runner
from tests.support import harness
from tests.support.expected_errors import raises_code
from tests.support.graphs import graph_exports
from tests.support.models import every_family, tiny
from tests.support.models.every_family import SEPARATE_BLOCKS
from tests.support.pairs import matrix


def without(family, out, which=((0, 0), (1, -1), (2, 1))):
    """Write a model of 3 layers without some parts of each stack: (layer, part)."""
    source = every_family.model_with_layers(family, 3)
    model, edits = load_model(source)
    for block in blocks_of(model):
        last = len(block.stack.attentions)
        removed = {(layer, part % (last + 1)) for layer, part in which}
        for layer, part in sorted(removed):
            if layer == block.index:
                edits.append(skip_sublayer(model, block.module_path, part))
    out.mkdir()
    save_model(model, edits, out, source)
    return out, model


@pytest.mark.parametrize("family", SEPARATE_BLOCKS)
def test_model_without_part_equals_part_with_zero_output(family, tmp_path):
    folder, model = without(family, tmp_path / "out")
    full_model, _ = load_model(every_family.model_with_layers(family, 3))
    remaining_layers = {
        block.module_path: {part.linear_layers[-1] for part in block.parts} for block in blocks_of(model)
    }
    for block in blocks_of(full_model):
        for part in block.parts:
            if part.linear_layers[-1] not in remaining_layers[block.module_path]:
                full_model.get_submodule(part.linear_layers[-1]).register_forward_hook(
                    lambda m, x, y: torch.zeros_like(y)
                )
    logits = harness.logits(load_model(folder)[0])
    assert torch.equal(logits, harness.logits(full_model))
    assert torch.equal(logits, harness.logits(model))
    modules = dict(model.named_modules())
    feeds = norm_consumers(model)
    assert all(
        modules[feed.norm].weight.dim() == 1 and modules.keys() >= set(feed.consumers) for feed in feeds
    )
    names = {name for name, _ in model.named_parameters()}
    for block in blocks_of(model):
        part = 0 if block.index == 0 else len(block.stack.attentions) if block.index == 1 else 1
        kind = (*block.stack.attentions, block.stack.feed_forward)[part].with_prefix(block.module_path)
        stream = block.stack.stream
        norm = f"{block.module_path}.{stream.part_norms[part]}.weight"
        stays = not stream.pre_norm or stream.part_norms.count(stream.part_norms[part]) > 1
        assert not any(name.startswith(f"{product}.") for name in names for product in kind.linear_layers)
        assert (norm in names) == stays
        after = [f"{block.module_path}.{name}.weight" for name in stream.output_norms]
        assert [name in names for name in after] == [index != part for index in range(len(after))]


def _added_zeros(graph):
    """Return the additions of a zero without axes, which stood for a part."""
    floats = [i for i in graph.initializer if i.data_type == onnx.TensorProto.FLOAT and not i.dims]
    zeros = {i.name for i in floats if not np.any(onnx.numpy_helper.to_array(i))}
    return [node.name for node in graph.node if node.op_type == "Add" and zeros & set(node.input)]


@pytest.mark.parametrize(
    ("family", "target"),
    [("mistral", "openvino"), ("t5", "ort-cpu")]
    + ([("marian", "openvino"), ("gpt2", "ort-cpu")] if matrix.is_full_matrix() else []),
)
def test_runners_generate_same_texts_as_model_without_cache(family, target, tmp_path):
    """Its own numbers in the cache, and graphs with caches and products of nothing but what is left."""
    which = ((0, 0), (1, 1), (2, -1)) if FAMILIES[family].architecture == "seq2seq" else ((0, 0), (1, -1))
    folder, _ = without(family, tmp_path / "model", which)
    task = FAMILIES[family].tasks[0]
    source = tiny.as_artifact(folder, task)
    ctx = graph_exports.make_context(tmp_path / "onnx", task)
    Onnx()(source, OnnxSettings(target=target), ctx)
    manifest = source.manifest.model_copy(update={"format": "onnx", "details": ctx.details})
    model, tokenizer = load_model(folder)[0], load_tokenizer(folder)
    texts = tiny.SENTENCES[:3]
    expected = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt").input_ids
        out = model.generate(ids, max_new_tokens=8, do_sample=False, num_beams=1, use_cache=False)
        cached = model.generate(ids, max_new_tokens=8, do_sample=False, num_beams=1)
        assert torch.equal(out, cached)
        expected.append(tokenizer.decode(out[0], skip_special_tokens=True))
    for artifact in (source, Artifact(ctx.out, manifest.model_copy(update={"target": target}))):
        with open_runner(artifact, threads=1) as runner:
            generated = generate_texts(
                runner, texts, GenerationSettings(max_new_tokens=8, num_beams=1), batch_size=2
            )
        assert generated == expected
    main = onnx.load(
        ctx.out / ("model.onnx" if task == "language-modeling" else "decoder_with_past_model.onnx")
    )
    caches = [value.name for value in main.graph.input if value.name.startswith("past_key_values.")]
    attending = [a for block in blocks_of(model) if block.stack.causal for a in block.attentions]
    assert len(caches) == 2 * len(attending)
    assert not _added_zeros(main.graph)


def test_repeated_block_loses_part_at_both_positions(tmp_path):
    model, edits = load_model(every_family.model_with_layers("bert", 3))
    layers = model.bert.encoder.layer
    layers[1] = layers[0]
    edits = [
        {"op": "share", "module": "bert.encoder.layer.1", "with": "bert.encoder.layer.0"},
        skip_sublayer(model, "bert.encoder.layer.1", 1),
    ]
    save_model(model, edits, tmp_path, every_family.model_with_layers("bert", 3))
    reloaded, _ = load_model(tmp_path)
    assert reloaded.bert.encoder.layer[0] is reloaded.bert.encoder.layer[1]
    assert torch.equal(harness.logits(reloaded), harness.logits(model))
    assert [not block.feed_forwards for block in blocks_of(reloaded)] == [True, False]


@pytest.mark.quick
@pytest.mark.parametrize(("edit", "code", "cause"), [
    ({"module": "model.layers.0", "part": 2}, "does-not-fit-model", ValueError),
    ({"module": "model.layers.0", "part": True}, "does-not-fit-model", ValueError),
    ({"module": "model.layers.1", "part": 0}, "does-not-fit-model", ValueError),
    ({"module": "model.layers.3", "part": 0}, "does-not-fit-model", LookupError),
    ({"module": "model", "part": 0}, "does-not-fit-model", LookupError),
    ({"module": "model.layers.2", "part": 0}, "last-layer", type(None)),
])  # fmt: skip
def test_invalid_skip_edits_are_rejected(edit, code, cause):
    model, _ = load_model(every_family.model_with_layers("llama", 3))
    apply_edits(model, [{"op": "skip", "module": f"model.layers.{index}", "part": 0} for index in (0, 1)])
    with raises_code(code, InputError) as caught:
        apply_edits(model, [{"op": "skip", **edit}])
    assert type(caught.value.__cause__) is cause
    assert str(edit["module"]) in str(caught.value)


@pytest.mark.parametrize("loss", ["attention", "self_attention_relations"])
def test_attention_losses_are_rejected_if_attention_was_removed(loss, tmp_path):
    student = load_model(without("bert", tmp_path / "out", ((2, 0),))[0])[0]
    teacher = load_model(every_family.model_with_layers("bert", 3))[0]
    weights = LossWeights(**{loss: 1.0})
    with raises_code("attention-removed", InputError) as caught:
        InnerLosses(student, teacher, weights, "last")
    assert caught.value.setting == f"losses.{loss}"
    assert " 3 " in str(caught.value)
    assert InnerLosses(student, teacher, LossWeights(hidden_states=1.0), "last").pairs
