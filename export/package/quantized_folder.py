"""Folders of quantized language models for transformers and GPU servers: the parts common to their layouts.

The linear layers of a quantized artifact are written in the layout of the format, as exactly their integers,
scales and zero points. Servers look up embeddings in floats and keep the output layer in floats, so that
quantized ones are written as their values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from smelt.core.artifact import Artifact
from smelt.core.errors import InputError
from smelt.core.files import read_json_object, write_json
from smelt.export.package.huggingface import (
    copy_hub_folder,
    require_config_structure,
    write_published_names,
)
from smelt.export.package.package_format import PackageOrigin, SupportedArtifacts, UsageNotes
from smelt.models.edits import STRUCTURE_FILE, Edit, quantize_edit_options, read_edits
from smelt.models.families.family import DECODER_TASKS
from smelt.models.families.registry import find_family
from smelt.models.quantization_config import QUANTIZATION_CONFIG_KEY
from smelt.models.weight_files import WEIGHTS_FILE, WEIGHTS_INDEX_FILE, find_weights
from smelt.quantization.schemes.registry import SCHEMES, default_options, find_scheme

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from smelt.quantization.layers import QuantizedMatrix

SERVE_COMMAND = "pip install vllm && vllm serve . --served-model-name smelt"


class QuantizedFolderFormat(ABC):
    """A format of quantized language models.

    description: of its weights, for messages. requirements: packages that transformers needs to load it.
    float_dtypes: the dtype of float tensors, by the model's, where kernels do not support that; empty: all
    tensors are kept.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    description: ClassVar[str]
    requirements: ClassVar[str]
    float_dtypes: ClassVar[Mapping[str, str]] = {}
    supported: ClassVar[SupportedArtifacts] = SupportedArtifacts(
        formats=frozenset({"torch"}),
        tasks=frozenset(DECODER_TASKS),
        hint="Package the step `quantize`, before the export.",
    )
    is_artifact: ClassVar[bool] = False

    @abstractmethod
    def has_form(self, args: Mapping[str, Any]) -> bool:
        """Return whether the layout has a form for weights with these `Scheme.checkpoint_args`."""

    @abstractmethod
    def convert(
        self, matrices: Mapping[str, QuantizedMatrix], float_layers: list[str], head: str, dtype: torch.dtype
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors of the quantized layers in the layout, and `quantization_config`.

        Args:
            matrices: of the quantized layers, by their names; their inputs are multiples of the group sizes.
            float_layers: the other linear layers, without the output layer.
            head: the output layer, which has floats too.
            dtype: of the model's floats.

        Raises:
            InputError: the layout does not support the size of a layer.
            RunError: the tensors stand for other values.
        """

    def check(self, artifact: Artifact) -> None:
        """Require quantized linear layers that the layout supports, in a structure of transformers.

        Raises:
            InputError: there are none, or the layout or config.json cannot describe some layers.
        """
        config = read_json_object(artifact.path / "config.json")
        family = find_family(config)
        if family is None or family.transposed_suffixes:
            raise InputError(
                f"its linear layers are no torch.nn.Linear in transformers ({config.get('model_type')}), so"
                " that these checkpoints have no form for them. Package it as huggingface before `quantize`.",
                code="unsupported-family",
            )
        tables, edits = _tables(config), read_edits(artifact.path)
        require_config_structure(
            edit for edit in edits if edit.get("op") != "quantize" and not _is_tie(edit, tables)
        )
        layer_edits = quantized_layer_edits(artifact.path)
        if not layer_edits:
            raise InputError(
                "none of its linear layers is quantized. Package it as huggingface, or add the step"
                f" `- quantize: {{scheme: {self._schemes()[0]}}}`.",
                code="not-quantized",
            )
        for edit in layer_edits:
            self._require_form(edit)

    def example_config(self, edits: list[Edit]) -> tuple[str, str]:
        """Return the class and the arguments of `quantization_config` in the example; by default none."""
        return "", ""

    def _require_form(self, edit: Edit) -> None:
        """Require that the layout has a form for a layer.

        Raises:
            InputError: `unsupported-scheme`.
        """
        options = quantize_edit_options(edit)
        args = find_scheme(edit["scheme"]).checkpoint_args(options)
        if args is None or not self.has_form(args):
            layer_text = ", ".join(
                [str(edit["scheme"]), *(f"{name}: {value}" for name, value in options.items())]
            )
            raise InputError(
                f"its layer '{edit['module']}' is quantized with {layer_text}; this format holds"
                f" {self.description}. Quantize with `scheme: {'` or `'.join(self._schemes())}` and its"
                " default of `symmetric`, or export the model to ONNX.",
                code="unsupported-scheme",
            )

    def _schemes(self) -> list[str]:
        """Return the schemes with a form, by name."""
        args = {name: scheme.checkpoint_args(default_options(scheme)) for name, scheme in SCHEMES.items()}
        return [name for name, value in args.items() if value is not None and self.has_form(value)]

    def write(self, artifact: Artifact, origin: PackageOrigin, folder: Path) -> UsageNotes:
        """Write the weights in the layout, and the config.

        Raises:
            InputError: a layer has a size that the layout does not support.
        """
        from safetensors.torch import save_file

        weights = {path.name for path in find_weights(artifact.path).files}
        usage = copy_hub_folder(
            artifact,
            origin,
            folder,
            {*weights, WEIGHTS_INDEX_FILE, STRUCTURE_FILE},
            *self.example_config(read_edits(artifact.path)),
        )
        try:
            tensors, config, notes = self._convert(artifact.path)
        except InputError as error:
            raise InputError(
                f"This model cannot be packaged as '{self.name}': {error}", code=error.code
            ) from error
        save_file(dict(sorted(tensors.items())), folder / WEIGHTS_FILE, metadata={"format": "pt"})
        write_json(folder / "config.json", config)
        write_published_names(folder)
        return replace(
            usage,
            install=f"{usage.install} {self.requirements}",
            examples=(*usage.examples, ("bash", SERVE_COMMAND)),
            notes=(*usage.notes, *notes),
        )

    def _convert(self, source: Path) -> tuple[dict[str, Tensor], dict[str, Any], list[str]]:
        """Return all tensors of the artifact `source` in the layout, config.json, and notes for users."""
        import torch

        from smelt.models.checkpoint import add_model_prefix, load_model, read_tensors
        from smelt.models.edits import module_names
        from smelt.quantization.layers import QuantizedMatrix

        config = read_json_object(source / "config.json")
        config["dtype"] = self.float_dtypes.get(str(config["dtype"]), config["dtype"])
        dtype: torch.dtype = getattr(torch, config["dtype"])
        tables = _tables(config)
        model, _ = load_model(source)
        names_of_matrices = {
            module: [name.removesuffix(".matrix") for name in names]
            for module, names in module_names(model).items()
            if isinstance(module, QuantizedMatrix)
        }
        quantized = {name for names in names_of_matrices.values() for name in names}
        tensors = {
            name: tensor.to(dtype) if self.float_dtypes and tensor.is_floating_point() else tensor
            for name, tensor in add_model_prefix(model, read_tensors(source, widen=False)).items()
            if name.partition(".matrix.")[0] not in quantized
        }
        matrices: dict[str, QuantizedMatrix] = {}
        for matrix, (name, *_) in names_of_matrices.items():
            if name in tables:
                tensors[f"{name}.weight"] = matrix.dequantize().to(dtype)
            else:
                _require_whole_groups(name, matrix)
                matrices[name] = matrix
        embedding, head = _token_tables(config)
        float_layers = float_linear_layers(model, config)
        packed, config[QUANTIZATION_CONFIG_KEY] = self.convert(matrices, float_layers, head, dtype)
        if {f"{embedding}.weight", f"{head}.weight"} <= tensors.keys():
            config["tie_word_embeddings"] = False  # only one of the two was quantized
        notes = _notes(matrices.values(), bool(quantized & tables), dtype)
        if self.float_dtypes:
            notes.append(f"Float tensors are {config['dtype']}: kernels of this layout compute in 16 bits.")
        return tensors | packed, config, notes


def quantized_layer_edits(folder: Path) -> list[Edit]:
    """Return the edits that quantize layers of the model in `folder`, without embeddings and output layer."""
    tables = _tables(read_json_object(folder / "config.json"))
    return [
        edit for edit in read_edits(folder) if edit.get("op") == "quantize" and edit["module"] not in tables
    ]


def float_linear_layers(model: Any, config: Mapping[str, Any]) -> list[str]:
    """Return the names of the linear layers of a language model that are floats, without the output layer."""
    import torch

    _, head = _token_tables(config)
    named_modules = model.named_modules()
    return [name for name, module in named_modules if name != head and isinstance(module, torch.nn.Linear)]


def _tables(config: Mapping[str, Any]) -> set[str]:
    """Return the names of the embeddings and the output layer of a family's model with this config."""
    family = find_family(config)
    assert family is not None  # see `check`
    embeddings = (name for stack in family.stacks(config) for name in stack.stream.embeddings)
    return {name.rpartition(".")[0] for name in embeddings} | {*family.head_modules}


def _token_tables(config: Mapping[str, Any]) -> tuple[str, str]:
    """Return the names of the token embedding and the output layer."""
    family = find_family(config)
    assert family is not None  # see `check`
    embedding = family.stacks(config)[0].stream.embeddings[0]
    return embedding.rpartition(".")[0], family.head_modules[-1]


def _is_tie(edit: Edit, tables: set[str]) -> bool:
    """Return whether an edit makes the output layer hold the quantized matrix of the embedding."""
    names = (str(edit.get("module")), str(edit.get("with")))
    return edit.get("op") == "share" and all(
        name.endswith(".matrix") and name.removesuffix(".matrix") in tables for name in names
    )


def _require_whole_groups(name: str, matrix: QuantizedMatrix) -> None:
    """Require that the inputs of a layer are a multiple of its group size.

    Raises:
        InputError: `unsupported-group-size`.
    """
    size = matrix.scheme.group_size(matrix.width, matrix.options)
    if matrix.width % size:
        raise InputError(
            f"its layer '{name}' has {matrix.width} inputs, which is no multiple of its group size {size}, as"
            " kernels of GPUs require. Quantize with another group_size.",
            code="unsupported-group-size",
        )


def _notes(matrices: Iterable[QuantizedMatrix], has_float_tables: bool, dtype: torch.dtype) -> list[str]:
    """Return notes for users: what differs from smelt's model, and what was not tried."""
    import torch

    notes = ["The last command serves the model with vLLM, on a GPU. It was not run with this package."]
    if has_float_tables:
        notes.append(
            "Embeddings or output layer are quantized in the artifact. Here they are floats of the same"
            " values, because servers do not read them quantized."
        )
    if any(matrix.scheme.quantizes_activations(matrix.options) for matrix in matrices):
        notes.append(
            "The weights are those of the artifact. Its scores were measured with smelt's quantized"
            " activations, which are floats here, or int8 with a scale for each token; outputs may differ."
        )
    if dtype == torch.bfloat16:
        notes.append(
            "Scales are used in the model's dtype, bfloat16, which has 8 bits: weights differ from the"
            " artifact's by up to 0.4 %."
        )
    return notes
