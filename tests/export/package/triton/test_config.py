"""config.pbtxt is what the published schema of Triton says."""

from __future__ import annotations

import pytest
from google.protobuf import text_format
from triton_parts import parsed

from smelt.export.package.triton.config import Tensor, model_config


def test_each_field_is_read_as_it_was_meant() -> None:
    inputs = [Tensor("input_ids", "TYPE_INT64", (-1,)), Tensor('a "b"', "TYPE_STRING", (1, 2))]
    said = model_config(
        "graph", "onnxruntime", inputs, [Tensor("logits", "TYPE_FP32", (3,))], 16, 500, {"k": "v"}, "KIND_GPU"
    )
    found = parsed(said)
    assert (found.name, found.backend, found.max_batch_size) == ("graph", "onnxruntime", 16)
    assert [(one.name, one.data_type, list(one.dims)) for one in found.input] == [
        ("input_ids", 9, [-1]),
        ('a "b"', 13, [1, 2]),
    ]
    assert [(one.name, one.data_type, list(one.dims)) for one in found.output] == [("logits", 11, [3])]
    assert found.dynamic_batching.max_queue_delay_microseconds == 500
    assert [(one.count, one.kind) for one in found.instance_group] == [(1, 1)]
    assert [(one.key, one.value.string_value) for one in found.parameters] == [("k", "v")]


def test_the_schema_of_this_test_refuses_what_it_does_not_know() -> None:
    with pytest.raises(text_format.ParseError):
        parsed('name: "a"\nmax_batch: 3\n')
    with pytest.raises(text_format.ParseError):
        parsed("input {\n  data_type: TYPE_FLOAT\n}\n")
