"""The forms `compressed-tensors`, `gptq` and `awq`: others read exactly the weights of the artifact."""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from smelt.compress.quantize.nested_settings import MixedPrecision
from smelt.compress.quantize.settings import QuantizeSettings
from smelt.compress.quantize.stage import Quantize
from smelt.core.artifact import FileRecord
from smelt.core.errors import InputError
from smelt.core.files import sha256_of
from smelt.export.package.compressed_tensors_format import CompressedTensorsFormat
from smelt.export.package.gptq_awq_formats import AwqFormat, GptqFormat
from smelt.export.package.huggingface import HuggingFaceFormat
from smelt.export.package.package_format import PackageOrigin
from smelt.export.package.write_package import unsupported_format, write_package
from smelt.models.checkpoint import load_model
from smelt.models.edits import read_edits, write_edits
from smelt.models.import_model import import_model
from smelt.quantization.layers import QuantizedLinear
from smelt.quantization.schemes.registry import SCHEMES, default_options
from tests.support import harness, schemes
from tests.support.expected_errors import raises_code
from tests.support.models import causal, every_family, tiny
from tests.support.processes import peer_tools
from tests.support.shared_folders import make_once

TASK = "language-modeling"
FORMATS = {form.name: form for form in (CompressedTensorsFormat(), GptqFormat(), AwqFormat())}
FLOAT_ACTIVATIONS = {"group_size": 32, "accuracy_level": 0}
WITH_ZEROS = {"scheme": "int4", "symmetric": False, **FLOAT_ACTIVATIONS}
KERNEL_SIZES = {"hidden_size": 128, "intermediate_size": 256}  # multiples of 32, as GPTQModel wants
IGNORED_CONFIG = "ignore:You passed `quantization_config`:UserWarning"


def quantized(settings, family="llama", **config):
    """Return the folder of a quantized model of one layer; read only."""
    config = {"num_hidden_layers": 1, **config}

    def make(folder):
        source = causal.write_model(folder / "source", family, **config)
        harness.run_stage(Quantize(), QuantizeSettings(**settings), source, folder / "quantized", TASK)

    return make_once(f"quantized-{family}-{json.dumps([settings, config])}", make) / "quantized"


def as_artifact(source):
    """Return the model folder as an artifact whose files are known, and so copied."""
    artifact = tiny.as_artifact(source, TASK)
    artifact.manifest.files.update(
        {
            path.name: FileRecord(sha256=sha256_of(path), size_bytes=path.stat().st_size)
            for path in source.iterdir()
        }
    )
    return artifact


def package(form, source, folder):
    write_package(FORMATS[form], as_artifact(source), PackageOrigin(), folder)
    return folder


def refusal(form, source):
    return unsupported_format(FORMATS[form], as_artifact(source))


def smelt_weights(source):
    model, _ = load_model(source)
    modules = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    return {name: module.matrix.dequantize() for name, module in modules.items()}


def read_by_transformers(folder, dequantize=False):
    pytest.importorskip("compressed_tensors")
    config = (
        {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)} if dequantize else {}
    )
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, **config
    )
    assert not any(info.values())
    return model.eval()


@pytest.mark.filterwarnings(IGNORED_CONFIG)
@pytest.mark.parametrize("settings", [
    {"scheme": "int4", **FLOAT_ACTIVATIONS}, WITH_ZEROS, {"scheme": "int8-groupwise", **FLOAT_ACTIVATIONS},
    {"scheme": "int3", **FLOAT_ACTIVATIONS}, {"scheme": "int2", **FLOAT_ACTIVATIONS},
    {"scheme": "int4", **FLOAT_ACTIVATIONS, "exclude": ["*.down_proj"]},
], ids=["int4", "zeros", "int8-groupwise", "int3", "int2", "excluded"])  # fmt: skip
def test_transformers_reads_equal_weights_and_logits(settings, tmp_path):
    source = quantized(settings)
    folder = package("compressed-tensors", source, tmp_path / "out")
    model = read_by_transformers(folder, dequantize=not settings.get("symmetric", True))
    assert torch.equal(harness.logits(model), harness.logits(load_model(source)[0]))
    for name, weight in smelt_weights(source).items():
        assert torch.equal(model.get_submodule(name).weight, weight), name
    layers = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert layers["ignore"] == [
        *(["model.layers.0.mlp.down_proj"] if "exclude" in settings else []),
        "lm_head",
    ]


