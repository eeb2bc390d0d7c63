"""Parts of Triton that need no server: its schema of config.pbtxt, and what a model in Python imports."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

# triton-inference-server/common, protobuf/model_config.proto: the messages that are written here, with the
# number, name and type of each field; * is a repeated one. `make peers` compares them with Triton's client.
SCHEMA = {
    "ModelInput": "1 name string, 2 data_type DataType, 4 dims *int64",
    "ModelOutput": "1 name string, 2 data_type DataType, 3 dims *int64",
    "ModelDynamicBatching": "1 preferred_batch_size *int32, 2 max_queue_delay_microseconds uint64",
    "ModelInstanceGroup": "1 name string, 2 count int32, 3 gpus *int32, 4 kind Kind, 5 profile *string",
    "ModelParameter": "1 string_value string",
    "ParametersEntry": "1 key string, 2 value ModelParameter",
    "ModelConfig": "1 name string, 2 platform string, 17 backend string, 4 max_batch_size int32,"
    " 5 input *ModelInput, 6 output *ModelOutput, 7 instance_group *ModelInstanceGroup,"
    " 11 dynamic_batching ModelDynamicBatching, 14 parameters *ParametersEntry",
}
ENUMS = {
    "DataType": "TYPE_INVALID TYPE_BOOL TYPE_UINT8 TYPE_UINT16 TYPE_UINT32 TYPE_UINT64 TYPE_INT8 TYPE_INT16"
    " TYPE_INT32 TYPE_INT64 TYPE_FP16 TYPE_FP32 TYPE_FP64 TYPE_STRING TYPE_BF16",
    "Kind": "KIND_AUTO KIND_GPU KIND_CPU KIND_MODEL",
}
_SCALARS = {"string": 9, "int64": 3, "int32": 5, "uint64": 4}  # of FieldDescriptorProto.Type
_ENUM, _MESSAGE = 14, 11


def parse_model_config(text: str) -> Any:
    """Return the ModelConfig that `text` says.

    Raises:
        text_format.ParseError: a field or a word of an enum that the schema has not.
    """
    file = descriptor_pb2.FileDescriptorProto(name="model_config.proto", package="inference", syntax="proto3")
    for name, definitions in ENUMS.items():
        values = file.enum_type.add(name=name).value
        for number, definition in enumerate(definitions.split()):
            values.add(name=definition, number=number)
    for name, fields in SCHEMA.items():
        message = file.message_type.add(name=name)
        for field in fields.split(","):
            number, definition, kind = field.split()
            plain = kind.removeprefix("*")
            new_field = message.field.add(
                name=definition, number=int(number), label=3 if kind != plain else 1
            )
            new_field.type = _SCALARS.get(plain) or (_ENUM if plain in ENUMS else _MESSAGE)
            if plain not in _SCALARS:
                new_field.type_name = f".inference.{plain}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    kind = message_factory.GetMessageClass(pool.FindMessageTypeByName("inference.ModelConfig"))
    return text_format.Parse(text, kind())


class TritonStandIn(ModuleType):
    """What triton_python_backend_utils has and model.py uses; requests to models run in ONNX Runtime."""

    class TritonModelException(Exception):  # noqa: N818 -- Triton's name
        pass

    def __init__(self, repository: Path, broken: str | None = None) -> None:
        super().__init__("triton_python_backend_utils")
        self.repository, self.broken = repository, broken
        self.batches: list[int] = []
        self.TritonError = lambda text: SimpleNamespace(message=lambda: text)

    def Tensor(self, name: str, values: Any) -> Any:  # noqa: N802 -- Triton's name
        return SimpleNamespace(name=name, as_numpy=lambda: values)

    def get_input_tensor_by_name(self, request: Any, name: str) -> Any:
        return next(tensor for tensor in request if tensor.name == name)

    def get_output_tensor_by_name(self, response: Any, name: str) -> Any:
        return next(tensor for tensor in response.tensors if tensor.name == name)

    def InferenceResponse(self, output_tensors: list[Any], error: Any = None) -> Any:  # noqa: N802
        return SimpleNamespace(
            tensors=output_tensors, has_error=lambda: error is not None, error=lambda: error
        )

    def InferenceRequest(  # noqa: N802
        self, model_name: str, requested_output_names: list[str], inputs: list[Any]
    ) -> Any:
        config = parse_model_config((self.repository / model_name / "config.pbtxt").read_text())
        assert sorted(tensor.name for tensor in inputs) == sorted(tensor.name for tensor in config.input)
        assert set(requested_output_names) <= {tensor.name for tensor in config.output}

        def run() -> Any:
            if self.broken:
                return self.InferenceResponse([], self.TritonError(self.broken))
            graph = str(self.repository / model_name / "1" / "model.onnx")
            feeds = {tensor.name: tensor.as_numpy() for tensor in inputs}
            self.batches.append(len(feeds["input_ids"]))
            outputs = onnxruntime.InferenceSession(graph).run(requested_output_names, feeds)
            pairs = zip(requested_output_names, outputs, strict=True)
            return self.InferenceResponse([self.Tensor(*pair) for pair in pairs])

        return SimpleNamespace(exec=run)


def ask_text_model(repository: Path, texts: list[str], monkeypatch: Any, broken: str | None = None) -> Any:
    """Return what model.py answers to requests of two texts each, and the stand-in."""
    triton = TritonStandIn(repository, broken)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", triton)
    spec = importlib.util.spec_from_file_location("shipped_model", repository / "text" / "1" / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.TritonPythonModel()
    model.initialize({"model_repository": str(repository / "text"), "model_version": "1"})
    requests = []
    for start in range(0, len(texts), 2):
        rows = np.array([[text.encode()] for text in texts[start : start + 2]], dtype=object)
        requests.append([triton.Tensor("TEXT", rows)])
    return model.execute(requests), triton
