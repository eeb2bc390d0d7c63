"""`scheme` as a mapping: one scheme for the encoder, another for the decoder."""

import json
import math
from collections import Counter

import numpy as np
import onnx
import pytest
import torch

from smelt.compress.quantize.settings import QuantizeSettings
from smelt.compress.quantize.stage import Quantize, quantize_size
from smelt.core.messages import message_codes
from smelt.export.onnx_stage import Onnx
from smelt.export.settings import OnnxSettings
from smelt.generation.backend import Batch
from smelt.generation.config import GenerationSettings, resolve_generation
from smelt.generation.search import generate_resolved
from smelt.models.model_size import SizeInputs, read_model_size
from smelt.models.weight_files import weight_files_size
from smelt.quantization.layers import QuantizedLinear, is_quantized
from smelt.runtimes.graph_walk import subgraphs
from smelt.runtimes.registry import open_folder
from tests.support import harness
from tests.support.expected_errors import raises_setting_codes
from tests.support.models import every_family, tiny

PARTS = {"encoder": "int8-dynamic", "decoder": "int4"}
ENCODER_DECODERS = ("marian", "t5", "m2m_100")  # names of their modules start differently


def quantize(family, source, out, scheme, **options):
    groups = {} if scheme == "int8-dynamic" else {"group_size": 32}
    settings = QuantizeSettings(scheme=scheme, **groups, **options)
    return every_family.run_stage(Quantize(), settings, source, family, out)


def all_nodes(graph):
    for node in graph.node:
        yield node
        for inner in subgraphs(node):
            yield from all_nodes(inner)


@pytest.mark.quick
def test_table_scheme_is_that_of_the_decoder():
    settings = QuantizeSettings(scheme=PARTS, group_size=32)
    assert settings.linear_schemes == settings.used_schemes() == ("int8-dynamic", "int4")
    assert settings.resolved_embedding_scheme == "int4"
    binary = QuantizeSettings(scheme={"encoder": "int4", "decoder": "binary"})
    assert binary.used_schemes() == ("int4", "binary", "int8-dynamic")
    assert settings.scheme_text == "{encoder: int8-dynamic, decoder: int4}"
    assert settings.to_report()["scheme"] == PARTS


@pytest.mark.quick
@pytest.mark.parametrize(("options", "code"), [
    ({"scheme": {"decoder": "int4"}}, "missing-part"),
    ({"scheme": {}}, "missing-part"),
    ({"scheme": {"encoder": "int4", "decoder": "int2"}, "group_size": 16}, "wrong-value"),
    ({"scheme": {"encoder": "int2", "decoder": "int4"}, "group_size": 16}, "wrong-value"),
    ({"scheme": PARTS, "method": "autoround"}, "settings-conflict"),
    ({"scheme": PARTS, "low_rank_correction": {"rank": 2}}, "settings-conflict"),
    ({"scheme": PARTS, "mixed_precision": {"target_bits": 4.5}}, "settings-conflict"),
    ({"scheme": {"encoder": "int4", "decoder": "int3"}, "smoothquant_alpha": 0.5}, "unused-setting"),
])  # fmt: skip
def test_invalid_mapping_is_rejected(options, code):
    with raises_setting_codes(code):
        QuantizeSettings(**options)


@pytest.mark.quick
@pytest.mark.parametrize("family", ["bert", "llama", "resnet", "vit"])
def test_model_without_these_parts_is_rejected(family):
    errors, _ = Quantize.check_model(QuantizeSettings(scheme=PARTS), {"model_type": family})
    assert [(error.code, error.setting) for error in errors] == [("unknown-part", "scheme")]
    translator = {"model_type": "marian", "encoder_layers": 1, "decoder_layers": 1}
    assert Quantize.check_model(QuantizeSettings(scheme=PARTS), translator) == ([], translator)


@pytest.mark.parametrize("family", ENCODER_DECODERS)
def test_weights_of_each_part_equal_single_scheme_weights(tmp_path, family):
    source = every_family.model_with_layers(family, 1)
    mixed, *alone = (
        quantize(family, source, tmp_path / str(number), scheme)
        for number, scheme in enumerate((PARTS, *PARTS.values()))
    )
    models = dict(zip(PARTS.values(), map(harness.load_output_model, alone), strict=True))
    count, stored_bits, weights = Counter(), Counter(), Counter()
    for name, module in harness.load_output_model(mixed).named_modules():
        if is_quantized(module):
            is_encoder = isinstance(module, QuantizedLinear) and ".encoder." in f".{name}"
            scheme = PARTS["encoder" if is_encoder else "decoder"]
            expected = models[scheme].get_submodule(name).matrix
            assert module.matrix.scheme.name == expected.scheme.name == scheme, name
            for tensor_name, tensor in expected.state_dict().items():
                assert torch.equal(module.matrix.state_dict()[tensor_name], tensor), name
            count[scheme] += 1
            rows, width = len(expected.codes), expected.width
            is_table = ".layers." not in name and ".block." not in name
            part = "embeddings" if is_table else "encoder" if is_encoder else "decoder"
            if part == "embeddings" and weights[part]:
                continue  # one matrix under several names
            groups = math.ceil(width / 32)  # of 4 bits and a float16 scale; int8 has a float32 scale per row
            stored_bits[part] += rows * (8 * width + 32 if is_encoder else groups * (32 * 4 + 16))
            weights[part] += rows * width
    assert count["int8-dynamic"] >= 6
    assert count["int4"] > count["int8-dynamic"]
    assert mixed.details["bits_per_weight_by_part"] == {
        part: round(stored_bits[part] / weights[part], 3) for part in weights
    }