@pytest.mark.parametrize("scheme", ["int8-dynamic", "int8-static"])
def test_int8_rows_are_read_with_activations_by_token(scheme, tmp_path):
    model = every_family.model_with_layers("llama", 1)
    settings = QuantizeSettings(scheme=scheme)
    source = every_family.run_stage(Quantize(), settings, model, "llama", tmp_path / "source").out
    folder = package("compressed-tensors", source, tmp_path / "out")
    model = read_by_transformers(folder)
    by_token = harness.logits(model)
    weights = smelt_weights(source)
    for name, weight in weights.items():
        assert torch.equal(model.get_submodule(name).weight, weight), name
    stored = load_file(folder / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert stored.dtype == torch.int8
    args = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    assert (args["format"], args["input_activations"]["strategy"]) == ("int-quantized", "token")
    # the same layer by hand: |x| / 127.5 of a token, to int8
    layer = model.model.layers[0].mlp.up_proj
    x = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(0))
    scale = x.abs().amax(dim=-1, keepdim=True) / 127.5
    expected = ((x / scale).round().clamp(-128, 127) * scale) @ layer.weight.t()
    torch.testing.assert_close(layer(x), expected)
    assert (by_token - harness.logits(load_model(source)[0])).abs().mean() < 0.1 * by_token.std()


