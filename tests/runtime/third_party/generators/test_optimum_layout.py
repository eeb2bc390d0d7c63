"""Which graphs of a folder generate together, and what is said where they do not."""

import pytest

from smelt.runtime.third_party.generators.optimum_layout import layout_problems, required_graphs
from smelt.runtime.third_party.signature import GraphSignature, TensorSpec

TWO = ("encoder_model", "decoder_model", "decoder_with_past_model")


@pytest.mark.parametrize(
    ("names", "kind", "parts"),
    [
        (TWO, "encoder-decoder", TWO),
        ((*TWO, "decoder_model_merged"), "encoder-decoder", TWO),
        (
            ("encoder_model", "decoder_model_merged"),
            "encoder-decoder",
            ("encoder_model", "decoder_model_merged"),
        ),
        (("model",), "decoder", ("model",)),
    ],
)
def test_layouts_of_optimum_are_known(names: tuple[str, ...], kind: str, parts: tuple[str, ...]) -> None:
    assert required_graphs(names) == (kind, parts)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("encoder_model",), "encoder_model.onnx and no decoder"),
        (("encoder_model", "decoder_model"), "decoder_model.onnx alone, without caches"),
        (("encoder_model", "decoder_with_past_model"), "package FOLDER --format optimum"),
        (("decoder_model", "decoder_with_past_model"), "summarizes, copy that file too"),
        (("decoder_model", "decoder_with_past_model"), "laid out language models before 1.14"),
        (("classifier",), "no model.onnx and no encoder_model.onnx"),
    ],
)
def test_what_makes_no_whole_is_said_with_what_to_do(names: tuple[str, ...], said: str) -> None:
    assert said in str(required_graphs(names))


def graph(inputs: tuple[str, ...], outputs: tuple[str, ...], ids: str = "int64") -> GraphSignature:
    values = [TensorSpec(name=name, dtype=ids, shape=("batch", "length")) for name in inputs]
    return GraphSignature(
        inputs=tuple(values), outputs=tuple(TensorSpec(name=n, dtype="float32", shape=None) for n in outputs)
    )


IN, OUT = ("input_ids", "attention_mask", "past_key_values.0.key"), ("logits", "present.0.key")


@pytest.mark.parametrize(
    ("inputs", "outputs", "said"),
    [
        (IN[1:], OUT, "it has no input_ids"),
        (IN, OUT[1:], "it has no logits"),
        ((*IN, "cache_position"), OUT, "its inputs cache_position are none that smelt knows"),
        (IN[:2], OUT, "it takes no caches"),
        (IN, OUT[:1], "it leaves no caches"),
        (
            (*IN, "past_key_values.0.value"),
            OUT,
            "takes past_key_values.0.value and leaves no present.0.value",
        ),
    ],
)
def test_a_graph_that_cannot_be_that_part_is_said(
    inputs: tuple[str, ...], outputs: tuple[str, ...], said: str
) -> None:
    assert any(said in problem for problem in layout_problems("model", graph(inputs, outputs)))


def test_a_graph_that_fits_has_nothing_to_say_and_ids_of_32_bits_have() -> None:
    assert list(layout_problems("model", graph((*IN, "position_ids"), OUT))) == []
    assert "are int32" in " ".join(layout_problems("model", graph(IN, OUT, "int32")))
