"""Low-rank pairs among the products of one input: what reads it is one product; all computes as in torch."""

from collections import Counter

import onnx
import pytest
import torch

from smelt.compress.factorize.settings import FactorizeSettings
from smelt.compress.factorize.stage import Factorize
from smelt.export.graphs.attention import PackedLinear
from smelt.export.onnx_stage import Onnx
from smelt.export.settings import OnnxSettings
from smelt.generation.config import GenerationSettings
from smelt.models.layers import LowRankLinear
from smelt.runtimes.predict_texts import generate_texts
from smelt.runtimes.registry import open_folder, open_runner
from tests.support.models import every_family, tiny

RANK = 6
ENCODER = 2 * (1 + 2 + 2 * 3) + 1 + 4
DECODER = 2 * (1 + 3 + 2 + 2 + 2 + 2 + 2) + 1
PRODUCTS = ("MatMul", "Gemm", "DynamicQuantizeMatMul")


def pairs_of(folder, family, out, **settings):
    stage_settings = FactorizeSettings(method="svd", rank=RANK, optimize_for="size", **settings)
    return every_family.run_stage(Factorize(), stage_settings, folder, family, out).out


def exported(folder, family, out):
    return every_family.run_stage(Onnx(), OnnxSettings(generation_graph=False), folder, family, out)


def products(folder, graph):
    op_counts = Counter(n.op_type for n in onnx.load(folder / f"{graph}.onnx").graph.node)
    return sum(op_counts[name] for name in PRODUCTS)


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    """A Marian of two and two layers, all of whose products are pairs, but for the encoder's keys."""
    root_folder = tmp_path_factory.mktemp("pairs")
    folder = tiny.write_marian(root_folder / "m")
    return pairs_of(
        folder, "marian", root_folder / "pairs", exclude=["lm_head", "*encoder*.self_attn.k_proj"]
    )


def test_packed_linear_equals_separate_layers():
    torch.manual_seed(0)
    parts = [LowRankLinear(16, 12, 3), torch.nn.Linear(16, 8), LowRankLinear(16, 20, 5, bias=False)]
    pack, x = PackedLinear(parts), torch.randn(2, 7, 16)
    assert pack.packed.out_features == 3 + 8 + 5
    assert not pack.is_whole
    for packed_output, part in zip(pack(x), parts, strict=True):
        torch.testing.assert_close(packed_output, part(x))
    assert PackedLinear(parts[1:2] * 2).is_whole


def test_translator_low_rank_layers_share_one_product_per_input(translator, tmp_path):
    out = exported(translator, "marian", tmp_path / "onnx").out
    # a layer: query, key and value in one, two that go on; out, fc1 and fc2 two each; and all cross keys and
    # values in one, four that go on
    assert products(out, "encoder_model") == ENCODER
    # a layer: self-attention 1 + 3 + 2, cross-attention two queries and two out, feed-forward 2 + 2; the head
    assert products(out, "decoder_with_past_model") == DECODER
    with open_runner(tiny.as_artifact(translator)) as torchs, open_folder(out, "onnx", "ort-cpu", 1) as onnxs:
        for beams in (1, 3):
            search = GenerationSettings(num_beams=beams, max_new_tokens=12)
            texts = [generate_texts(r, tiny.SENTENCES, search, 3) for r in (torchs, onnxs)]
            assert texts[0] == texts[1]
            assert len(set(texts[0])) > 2


# blocks of 1 + 3 for queries, keys and values; out, gate, up, down and a head; out, two, pooler, classifier
@pytest.mark.parametrize(("family", "count"), [("llama", 2 * (4 + 4) + 1), ("bert", 2 * (4 + 3) + 2)])
def test_other_families_match_torch_with_one_product_per_input(family, count, tmp_path):
    names = ["*q_proj", "*k_proj", "*v_proj", "*.query", "*.key", "*.value"]
    folder = pairs_of(every_family.model_with_layers(family, 2), family, tmp_path / "pairs", include=names)
    assert products(exported(folder, family, tmp_path / "onnx").out, "model") == count
