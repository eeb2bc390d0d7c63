"""The stage with 4 bits and fewer: bytes on disk, and what the vocabulary becomes."""

import pytest

from smelt.compress.quantize.settings import QuantizeSettings
from smelt.compress.quantize.stage import Quantize
from smelt.core.messages import message_codes
from smelt.models.checkpoint import load_model
from smelt.models.model_size import count_parameters
from smelt.quantization.layers import QuantizedLinear, layer_scheme
from tests.support import harness
from tests.support.models import images, tiny

# bits a weight: codes, a float16 scale for each 64 inputs or for each row of 256, 512
BITS = {
    "int4": ({"embedding_scheme": "int4", "group_size": 32}, 4 + 16 / 32),
    "int3": ({"embedding_scheme": "int3"}, 3 + 16 / 64),
    "int2": ({"embedding_scheme": "int2", "symmetric": False}, 2 + (16 + 2) / 64),
    "ternary": ({"embedding_scheme": "ternary"}, 8 * 13 / 64 + 16 / 64),
    "binary": ({"output_layer": False, "embeddings": False}, 1 + 16 / 64),
}


@pytest.fixture(scope="module")
def marian(tmp_path_factory):
    sizes = {"d_model": 256, "encoder_ffn_dim": 512, "decoder_ffn_dim": 512}
    return tiny.write_marian(tmp_path_factory.mktemp("few") / "model", **sizes)


@pytest.mark.parametrize("scheme", BITS)
def test_stored_bytes_equal_predicted_bits(marian, tmp_path, scheme):
    options, bits = BITS[scheme]
    settings = QuantizeSettings(scheme=scheme, **options)
    ctx = harness.run_stage(Quantize(), settings, marian, tmp_path / "out", "translation")
    assert ctx.details["bits_per_weight"] == pytest.approx(bits, abs=1e-3)
    model, _ = load_model(tmp_path / "out")
    weights = sum(m.in_features * m.out_features for m in model.modules() if isinstance(m, QuantizedLinear))
    rest = [p for n, p in model.named_parameters() if ".matrix." not in n and "position" not in n]
    floats = sum(p.numel() for p in rest)
    predicted = weights * bits / 8 + 4 * floats
    assert (tmp_path / "out" / "model.safetensors").stat().st_size == pytest.approx(predicted, rel=0.05)
    # five codes a byte leave a last byte that is not full
    assert count_parameters(tmp_path / "out") == pytest.approx(weights * (1 + 1 / 64) + floats, rel=0.03)


@pytest.mark.parametrize(("bits", "codes"), [(8, []), (4, ["simulated-activations"])])
def test_report_warns_of_activations_without_an_operator(tmp_path, bits, codes):
    settings = QuantizeSettings(scheme="binary", group_size=32, activation_bits=bits)
    ctx = harness.run_stage(
        Quantize(), settings, tiny.write_marian(tmp_path / "model"), tmp_path / "out", "translation"
    )
    assert message_codes(ctx.warnings) == codes


def test_embeddings_use_int4_below_four_bits_unless_scheme_is_set(tmp_path):
    source = tiny.write_marian(tmp_path / "model")
    for scheme, embedding_scheme in (("int3", None), ("int2", None), ("ternary", None), ("int3", "int3")):
        vocabulary = embedding_scheme or "int4"
        settings = QuantizeSettings(scheme=scheme, group_size=32, embedding_scheme=embedding_scheme)
        out = tmp_path / f"{scheme}-{embedding_scheme}"
        harness.run_stage(Quantize(), settings, source, out, "translation")
        model, _ = load_model(out)
        assert layer_scheme(model.model.shared) == vocabulary
        assert model.lm_head.matrix is model.model.shared.matrix
        assert layer_scheme(model.model.encoder.layers[0].fc1) == scheme


@pytest.mark.parametrize(("head", "kind"), [(True, "int4"), (False, None)])
def test_image_classifier_layer_is_output_layer(tmp_path, head, kind):
    source = images.write_model(tmp_path / "model")
    settings = QuantizeSettings(scheme="int3", group_size=32, output_layer=head)
    harness.run_stage(Quantize(), settings, source, tmp_path / "out", images.TASK)
    model, _ = load_model(tmp_path / "out")
    assert (layer_scheme(model.classifier) if isinstance(model.classifier, QuantizedLinear) else None) == kind