@pytest.mark.filterwarnings(IGNORED_CONFIG)
def test_fp8_rows_are_read_as_e4m3(tmp_path):
    model = every_family.model_with_layers("llama", 1)
    source = every_family.run_stage(
        Quantize(), QuantizeSettings(scheme="fp8"), model, "llama", tmp_path / "source"
    ).out
    folder = package("compressed-tensors", source, tmp_path / "out")
    model = read_by_transformers(folder, dequantize=True)
    for name, weight in smelt_weights(source).items():
        assert torch.equal(model.get_submodule(name).weight, weight), name
    stored = load_file(folder / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert stored.dtype == torch.float8_e4m3fn
    args = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    assert args["format"] == "float-quantized"


@pytest.mark.filterwarnings(IGNORED_CONFIG)
@pytest.mark.parametrize(("options", "layout"), [
    ({"scheme": "nvfp4"}, "nvfp4-pack-quantized"),
    ({"scheme": "nvfp4", "activation_bits": 16}, "nvfp4-pack-quantized"),
    ({"scheme": "mxfp4", "embeddings": False, "output_layer": False}, "mxfp4-pack-quantized"),
])  # fmt: skip
def test_4_bit_floats_are_read_with_equal_weights(options, layout, tmp_path):
    model = every_family.model_with_layers("llama", 1)
    source = every_family.run_stage(
        Quantize(), QuantizeSettings(**options), model, "llama", tmp_path / "source"
    ).out
    folder = package("compressed-tensors", source, tmp_path / "out")
    has_inputs = options == {"scheme": "nvfp4"}
    model = read_by_transformers(folder, dequantize=not has_inputs)
    if has_inputs:
        harness.logits(model.bfloat16())  # the library unpacks weights at the first call, in this type
        layer = model.model.layers[0].mlp.up_proj
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
        source_layer = load_model(source)[0].model.layers[0].mlp.up_proj
        expected, floats = source_layer(x.float()), x.float() @ source_layer.matrix.dequantize().t()
        # the library's bfloat16 against float32; 4-bit activations differ by 0.34 from float ones
        assert (layer(x).float() - expected).abs().max() < 0.02 * expected.std()
        assert (floats - expected).abs().max() > 0.2 * expected.std()
    for name, weight in smelt_weights(source).items():
        assert torch.equal(model.get_submodule(name).weight, weight), name
    prefix = "model.layers.0.self_attn"
    stored = load_file(folder / "model.safetensors")
    assert stored[f"{prefix}.q_proj.weight_packed"].shape == (64, 32)
    args = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    assert args["format"] == layout
    assert (args["input_activations"] is not None) == has_inputs
    assert (f"{prefix}.q_proj.input_global_scale" in stored) == has_inputs
    if layout == "nvfp4-pack-quantized":  # servers multiply the three as one matrix
        suffixes = ["weight_global_scale", *["input_global_scale"] * has_inputs]
        for suffix in suffixes:
            assert len({float(stored[f"{prefix}.{part}_proj.{suffix}"]) for part in "qkv"}) == 1


def test_layers_of_one_part_share_a_global_scale_with_the_same_values(tmp_path):
    weights = [torch.randn(8, 64) * size for size in (1.0, 0.1, 1e-3)]
    matrices = {f"part.{name}": schemes.rounded_matrix("nvfp4", weight, activation_bits=16)
                for name, weight in zip("qkv", weights, strict=True)}  # fmt: skip
    matrices["part.wide"] = schemes.rounded_matrix(
        "nvfp4", torch.cat([weights[0], 1e-5 * weights[0]]), activation_bits=16
    )
    assert len({float(matrix.tensor("global_scale")) for matrix in matrices.values()}) > 2
    pytest.importorskip("compressed_tensors")
    tensors, _ = CompressedTensorsFormat().convert(matrices, [], "head", torch.float32)
    scales = {name: float(tensors[f"{name}.weight_global_scale"]) for name in matrices}
    assert len(set(scales.values())) == 1
    for name, matrix in matrices.items():
        block_scales = tensors[f"{name}.weight_scale"].float() / scales[name]
        assert block_scales.equal(matrix.unpack().qparams["scales"])


def test_different_layers_are_groups_of_their_own(tmp_path):
    """vLLM and transformers look a layer's bits up by its name."""
    mixed = MixedPrecision(target_bits=6, bit_widths=[4, 8])
    settings = QuantizeSettings(mixed_precision=mixed, **FLOAT_ACTIVATIONS)
    model = every_family.model_with_layers("llama", 1)
    source = every_family.run_stage(Quantize(), settings, model, "llama", tmp_path / "source").out
    folder = package("compressed-tensors", source, tmp_path / "out")
    groups = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]
    assert sorted(group["weights"]["num_bits"] for group in groups.values()) == [4, 8]
    model = read_by_transformers(folder)
    assert torch.equal(harness.logits(model), harness.logits(load_model(source)[0]))


def test_generated_texts_equal_smelt(tmp_path):
    source = quantized({"scheme": "int4", **FLOAT_ACTIVATIONS})
    folder = package("compressed-tensors", source, tmp_path / "out")
    model, tokenizer = read_by_transformers(folder), transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(["The old house"], return_tensors="pt", return_token_type_ids=False)
    ids = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    reference = load_model(source)[0].generate(**inputs, max_new_tokens=12, do_sample=False)
    assert ids.shape[1] > inputs["input_ids"].shape[1]
    assert torch.equal(ids, reference)


@pytest.mark.filterwarnings(IGNORED_CONFIG)
@pytest.mark.parametrize(("tables", "tied"), [({}, True), ({"output_layer": False}, False)])
def test_quantized_tables_become_floats_of_same_values(tables, tied, tmp_path):
    source = quantized(WITH_ZEROS | tables, "qwen2")
    folder = package("compressed-tensors", source, tmp_path / "out")
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is tied
    model = read_by_transformers(folder, dequantize=True)
    assert torch.equal(harness.logits(model), harness.logits(load_model(source)[0]))
    table = load_model(source)[0].get_input_embeddings().matrix.dequantize()
    assert torch.equal(model.get_input_embeddings().weight, table)


