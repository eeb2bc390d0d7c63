"""Which graphs of a folder generate together, and what is said where they do not."""

import pytest

from smelt.runtimes.onnx_import.convert_optimum import layout_problems, required_graphs
from smelt.runtimes.onnx_import.signature import GraphSignature, TensorSpec

pytestmark = pytest.mark.quick

TWO = ("encoder_model", "decoder_model", "decoder_with_past_model")


@pytest.mark.parametrize(("names", "kind", "parts"), [
    (TWO, "encoder-decoder", TWO), ((*TWO, "decoder_model_merged"), "encoder-decoder", TWO),
    (("encoder_model", "decoder_model_merged"), "encoder-decoder", ("encoder_model", "decoder_model_merged")),
    (("model",), "decoder", ("model",)),
])  # fmt: skip
def test_optimum_layouts_are_recognized(names: tuple[str, ...], kind: str, parts: tuple[str, ...]) -> None:
    assert required_graphs(names) == (kind, parts)


@pytest.mark.parametrize(("names", "named"), [
    (("encoder_model",), ("encoder_model.onnx",)),
    (("encoder_model", "decoder_model"), ("decoder_model.onnx", "decoder_with_past_model.onnx")),
    (("encoder_model", "decoder_with_past_model"), ("package FOLDER --format optimum",)),
    (("decoder_model", "decoder_with_past_model"), ("encoder_model.onnx", "1.14", "model.onnx")),
    (("classifier",), ("model.onnx", "encoder_model.onnx")),
])  # fmt: skip
def test_incomplete_layout_is_reported_with_a_remedy(names: tuple[str, ...], named: tuple[str, ...]) -> None:
    message = required_graphs(names)
    assert isinstance(message, str)
    assert [value for value in named if value not in message] == []


def graph(inputs: tuple[str, ...], outputs: tuple[str, ...], ids: str = "int64") -> GraphSignature:
    values = [TensorSpec(name=name, dtype=ids, shape=("batch", "length")) for name in inputs]
    return GraphSignature(
        inputs=tuple(values), outputs=tuple(TensorSpec(name=n, dtype="float32", shape=None) for n in outputs)
    )


IN, OUT = ("input_ids", "attention_mask", "past_key_values.0.key"), ("logits", "present.0.key")


@pytest.mark.parametrize(("inputs", "outputs", "named"), [
    (IN[1:], OUT, ("input_ids",)), (IN, OUT[1:], ("logits",)),
    ((*IN, "cache_position"), OUT, ("cache_position",)), (IN[:2], OUT, ("cache",)), (IN, OUT[:1], ("cache",)),
    ((*IN, "past_key_values.0.value"), OUT, ("past_key_values.0.value", "present.0.value")),
])  # fmt: skip
def test_graph_unsuitable_for_its_part_is_reported(
    inputs: tuple[str, ...], outputs: tuple[str, ...], named: tuple[str, ...]
) -> None:
    assert list(layout_problems("model", graph(IN, OUT))) == []
    problems = " ".join(layout_problems("model", graph(inputs, outputs)))
    assert [value for value in named if value not in problems] == []


def test_suitable_graph_has_no_error_but_32_bit_ids_have() -> None:
    assert list(layout_problems("model", graph((*IN, "position_ids"), OUT))) == []
    assert "are int32" in " ".join(layout_problems("model", graph(IN, OUT, "int32")))
