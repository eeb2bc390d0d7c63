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
def test_each_field_round_trips() -> None:
    config = parse_model_config(example_config())
    assert (config.name, config.backend, config.max_batch_size) == ("graph", "onnxruntime", 16)
    assert [(entry.name, entry.data_type, list(entry.dims)) for entry in config.input] == [
        ("input_ids", 9, [-1]),
        ('a "b"', 13, [1, 2]),
    ]
    assert [(entry.name, entry.data_type, list(entry.dims)) for entry in config.output] == [
        ("logits", 11, [3])
    ]
    assert config.dynamic_batching.max_queue_delay_microseconds == 500
    assert [(entry.count, entry.kind) for entry in config.instance_group] == [(1, 1)]
    assert [(entry.key, entry.value.string_value) for entry in config.parameters] == [("k", "v")]


def find(triton: Any, name: str) -> Any:
    """Return a message or an enum of Triton's module."""
    return getattr(getattr(triton, INSIDE[name]) if name in INSIDE else triton, name)


@pytest.mark.peers
def test_schema_equals_tritonclient_schema() -> None:
    triton = peer_tools.triton_schema()
    for name, fields in SCHEMA.items():
        field_descriptors = find(triton, name).DESCRIPTOR.fields_by_name
        for field_number, field_name, kind in map(str.split, fields.split(",")):
            field = field_descriptors[field_name]
            inner = field.message_type or field.enum_type
            assert field.number == int(field_number), (name, field_name)
            assert ("*" * field.is_repeated) + (inner.name if inner else SCALARS[field.type]) == kind, (
                name,
                field_name,
            )
    for name, value_names in ENUMS.items():
        assert dict(find(triton, name).items()) == {
            field_name: n for n, field_name in enumerate(value_names.split())
        }


@pytest.mark.peers
def test_tritonclient_parses_config_like_test_schema() -> None:
    kind = peer_tools.triton_schema().ModelConfig
    assert kind.FromString(parse_model_config(example_config()).SerializeToString()) == text_format.Parse(
        example_config(), kind()
    )