def test_gptq_calibrates_decoder_on_outputs_of_quantized_encoder(tmp_path):
    source = every_family.model_with_layers("marian", 1)
    options = {"calibration_samples": 8, "method": "gptq"}
    mixed, int8, int4 = (
        harness.load_output_model(quantize("marian", source, tmp_path / str(number), scheme, **options))
        for number, scheme in enumerate((PARTS, *PARTS.values()))
    )

    def have_equal_codes(other, name):
        layers = (model.get_submodule(f"model.{name}").matrix for model in (mixed, other))
        return torch.equal(*(layer.codes for layer in layers))

    assert all(have_equal_codes(int8, f"encoder.layers.0.{name}") for name in ("self_attn.q_proj", "fc2"))
    assert have_equal_codes(int4, "decoder.layers.0.self_attn.q_proj")  # the encoder is no input of it
    assert not have_equal_codes(int4, "decoder.layers.0.encoder_attn.k_proj")


def test_predicted_size_equals_artifact_size(tmp_path):
    source, settings = every_family.model_with_layers("t5", 3), QuantizeSettings(scheme=PARTS, group_size=32)
    size = read_model_size(source, json.loads((source / "config.json").read_text()))
    ctx = every_family.run_stage(Quantize(), settings, source, "t5", tmp_path / "out")
    planned = quantize_size(settings, SizeInputs(size, size, "summarization", {}))
    assert weight_files_size(ctx.out) == pytest.approx(planned.disk_bytes, rel=0.05, abs=16_000)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The quantized translator, and its graphs with and without generation graphs."""
    home = tmp_path_factory.mktemp("parts")
    source = every_family.model_with_layers("marian", 1)
    quantized = quantize("marian", source, home / "torch", PARTS)
    for name, generates in (("steps", False), ("loop", True)):
        ctx = harness.make_context(home / name, "translation")
        settings = OnnxSettings(target="ort-cpu", generation_graph=generates)
        Onnx()(tiny.as_artifact(quantized.out), settings, ctx)
        assert "parity-failed" not in message_codes(ctx.warnings)
    return home


def test_graphs_have_the_operators_of_their_part(exported):
    def count(*path):
        graph = onnx.load(exported.joinpath(*path)).graph
        return Counter(node.op_type for node in all_nodes(graph))

    encoder, decoder, generate = (
        count("loop", f"{name}.onnx") for name in ("encoder_model", "decoder_with_past_model", "generate")
    )
    assert encoder["DynamicQuantizeMatMul"] == 4  # packed qkv, out, fc1, fc2
    assert decoder["DynamicQuantizeMatMul"] == 0
    assert decoder["MatMulNBits"] == 7  # packed qkv, out, cross q, cross out, fc1, fc2, the output layer
    assert generate["DynamicQuantizeMatMul"] == encoder["DynamicQuantizeMatMul"]
    assert generate["MatMulNBits"] == encoder["MatMulNBits"] + decoder["MatMulNBits"]


def test_graph_logits_equal_torch_logits(exported):
    ids = np.array([[5, 9, 7, 12, 1], [8, 6, 1, 0, 0]])
    batch = Batch(ids, np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]))
    kinds = {"torch": ("torch", None), "steps": ("onnx", "ort-cpu"), "loop": ("onnx", "ort-cpu")}
    logits, texts = {}, {}
    for name, (artifact_format, target) in kinds.items():
        with open_folder(exported / name, artifact_format, target, 1) as runner:
            state = runner.encode(batch)
            steps = (np.array([token, token + 1]) for token in (3, 9, 17))
            logits[name] = np.stack([np.array(runner.decode_step(state, tokens)) for tokens in steps])
            decoding = resolve_generation(GenerationSettings(num_beams=1, max_new_tokens=6), runner)
            texts[name] = generate_resolved(runner, batch, decoding)
    spread = logits["torch"].std()
    assert np.array_equal(logits["steps"], logits["loop"])
    assert np.abs(logits["loop"] - logits["torch"]).mean() < 0.02 * spread
    assert texts["loop"] == texts["steps"]
    assert min(map(len, texts["loop"])) > 2