def test_scales_have_dtype_of_a_bfloat16_model(tmp_path):
    source = tmp_path / "source"
    wide = causal.write_model(tmp_path / "wide", "llama", num_hidden_layers=1)
    transformers.AutoModelForCausalLM.from_pretrained(wide, dtype=torch.bfloat16).save_pretrained(wide)
    settings = QuantizeSettings(scheme="int4", **FLOAT_ACTIVATIONS)
    harness.run_stage(Quantize(), settings, wide, source, TASK)
    folder = package("compressed-tensors", source, tmp_path / "out")
    stored = load_file(folder / "model.safetensors")
    assert stored["model.layers.0.mlp.up_proj.weight_scale"].dtype == torch.bfloat16
    model = read_by_transformers(folder)
    assert harness.logits(model).dtype == torch.bfloat16
    for name, weight in smelt_weights(source).items():
        if name != "lm_head":
            torch.testing.assert_close(
                model.get_submodule(name).weight.float(), weight, rtol=2**-7, atol=0, msg=name
            )


@pytest.mark.parametrize("form", ["gptq", "awq"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_own_reader_imports_equal_weights(form, symmetric, tmp_path):
    source = quantized(WITH_ZEROS | {"symmetric": symmetric})
    folder = package(form, source, tmp_path / "out")
    (tmp_path / "imported").mkdir()
    import_model(folder, tmp_path / "imported")
    imported, weights = smelt_weights(tmp_path / "imported"), smelt_weights(source)
    assert imported.keys() == weights.keys() - {"lm_head"}
    assert all(torch.equal(imported[name], weights[name]) for name in imported)
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == "float16"
    section = config["quantization_config"]
    layout = section["version"] if form == "awq" else section["checkpoint_format"]
    assert layout == {"awq": "gemm", "gptq": "gptq" if symmetric else "gptq_v2"}[form]


def test_float_layers_are_named_in_awq_and_refused_in_gptq(tmp_path):
    source = quantized(WITH_ZEROS | {"exclude": ["*.down_proj"]})
    section = json.loads((package("awq", source, tmp_path / "out") / "config.json").read_text())
    section = section["quantization_config"]
    assert section["modules_to_not_convert"] == ["model.layers.0.mlp.down_proj", "lm_head"]
    assert list(section["dynamic"]) == [r"-:^model\.layers\.0\.mlp\.down_proj$"]
    refused = refusal("gptq", source)  # before any weight is read
    assert refused.code == "mixed-quantization"
    assert "model.layers.0.mlp.down_proj" in str(refused)


@pytest.mark.parametrize("name", SCHEMES)
def test_scheme_is_packed_or_refused_by_name(name, tmp_path):
    """No scheme of codebooks, or any later one without a grid, is written as something else."""
    options = default_options(SCHEMES[name])
    causal.write_model(tmp_path / "source", "llama", num_hidden_layers=1)
    write_edits(tmp_path / "source", [
        {"op": "quantize", "module": "model.layers.0.mlp.up_proj", "scheme": name, **options}
    ])  # fmt: skip
    has_form = name.startswith("int") or name in ("fp8", "nvfp4", "mxfp4")
    refusals = {form: refusal(form, tmp_path / "source") for form in FORMATS}
    codes = {form: why and why.code for form, why in refusals.items()}
    expected = "unsupported-scheme"
    assert codes == {
        "compressed-tensors": None if has_form else expected,
        # its other layers are floats
        "gptq": "mixed-quantization" if name == "int4" else expected,
        "awq": None if name == "int4" else expected,
    }  # fmt: skip


@pytest.mark.parametrize(("edits", "form", "code"), [
    ([], "gptq", "not-quantized"),
    ([{"op": "low_rank", "module": "model.layers.0.mlp.up_proj", "rank": 2}], "awq", "unsupported-structure"),
    ([{"op": "share", "module": "model.layers.0.mlp.up_proj", "with": "model.layers.0.mlp.gate_proj"}],
        "compressed-tensors", "unsupported-structure"),
    ([{"op": "quantize", "module": "model.layers.0.mlp.up_proj", "scheme": "int8-dynamic",
        "granularity": "channel", "symmetric": False}], "compressed-tensors", "unsupported-scheme"),
    ([{"op": "quantize", "module": f"model.layers.0.mlp.{name}_proj", "scheme": "int4", "group_size": size,
        "symmetric": True, "accuracy_level": 4} for name, size in (("up", 32), ("gate", 64))],
        "gptq", "mixed-group-sizes"),
])  # fmt: skip
def test_unsupported_structure_is_refused(edits, form, code, tmp_path):
    causal.write_model(tmp_path / "source", "llama", num_hidden_layers=1)
    write_edits(tmp_path / "source", edits)
    unsupported = refusal(form, tmp_path / "source")
    assert unsupported is not None
    assert unsupported.code == code


def test_gpt2_is_refused():
    unsupported = refusal("compressed-tensors", quantized({"scheme": "int4"}, "gpt2", n_layer=1))
    assert unsupported is not None
    assert unsupported.code == "unsupported-family"


@pytest.mark.parametrize(("settings", "config", "form", "code"), [
    ({"scheme": "int4", "group_size": 64}, {"intermediate_size": 96}, "compressed-tensors",
        "unsupported-group-size"),
    ({"scheme": "int4", "group_size": 16, "exclude": ["*.down_proj"]}, {"intermediate_size": 100}, "awq",
        "unsupported-layer-size"),
])  # fmt: skip
def test_unsupported_size_is_refused_and_nothing_is_written(settings, config, form, code, tmp_path):
    source = quantized(settings, **config)
    assert read_edits(source)
    with raises_code(code, InputError):
        package(form, source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.peers
def test_gptqmodel_logits_equal_artifact(tmp_path):
    """In float16: zero points off by one, or nibbles in another order, differ by 100 times as much."""
    sources, folders = [], []
    for settings in (WITH_ZEROS, WITH_ZEROS | {"symmetric": True}):
        source = quantized(settings, **KERNEL_SIZES)
        for form in ("gptq", "awq"):
            sources.append(source)
            folders.append(package(form, source, tmp_path / f"{form}-{len(folders)}"))
    part = quantized(WITH_ZEROS | {"exclude": ["*.down_proj"]}, **KERNEL_SIZES)
    sources.append(part)
    folders.append(package("awq", part, tmp_path / "part"))
    request = {"folders": [str(folder) for folder in folders], "ids": harness.fixed_ids().tolist()}
    assert peer_tools.run_in_gptqmodel("open_by_gptqmodel.py", request) == len(folders)
    for source, folder in zip(sources, folders, strict=True):
        expected = harness.logits(load_model(source)[0]).numpy()
        assert np.abs(np.load(folder / "logits.npy") - expected).max() < 0.05 * expected.std(), folder


@pytest.mark.parametrize("form", ["compressed-tensors", "huggingface"])
def test_tensors_have_the_names_of_files_that_transformers_writes(form, tmp_path):
    source = every_family.model_with_layers("gpt_neox", 1)
    if form != "huggingface":
        settings = QuantizeSettings(scheme="int4", **FLOAT_ACTIVATIONS)
        source = every_family.run_stage(Quantize(), settings, source, "gpt_neox", tmp_path / "source").out
    (tmp_path / "out").mkdir()
    form_class = FORMATS.get(form) or HuggingFaceFormat()
    form_class.write(as_artifact(source), PackageOrigin(), tmp_path / "out")
    model = read_by_transformers(tmp_path / "out")
    assert torch.equal(harness.logits(model), harness.logits(load_model(source)[0]))
    transformers.AutoModelForCausalLM.from_config(model.config).save_pretrained(tmp_path / "plain")
    plain, names = (load_file(tmp_path / name / "model.safetensors").keys() for name in ("plain", "out"))
    packed = ("weight_packed", "weight_scale", "weight_shape")
    assert {name for name in names if not name.endswith(packed)} <= plain
    assert "embed_out.weight" in names
