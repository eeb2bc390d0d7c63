"""GPTQ and AWQ checkpoints: their very codes, against values by the formats' definition; what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from smelt.compress.finetune import Finetune, FinetuneSettings
from smelt.core.errors import InputError
from smelt.core.messages import message_codes
from smelt.export.onnx_stage import Onnx
from smelt.export.settings import OnnxSettings
from smelt.models.checkpoint import load_model
from smelt.models.edits import read_edits
from smelt.models.import_model import import_model
from smelt.models.model_size import count_parameters
from smelt.quantization.layers import is_quantized
from tests.support.expected_errors import raises_code
from tests.support.models import causal, every_family, quantized_checkpoints

GATE = "model.layers.0.mlp.gate_proj"
AUTO_ROUND = Path(__file__).parent / "written_by_auto_round"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return causal.write_model(tmp_path_factory.mktemp("float") / "llama", "llama")


def taken(folder, out):
    out.mkdir()
    notes = import_model(folder, out)
    return load_model(out)[0], notes


GPTQ = {
    "symmetric": ({}, True, 32),
    "zero points": ({"symmetric": False}, False, 32),
    "second layout": ({"symmetric": False, "form": "gptq_v2"}, False, 32),
    "layout not named": ({"symmetric": False, "form": None}, False, 32),
    "a row a group": ({"group": -1, "symmetric": False}, False, 64),
    "large groups": ({"group": 96}, True, 32),
}


@pytest.mark.parametrize("case", GPTQ)
def test_gptq_weights_equal_format_definition(case, llama, tmp_path):
    settings, symmetric, _ = GPTQ[case]
    folder, values = quantized_checkpoints.write_gptq(llama, tmp_path / "gptq", **settings)
    model, notes = taken(folder, tmp_path / "out")
    assert len(values) == 14
    for name, expected in values.items():
        matrix = model.get_submodule(name).matrix
        np.testing.assert_array_equal(matrix.dequantize().numpy(), expected)
        assert matrix.options["symmetric"] is symmetric
    floats = {n for n, m in model.named_modules() if not is_quantized(m) and hasattr(m, "weight")}
    assert {"model.embed_tokens", "lm_head"} <= floats
    assert message_codes(notes) == ["already-quantized"]
    assert all(part in notes[0].message for part in ("gptq", " 14 ", "int4"))
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text()
    assert count_parameters(tmp_path / "out") == count_parameters(llama)  # without scales, zero points


def test_awq_weights_equal_format_definition(llama, tmp_path):
    folder, values = quantized_checkpoints.write_awq(llama, tmp_path / "awq")
    model, _ = taken(folder, tmp_path / "out")
    for name, expected in values.items():
        np.testing.assert_array_equal(model.get_submodule(name).matrix.dequantize().numpy(), expected)
    assert {edit["op"] for edit in read_edits(tmp_path / "out")} == {"quantize"}


@pytest.mark.parametrize("form", ["gptq", "awq", "auto-round"])
def test_auto_round_checkpoints_equal_its_dequantized_values(form, tmp_path):
    model, _ = taken(AUTO_ROUND / form, tmp_path / "out")
    values = load_file(AUTO_ROUND / f"{form}-values.safetensors")
    assert values.keys() == {name for name, module in model.named_modules() if is_quantized(module)}
    for name, expected in values.items():
        matrix = model.get_submodule(name).matrix
        assert matrix.dequantize().equal(expected)
        assert matrix.options["symmetric"] is (form == "auto-round")


@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_imported_quantized_model_runs_exports_and_trains(kind, llama, tmp_path):
    folder, values = getattr(quantized_checkpoints, f"write_{kind}")(llama, tmp_path / kind)
    model, _ = taken(folder, tmp_path / "out")
    plain, _ = load_model(llama)
    with torch.no_grad():
        for name, value in values.items():
            plain.get_submodule(name).weight.copy_(torch.tensor(value))
        for name in ("model.embed_tokens", "lm_head"):
            plain.get_submodule(name).weight.copy_(plain.get_submodule(name).weight.half())
        ids = torch.randint(5, 100, (2, 12), generator=torch.Generator().manual_seed(0))
        assert not torch.allclose(model(ids).logits, plain(ids).logits, atol=1e-3)
        for module in model.modules():
            if is_quantized(module):
                module.matrix.options["accuracy_level"] = 0  # activations as they are
        torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-5)
    if kind == "awq":
        exported = every_family.run_stage(
            Onnx(), OnnxSettings(generation_graph=False), tmp_path / "out", "llama", tmp_path / "onnx"
        )
        assert exported.details["parity"].keys() == exported.details["graphs"].keys()
        return
    settings = FinetuneSettings(max_steps=1, batch_size=4, num_evals=0, precision="fp32", learning_rate=1e-3)
    tuned = every_family.run_stage(Finetune(), settings, tmp_path / "out", "llama", tmp_path / "tuned")
    assert read_edits(tmp_path / "tuned") == read_edits(tmp_path / "out")
    assert tuned.details["latent_weights"] == "codes"


def test_zero_biases_of_layers_without_bias_are_dropped(llama, tmp_path):
    folder, _ = quantized_checkpoints.write_gptq(llama, tmp_path / "gptq")
    tensors = quantized_checkpoints.load_tensors(folder)
    quantized_checkpoints.save_tensors(folder, tensors | {f"{GATE}.bias": np.zeros(96, np.float16)})
    assert taken(folder, tmp_path / "out")[0].get_submodule(GATE).bias is None
    quantized_checkpoints.save_tensors(folder, tensors | {f"{GATE}.bias": np.ones(96, np.float16)})
    with raises_code("unknown-tensor", InputError) as caught:
        taken(folder, tmp_path / "again")
    assert "gate_proj.bias" in str(caught.value)


def shifted(index):
    return np.roll(index, 1)


REFUSED = {
    "order": (("g_idx", shifted), "unsupported-group-order", "gate_proj.g_idx"),
    "missing": (("qzeros", lambda t: None), "missing-tensor", "'model.layers.0.mlp.gate_proj.qzeros'"),
    "three bits": (("qweight", lambda t: t[:6]), "shape-mismatch", "gate_proj.qweight' is int32 [6, 96]"),
    "infinite": (("scales", lambda t: t * np.float16(np.inf)), "inexact-scales", "gate_proj.scales'"),
    "finer scales": (("scales", lambda t: t.astype(np.float32) + 1e-6), "inexact-scales",
        "gate_proj.scales'"),
    "sixteen": (("qzeros", lambda t: t * 0 - 1), "zero-point-out-of-range", "gate_proj.qzeros'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_inexact_imports_are_rejected(case, llama, tmp_path):
    (part, change), code, name = REFUSED[case]
    folder, _ = quantized_checkpoints.write_gptq(llama, tmp_path / "gptq")
    tensors = quantized_checkpoints.load_tensors(folder)
    new = change(tensors.pop(f"{GATE}.{part}"))
    quantized_checkpoints.save_tensors(
        folder, tensors | ({} if new is None else {f"{GATE}.{part}": np.ascontiguousarray(new)})
    )
    with raises_code(code, InputError) as caught:
        taken(folder, tmp_path / "out")
    assert name in str(caught.value)


def test_act_order_without_index_is_rejected(llama, tmp_path):
    folder, _ = quantized_checkpoints.write_gptq(llama, tmp_path / "gptq", desc_act=True)
    assert taken(folder, tmp_path / "out")[1]  # an index that changes no order
    quantized_checkpoints.save_tensors(
        folder,
        {n: t for n, t in quantized_checkpoints.load_tensors(folder).items() if not n.endswith(".g_idx")},
    )
    with raises_code("missing-tensor", InputError) as caught:
        taken(folder, tmp_path / "again")
    assert ".g_idx'" in str(caught.value)


def test_float_layers_of_quantized_checkpoint_are_kept_float(llama, tmp_path):
    overrides = {"extra_config": {GATE: {"bits": 16}}, "modules_in_block_to_quantize": [["mlp.up_proj"]]}
    folder, values = quantized_checkpoints.write_gptq(llama, tmp_path / "gptq", **overrides)
    float_weight = quantized_checkpoints.load_tensors(llama)[f"{GATE}.weight"].astype(np.float16)
    tensors = {n: t for n, t in quantized_checkpoints.load_tensors(folder).items() if not n.startswith(GATE)}
    quantized_checkpoints.save_tensors(folder, tensors | {f"{GATE}.weight": float_weight})
    model, notes = taken(folder, tmp_path / "out")
    assert message_codes(notes) == ["already-quantized"]
    assert " 13 " in notes[0].message
    np.testing.assert_array_equal(model.get_submodule(GATE).weight.detach().numpy(), float_weight)
    other = GATE.replace("layers.0", "layers.1")
    np.testing.assert_array_equal(model.get_submodule(other).matrix.dequantize().numpy(), values[other])


def test_group_size_beyond_row_equals_one_group_per_row(llama, tmp_path):
    folder, values = quantized_checkpoints.write_gptq(llama, tmp_path / "gptq", group=-1, group_size=10**30)
    model, _ = taken(folder, tmp_path / "out")
    np.testing.assert_array_equal(model.get_submodule(GATE).matrix.dequantize().numpy(), values[GATE])


def test_damaged_weights_are_rejected(llama, tmp_path):
    folder, _ = quantized_checkpoints.write_gptq(llama, tmp_path / "gptq")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with raises_code("damaged-weights", InputError) as caught:
        taken(folder, tmp_path / "out")
    assert "model.safetensors" in str(caught.value)


def test_weights_file_named_in_config_is_used(llama, tmp_path):
    folder, values = quantized_checkpoints.write_gptq(llama, tmp_path / "gptq")
    (folder / "model.safetensors").rename(folder / "codes.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "codes.safetensors"}))
    model, _ = taken(folder, tmp_path / "out")
    np.testing.assert_array_equal(model.get_submodule(GATE).matrix.dequantize().numpy(), values[GATE])


def test_unsupported_group_size_is_rejected(llama, tmp_path):
    folder, _ = quantized_checkpoints.write_gptq(llama, tmp_path / "gptq", group=24)
    with raises_code("unsupported-group-size", InputError) as caught:
        taken(folder, tmp_path / "out")
    assert all(part in str(caught.value) for part in ("24", "16, 32, 64, 128"))


def test_quantized_tensors_of_unknown_layers_are_rejected(llama, tmp_path):
    folder, _ = quantized_checkpoints.write_gptq(llama, tmp_path / "gptq")
    tensors = {
        name.replace("gate_proj", "gait_proj"): t
        for name, t in quantized_checkpoints.load_tensors(folder).items()
    }
    quantized_checkpoints.save_tensors(folder, tensors)
    with raises_code("unknown-layer", InputError) as caught:
        taken(folder, tmp_path / "out")
    assert "gait_proj.qweight" in str(caught.value)


def test_checkpoint_without_quantized_tensors_is_rejected(llama, tmp_path):
    folder, _ = quantized_checkpoints.write_gptq(llama, tmp_path / "gptq")
    quantized_checkpoints.save_tensors(
        folder, {n: t for n, t in quantized_checkpoints.load_tensors(folder).items() if ".layers." not in n}
    )
    with raises_code("not-quantized", InputError) as caught:
        taken(folder, tmp_path / "out")
    assert "gptq" in str(caught.value)


def test_new_classifier_for_quantized_model_is_rejected(llama, tmp_path):
    folder, _ = quantized_checkpoints.write_gptq(llama, tmp_path / "gptq")
    (tmp_path / "out").mkdir()
    with raises_code("already-quantized", InputError) as caught:
        import_model(folder, tmp_path / "out", labels=["no", "yes"])
    assert "gptq" in str(caught.value)


@pytest.mark.parametrize(("form", "declared"), [("gptq", "gptq_v2"), ("gptq_v2", "gptq")])
def test_wrong_gptq_format_is_rejected_by_zero_points(form, declared, llama, tmp_path):
    folder, _ = quantized_checkpoints.write_gptq(
        llama, tmp_path / "gptq", form=form, checkpoint_format=declared
    )
    with raises_code("wrong-checkpoint-format", InputError):
        taken(folder, tmp_path / "out")


def test_errors_name_source_folder(llama, tmp_path):
    folder, _ = quantized_checkpoints.write_gptq(llama, tmp_path / "gptq")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 3}))
    with raises_code("missing-tensor", InputError) as error:
        taken(folder, tmp_path / "out")
    assert str(tmp_path / "out") not in str(error.value)
    assert str(folder) in str(error.value)
