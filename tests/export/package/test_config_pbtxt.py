"""config.pbtxt is what the published schema of Triton says."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import text_format

from smelt.export.package.triton_format import TritonTensor, model_config
from tests.support.processes import peer_tools
from tests.support.standins.triton_stand_in import ENUMS, SCHEMA, parse_model_config

SCALARS = {9: "string", 3: "int64", 5: "int32", 4: "uint64"}  # FieldDescriptor.Type
INSIDE = {"ParametersEntry": "ModelConfig", "Kind": "ModelInstanceGroup"}


def example_config() -> str:
    inputs = [TritonTensor("input_ids", "TYPE_INT64", (-1,)), TritonTensor('a "b"', "TYPE_STRING", (1, 2))]
    outputs = [TritonTensor("logits", "TYPE_FP32", (3,))]
    return model_config("graph", "onnxruntime", inputs, outputs, 16, 500, {"k": "v"}, "KIND_GPU")


@pytest.mark.quick
def test_each_field_is_read_as_it_was_meant() -> None:
    found = parse_model_config(example_config())
    assert (found.name, found.backend, found.max_batch_size) == ("graph", "onnxruntime", 16)
    assert [(one.name, one.data_type, list(one.dims)) for one in found.input] == [
        ("input_ids", 9, [-1]),
        ('a "b"', 13, [1, 2]),
    ]
    assert [(one.name, one.data_type, list(one.dims)) for one in found.output] == [("logits", 11, [3])]
    assert found.dynamic_batching.max_queue_delay_microseconds == 500
    assert [(one.count, one.kind) for one in found.instance_group] == [(1, 1)]
    assert [(one.key, one.value.string_value) for one in found.parameters] == [("k", "v")]


def find(triton: Any, name: str) -> Any:
    """Return a message or an enum of Triton's module."""
    return getattr(getattr(triton, INSIDE[name]) if name in INSIDE else triton, name)


@pytest.mark.peers
def test_the_schema_of_the_tests_is_that_of_triton_s_client() -> None:
    triton = peer_tools.triton_schema()
    for name, fields in SCHEMA.items():
        real = find(triton, name).DESCRIPTOR.fields_by_name
        for number, word, kind in map(str.split, fields.split(",")):
            one = real[word]
            inner = one.message_type or one.enum_type
            assert one.number == int(number), (name, word)
            assert ("*" * one.is_repeated) + (inner.name if inner else SCALARS[one.type]) == kind, (
                name,
                word,
            )
    for name, words in ENUMS.items():
        assert dict(find(triton, name).items()) == {word: n for n, word in enumerate(words.split())}


@pytest.mark.peers
def test_triton_s_client_reads_what_is_written_as_the_tests_do() -> None:
    kind = peer_tools.triton_schema().ModelConfig
    assert kind.FromString(parse_model_config(example_config()).SerializeToString()) == text_format.Parse(
        example_config(), kind()
    )
