"""Every family through every stage on tiny random models: made, saved, loaded, scored, exported, compared.

The onnx stage compares each graph with its parent on real inputs, so a step that is done has passed that.
The fast part takes each family through a chain that ends in few bits. All cells one by one:

    SMELT_MATRIX=all python -m pytest tests/pipeline/whole/test_matrix.py
"""

import json
from functools import partial

import pytest

import smelt
from smelt.data.splits import TEXT_TO_TEXT_TASKS
from smelt.models.families.registry import FAMILIES
from smelt.runtimes.ort_tensorrt_backend import read_provider_options
from smelt.runtimes.ort_tensorrt_provider import missing_requirement
from tests.support.graphs.ort_sessions import HAS_NO_VNNI
from tests.support.models import causal, classifiers, embedders, every_family, images, seq2seq, tiny
from tests.support.pairs import matrix

MODELS = {
    "marian": ("translation", tiny.write_marian),
    "t5": ("summarization", seq2seq.write_t5),
    "t5-gated": ("summarization", lambda folder: seq2seq.write_t5(folder, gated=True)),
    "bart": ("summarization", seq2seq.write_bart),
    "mbart": ("translation", lambda folder: seq2seq.write_bart(folder, kind="mbart")),
    "bert": ("text-classification", tiny.write_bert),
    "distilbert": ("text-classification", classifiers.distilbert),
    "roberta": ("text-classification", classifiers.roberta),
    "gpt2": ("language-modeling", lambda folder: causal.write_model(folder, "gpt2")),
    "llama": ("language-modeling", lambda folder: causal.write_model(folder, "llama")),
    "qwen2": ("language-modeling", lambda folder: causal.write_model(folder, "qwen2")),
    **{
        f"{name}-embedder": (embedders.TASK, partial(embedders.write_embedder, family=name))
        for name in embedders.FAMILIES
    },
    **{
        name: (FAMILIES[name].tasks[0], partial(every_family.write_model, family=name))
        for name in every_family.CONFIGS
    },
    "vit": (images.TASK, images.write_model),
    "resnet": (images.TASK, partial(images.write_model, family="resnet")),
}
LANGUAGES = {
    "mbart": {"source_language": "en_XX", "target_language": "de_DE"},
    "m2m_100": {"source_language": "eng_Latn", "target_language": "deu_Latn"},
}
FAMILY = {"t5-gated": "t5"} | {f"{name}-embedder": name for name in embedders.FAMILIES}  # others by their own
DATA = {
    "translation": tiny.write_pairs,
    "summarization": tiny.write_pairs,
    "text-classification": tiny.write_labeled,
    images.TASK: images.write_rows,
    "language-modeling": lambda path: causal.write_lines(path, 1),
    embedders.TASK: embedders.write_rows,
}
TRAIN = "max_steps: 2, batch_size: 4, num_evals: 1, precision: fp32"
STAGES = {
    "finetune": [f"finetune: {{{TRAIN}}}"],
    "distill": [f"distill: {{student: STUDENT, {TRAIN}}}"],
    "vocabulary": ["trim-vocabulary: {coverage: 0.8}"],
    "depth": ["drop-layers: {keep_ratio: 0.5, calibration_samples: 4}"],
    "depth-parts": [
        "drop-layers: {targets: [attention, ffn], keep_ratio: 0.75, importance: block-influence,"
        " calibration_samples: 4}"
    ],
    "distill-inside": [
        f"distill: {{losses: {{hidden_states: 1, input_embeddings: 1, self_attention_relations: 1}},"
        f" {TRAIN}}}"
    ],
    "lora": [f"finetune: {{lora: {{rank: 2}}, {TRAIN}}}"],
    "masks": [f"finetune: {{learned_masks: {{learning_rate: 5, warmup: 0.5, multiple_of: 4}}, {TRAIN}}}"],
    "movement": [f"finetune: {{sparsify: {{start: 0, end: 1}}, {TRAIN}}}"],
    "prune": ["prune: {targets: [heads, ffn], keep_ratio: 0.5, calibration_samples: 4}"],
    "prune-global": [
        "prune: {targets: [heads, ffn], keep_ratio: 0.5, scope: global, importance: fisher, multiple_of: 4,"
        " calibration_samples: 4}"
    ],
    "prune-width": ["prune: {targets: [width], keep_ratio: 0.75, calibration_samples: 4}"],
    "prune-channels": [
        "prune: {targets: [channels], keep_ratio: 0.5, multiple_of: 4, calibration_samples: 4}"
    ],
    "factorize": ["factorize: {rank: 6, optimize_for: size}"],
    "sparsify": ['sparsify: {method: sparsegpt, pattern: "2:4", calibration_samples: 4}'],
    "share": ["share-weights: {}"],
    "share-difference": ["share-weights: {init_from: mean, low_rank_delta: {rank: 3}}"],
    "shortlist": ["shortlist: {candidates_per_token: 3, frequent_tokens: 6}"],
    "int8-dynamic": ["quantize: {scheme: int8-dynamic}"],
    "int8-static": ["quantize: {scheme: int8-static, calibration_samples: 8, sensitivity_samples: 1}"],
    "int8-smooth": [
        "quantize: {scheme: int8-static, granularity: tensor, smoothquant_alpha: 0.5, calibration_samples:"
        " 8, sensitivity_samples: 1}"
    ],
    "int8-groupwise": ["quantize: {scheme: int8-groupwise, group_size: 32, symmetric: false}"],
    "int4": ["quantize: {scheme: int4, group_size: 32}"],
    "awq": ["quantize: {scheme: int4, group_size: 32, method: awq, clip: awq, calibration_samples: 4}"],
    "hqq": ["quantize: {scheme: int4, group_size: 16, symmetric: false, method: hqq}"],
    "int3": ["quantize: {scheme: int3, group_size: 32, symmetric: false}"],
    "int2": ["quantize: {scheme: int2, group_size: 32}"],
    "kmeans4": ["quantize: {scheme: kmeans4, group_size: 128}"],
    "pow2": ["quantize: {scheme: pow2, group_size: 32}"],
    "mxfp4": ["quantize: {scheme: mxfp4}"],
    "ternary": [
        "quantize: {scheme: ternary, group_size: 32, granularity: channel, embedding_scheme: ternary}"
    ],
    "mixed": [
        "quantize: {mixed_precision: {target_bits: 4.5}, group_size: 32, calibration_samples: 8,"
        " sensitivity_samples: 1}"
    ],
    "int4-pairs": [
        "quantize: {scheme: int4, group_size: 32, low_rank_correction: {rank: 3, objective: outputs},"
        " calibration_samples: 4}"
    ],
    "binary": ["quantize: {scheme: binary, group_size: 32}"],
    "bnb-nf4": ["quantize: {scheme: bnb-nf4}"],
    "bnb-int8": ["quantize: {scheme: bnb-int8}"],
}
# what no target runs: the last step is one of torch
UNEXPORTED = {"bnb-int8"}
STAGES["chain"] = [*STAGES["distill"], *STAGES["prune"], *STAGES["factorize"], *STAGES["int4"]]
STAGES["chain-shared"] = [*STAGES["share"], *STAGES["finetune"], *STAGES["prune"], *STAGES["int8-dynamic"]]
STAGES["chain-static"] = [*STAGES["prune"], *STAGES["int8-static"], *STAGES["finetune"]]
STAGES["chain-smooth"] = [*STAGES["factorize"], *STAGES["int8-smooth"], *STAGES["finetune"]]
STAGES["chain-listed"] = [*STAGES["shortlist"], *STAGES["prune"], *STAGES["finetune"], *STAGES["int4"]]
STAGES["chain-inside"] = [*STAGES["prune"], *STAGES["lora"], *STAGES["distill-inside"]]
STAGES["chain-binary"] = [*STAGES["prune"], *STAGES["binary"], *STAGES["finetune"]]
STAGES["chain-deep"] = [*STAGES["depth"], *STAGES["prune"], *STAGES["finetune"], *STAGES["int4"]]
STAGES["chain-parts"] = [*STAGES["depth-parts"], *STAGES["prune"], *STAGES["finetune"], *STAGES["int4"]]
STAGES["chain-narrow"] = [*STAGES["prune-width"], *STAGES["prune"], *STAGES["finetune"], *STAGES["int4"]]
STAGES["chain-channels"] = [*STAGES["prune-channels"], *STAGES["finetune"], *STAGES["prune-channels"]]
STAGES["chain-convolutions"] = [*STAGES["prune-channels"], *STAGES["int8-static"], *STAGES["finetune"]]
STAGES["chain-words"] = [*STAGES["vocabulary"], *STAGES["distill"], *STAGES["int8-dynamic"]]
STAGES["chain-sparse"] = [*STAGES["sparsify"], *STAGES["prune"], *STAGES["finetune"], *STAGES["int8-dynamic"]]
STAGES["chain-learned"] = [*STAGES["masks"], *STAGES["movement"], *STAGES["prune"], *STAGES["int8-dynamic"]]
STAGES["chain-awq"] = [*STAGES["factorize"], *STAGES["awq"], *STAGES["lora"]]
STAGES["chain-divided"] = [*STAGES["share-difference"], *STAGES["finetune"], *STAGES["int4-pairs"]]
STAGES["chain-qlora"] = [*STAGES["bnb-nf4"], *STAGES["lora"]]
# each chain with each kind of model for which a graph of it is written otherwise; each stage on each family,
# without graphs, is in test_pairs.py
FAST = {
    ("mistral", "chain"), ("distilbert", "chain"), ("modernbert-embedder", "chain-binary"),
    ("mpnet", "chain-shared"), ("qwen3", "chain-inside"), ("bert", "chain-divided"),
    ("m2m_100", "chain-listed"), ("t5", "chain-static"), ("gemma", "chain-smooth"),
    ("gpt2", "chain-qlora"), ("electra", "chain-narrow"), ("qwen2", "mixed"),
    ("roberta", "chain-deep"), ("pegasus", "chain-words"), ("llama", "chain-awq"),
    ("albert", "chain"), ("t5-gated", "chain-parts"), ("resnet", "chain-convolutions"),
}  # fmt: skip
# what only models with an encoder and a decoder can have
LISTED = {"shortlist", "chain-listed"}
OF_IMAGES = {
    "finetune",
    "depth",
    "depth-parts",
    "chain-parts",
    "lora",
    "prune",
    "prune-global",
    "factorize",
    "sparsify",
    "share",
}
OF_IMAGES |= {"int8-dynamic", "int8-static", "int8-smooth", "int8-groupwise", "int4", "int3", "int2"}
OF_IMAGES |= {"kmeans4", "pow2", "mxfp4"}
OF_IMAGES |= {"awq", "hqq", "ternary", "binary", "mixed"}
OF_IMAGES |= {"share-difference", "int4-pairs", "chain-divided"}
OF_IMAGES |= {"prune-width", "chain-narrow"}
OF_IMAGES |= {"chain", "chain-shared", "chain-static", "chain-smooth", "chain-sparse", "chain-binary"}
# what else it cannot do, tests/.../test_images.py says
OF_CONVOLUTIONS = {"prune-channels", "chain-channels", "chain-convolutions"}
THESE = {"vit": OF_IMAGES, "resnet": OF_CONVOLUTIONS | {"finetune", "int8-static"}}
POSSIBLE = [(m, s) for m in MODELS for s in STAGES if s not in LISTED or MODELS[m][0] in TEXT_TO_TEXT_TASKS]
POSSIBLE = [(m, s) for m, s in POSSIBLE if s in THESE.get(m, STAGES.keys() - OF_CONVOLUTIONS)]
# an embedder's vectors are its hidden states
NARROW = {"prune-width", "chain-narrow"}
POSSIBLE = [(m, s) for m, s in POSSIBLE if not (m.endswith("-embedder") and s in NARROW)]
CELLS = sorted(POSSIBLE) if matrix.is_full_matrix() else sorted(FAST)
# what OpenVINO runs of them: graphs in float32, and int8 as explicit Q/DQ
STAGES_OPENVINO = ["prune", "int8-static", "int8-smooth"]
FAST_OPENVINO = {("llama", "int8-smooth"), ("resnet", "int8-static")}
WHOLE_OPENVINO = sorted((m, s) for m, s in POSSIBLE if s in STAGES_OPENVINO)
CELLS_OPENVINO = WHOLE_OPENVINO if matrix.is_full_matrix() else sorted(FAST_OPENVINO)
# TensorRT's graphs with the sizes of engines, for ONNX Runtime's provider of it, in float32 and int8
STAGES_PROVIDER = ["prune", "int8-static"]
FAST_PROVIDER = {("qwen2", "prune"), ("vit", "int8-static")}
WHOLE_PROVIDER = sorted((m, s) for m, s in POSSIBLE if s in STAGES_PROVIDER)
WHOLE_PROVIDER = [cell for cell in WHOLE_PROVIDER if cell != ("resnet", "int8-static")]  # refused
CELLS_PROVIDER = WHOLE_PROVIDER if matrix.is_full_matrix() else sorted(FAST_PROVIDER)


