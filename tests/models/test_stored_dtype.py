"""The float types of a file are read from its header and kept by what is written from it."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from smelt.core.errors import InputError
from smelt.models.checkpoint import load_model, save_model
from smelt.models.empty_model import StoredDtypes, cast_to_stored, config_dtype, stored_dtypes
from smelt.models.weight_files import weight_files_size
from tests.support.expected_errors import raises_code
from tests.support.models import causal, seq2seq, tiny
from tests.support.pairs import matrix

MADE = {
    "marian": tiny.write_marian, "bert": tiny.write_bert, "t5": seq2seq.write_t5,
    "mbart": lambda folder: seq2seq.write_bart(folder, kind="mbart"),
    "gpt2": lambda folder: causal.write_model(folder, "gpt2"),
    "llama": lambda folder: causal.write_model(folder, "llama"),
}  # fmt: skip
HALVES = [torch.float16, torch.bfloat16]


def cast(folder, dtype, only=lambda name: True):
    path = folder / "model.safetensors"
    tensors = {n: t.to(dtype) if only(n) else t for n, t in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def rewritten(folder, out, dtype="keep"):
    out.mkdir()
    model, edits = load_model(folder)
    assert {p.dtype for p in model.parameters() if p.is_floating_point()} == {torch.float32}
    assert model.config.dtype == torch.float32
    return save_model(model, edits, out, folder, dtype), load_file(out / "model.safetensors")


def declared_dtype(folder):
    return json.loads((folder / "config.json").read_text())["dtype"]


@pytest.mark.parametrize(("family", "dtype"), matrix.matrix_cells(list(MADE), HALVES))
def test_16_bit_model_is_saved_unchanged_and_loads_in_transformers(tmp_path, family, dtype):
    folder = cast(MADE[family](tmp_path / "model"), dtype)
    notes, tensors = rewritten(folder, tmp_path / "out")
    source_tensors = load_file(folder / "model.safetensors")
    assert notes == []
    assert tensors.keys() == source_tensors.keys()
    assert all(torch.equal(tensors[name], source_tensors[name]) for name in source_tensors)
    assert declared_dtype(tmp_path / "out") == str(dtype).removeprefix("torch.")
    assert weight_files_size(tmp_path / "out") <= weight_files_size(folder)
    kind = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
    reference = kind.from_pretrained(tmp_path / "out")
    assert reference.dtype == dtype


@pytest.mark.parametrize(
    ("dtype_name", "dtype", "stored"),
    [("fp32", torch.float32, HALVES[0]), ("fp16", HALVES[0], torch.float32), ("bf16", HALVES[1], HALVES[0])],
)
def test_output_dtype_can_be_set(tmp_path, dtype_name, dtype, stored):
    folder = cast(tiny.write_marian(tmp_path / "model"), stored)
    _, tensors = rewritten(folder, tmp_path / "out", dtype_name)
    assert {t.dtype for t in tensors.values()} == {dtype}
    assert declared_dtype(tmp_path / "out") == str(dtype).removeprefix("torch.")


def test_mixed_dtypes_are_kept_per_tensor(tmp_path):
    folder = cast(tiny.write_bert(tmp_path / "model"), torch.bfloat16, lambda name: "LayerNorm" not in name)
    _, tensors = rewritten(folder, tmp_path / "out")
    assert {n for n, t in tensors.items() if t.dtype == torch.float32} == {
        n for n in tensors if "LayerNorm" in n
    }
    assert declared_dtype(tmp_path / "out") == "bfloat16"


def test_stray_files_are_ignored_and_gamma_names_are_mapped(tmp_path):
    folder = cast(
        tiny.write_bert(tmp_path / "model"), torch.bfloat16, lambda name: "LayerNorm.weight" not in name
    )
    tensors = load_file(folder / "model.safetensors")
    tensors = {n.replace("LayerNorm.weight", "LayerNorm.gamma"): t for n, t in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_file({n: t.half() for n, t in tensors.items()}, folder / "model.fp16.safetensors")
    _, written = rewritten(folder, tmp_path / "out")
    assert {str(t.dtype) for t in written.values()} == {"torch.bfloat16", "torch.float32"}
    assert {n for n, t in written.items() if t.dtype == torch.float32} == {
        n for n in written if n.endswith("LayerNorm.weight")
    }
    assert weight_files_size(folder) == (folder / "model.safetensors").stat().st_size


def test_tied_tensor_keeps_dtype_under_any_name(tmp_path):
    folder = cast(
        tiny.write_marian(tmp_path / "model"), torch.float16, lambda name: name != "model.shared.weight"
    )
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.shared.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _, written = rewritten(folder, tmp_path / "out")
    assert {n for n, t in written.items() if t.dtype == torch.float32} == {"model.shared.weight"}


def test_new_tensors_get_dtype_of_origin_or_most_common(tmp_path):
    stored = {"a.weight": torch.zeros(2, 2), "b.weight": torch.zeros(9, 9).half(), "h.0.c": torch.zeros(3)}
    save_file(stored, tmp_path / "model.safetensors")
    types = stored_dtypes(tmp_path)
    assert types.default == torch.float16
    assert types.dtype_for(["a.down.weight"]) == types.dtype_for(["a.up.weight"]) == torch.float32
    assert types.dtype_for(["new.weight"]) == torch.float16
    assert types.dtype_for(["other", "a.weight"]) == torch.float32  # a tied tensor has several names
    assert types.dtype_for(["transformer.h.0.c"]) == torch.float32  # the file names it from the body on
    assert types.dtype_for(["transformer.a.up.weight"]) == torch.float32


def test_quantization_scales_do_not_define_float_dtype(tmp_path):
    """They are float16 in many schemes: what trains with codes would be rounded to it."""
    scales = {"a.matrix.scales": torch.zeros(99).half(), "b.matrix.codes": torch.zeros(9, dtype=torch.uint8)}
    save_file({**scales, "norm.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    assert stored_dtypes(tmp_path).dtype_for(["a.adapter.up.weight"]) == torch.float32
    assert stored_dtypes(tmp_path).dtype_for(["a.matrix.scales"]) == torch.float16
    save_file(scales, tmp_path / "model.safetensors")
    assert stored_dtypes(tmp_path).default == torch.float16  # nothing else says it


def test_folder_without_weights_has_float32(tmp_path):
    assert stored_dtypes(tmp_path) == StoredDtypes({}, torch.float32)
    (tmp_path / "model.safetensors").write_bytes(b"no header")
    with raises_code("damaged-weights", InputError):
        stored_dtypes(tmp_path)


def test_values_beyond_float16_are_kept_float32_with_warning(tmp_path):
    folder = cast(tiny.write_bert(tmp_path / "model"), torch.float16)
    model, edits = load_model(folder)
    with torch.no_grad():
        model.classifier.weight[0, 0] = 1e5
        model.bert.pooler.dense.weight[0, 0] = -2e5
    (tmp_path / "out").mkdir()
    (note,) = save_model(model, edits, tmp_path / "out", folder)
    assert (note.code, note.setting) == ("beyond-16-bits", "dtype")
    assert all(part in note.message for part in ("bert.pooler.dense.weight", "200,000", " 1 more"))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    wide = {n for n, t in tensors.items() if t.dtype == torch.float32}
    assert wide == {"classifier.weight", "bert.pooler.dense.weight"}
    assert float(tensors["classifier.weight"][0, 0]) == 1e5
    reference = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert float(reference.classifier.weight.detach()[0, 0]) == 1e5, "transformers made an infinity of it"


def test_existing_infinities_are_not_overflow():
    stored, notes = cast_to_stored({"w": torch.tensor([float("inf"), 1.0])}, {"w": torch.float16})
    assert (stored["w"].dtype, notes) == (torch.float16, [])


def test_config_dtype_is_dtype_of_most_values():
    assert config_dtype([torch.zeros(9).half(), torch.zeros(3)]) == "float16"
    assert config_dtype([torch.zeros(9, dtype=torch.int8), torch.zeros(3).bfloat16()]) == "bfloat16"
    assert config_dtype([torch.zeros(9).half(), torch.full((3,), 1e6)]) == "float32"