def _recipe(folder, kind, task, stages, target="ort-cpu"):
    layers = "decoder_layers" if task in ("translation", "summarization") else "layers"
    name = "data.txt" if task == "language-modeling" else "data.jsonl"
    DATA[task](folder / name)
    data = {"train": name, "validation": name, "test": name}
    if task == "language-modeling":
        data["windows"] = {"length": 32}
    if FAMILIES[kind].language_selection == "codes":
        data |= LANGUAGES[kind]
    lines = [line.replace("STUDENT", f"{{{layers}: 1}}") for line in stages]
    if target is not None:
        lines.append(f"onnx: {{target: {target}}}")
    (folder / "recipe.yaml").write_text(
        f"model: model\ntask: {task}\ndata: {json.dumps(data)}\nthreads: 1\n"
        f"score: {{latency: false, generation: {{max_new_tokens: 6}}}}\n"
        "stages:\n" + "".join(f"  - {line}\n" for line in lines)
    )
    return folder / "recipe.yaml"


def _has_shared_int8_matrices(family, stage):
    """Whether two int8 linear layers of the graph share a matrix."""
    stacks = FAMILIES[FAMILY.get(family, family)].stacks({})
    shared = stage == "chain-shared" or any(stack.repeats_block for stack in stacks)
    return shared and any("int8-static" in line or "int8-dynamic" in line for line in STAGES[stage])


@pytest.mark.parametrize(("family", "stage"), CELLS)
def test_a_family_goes_through_a_stage_and_its_graph_agrees(family, stage, tmp_path):
    if HAS_NO_VNNI and _has_shared_int8_matrices(family, stage):
        pytest.skip("without VNNI ONNX Runtime opens no graph in which two int8 products share a matrix")
    _check(family, stage, None if stage in UNEXPORTED else "ort-cpu", tmp_path)


@pytest.mark.parametrize(("family", "stage"), CELLS_OPENVINO)
def test_a_family_goes_through_a_stage_and_openvino_runs_its_graph(family, stage, tmp_path):
    pytest.importorskip("openvino")
    if HAS_NO_VNNI and stage.startswith("int8"):
        pytest.skip("without VNNI OpenVINO adds pairs of int8 products in 16 bits")
    _check(family, stage, "openvino", tmp_path)


@pytest.mark.parametrize(("family", "stage"), CELLS_PROVIDER)
def test_a_family_goes_through_a_stage_and_tensorrts_provider_is_told_its_sizes(family, stage, tmp_path):
    """Without a GPU the step is made and not scored; its graph agrees with its parent in any case."""
    last = _check(family, stage, "ort-tensorrt", tmp_path)
    folder = tmp_path / "run" / last["artifact"]
    options = read_provider_options(folder)
    assert set(options) == set(last["details"]["graphs"]) == {path.stem for path in folder.glob("*.onnx")}
    for graph in options.values():
        assert (
            "pixel_values"
            if FAMILIES.get(family) and FAMILIES[family].input_kind == "images"
            else "input_ids"
        ) in graph.max_shapes
        assert graph.options["trt_int8_enable"] == str(stage == "int8-static")


def _check(family, stage, target, tmp_path):
    task, make = MODELS[family]
    make(tmp_path / "model")
    recipe = _recipe(tmp_path, FAMILY.get(family, family), task, STAGES[stage], target)
    result = smelt.run(recipe, out=tmp_path / "run")
    steps = result.report["steps"]
    assert [s["status"] for s in steps] == ["done"] * len(steps), [s["error"] for s in steps]
    assert result.exit_code == 0
    unscored = target == "ort-tensorrt" and missing_requirement() is not None
    assert all(s["quality"] for s in (steps[:-1] if unscored else steps))
    assert steps[-1]["target"] == target
    if target is None:
        return steps[-1]
    parity = steps[-1]["details"]["parity"]
    assert set(parity) == set(steps[-1]["details"]["graphs"])
    if task == "language-modeling" and not unscored:
        parent, graph = (s["quality"]["perplexity"]["value"] for s in steps[-2:])
        assert graph == pytest.approx(parent, rel=0.02)
    return steps[-1]
