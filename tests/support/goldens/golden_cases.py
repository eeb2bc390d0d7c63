"""Which stages, with which settings and on which tiny models, golden.json tells of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from smelt.quantization.schemes.registry import DEFAULT_SCHEME, SCHEMES, unsupported_reason
from tests.support.models import causal, every_family, images, seq2seq, tiny
from tests.support.schemes import small_settings

TRAINING: dict[str, Any] = {
    "max_steps": 8, "learning_rate": 3e-3, "batch_size": 4, "precision": "fp32", "dropout": 0.0,
    "num_evals": 0,
}  # fmt: skip
MAKERS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "marian": (tiny.write_marian, "translation"),
    "short marian": (partial(tiny.write_marian, encoder_layers=1, decoder_layers=1), "translation"),
    "t5": (seq2seq.write_t5, "summarization"),
    "short t5": (partial(seq2seq.write_t5, num_layers=1, num_decoder_layers=1), "summarization"),
    "bert": (tiny.write_bert, "text-classification"),
    "short bert": (lambda folder: tiny.write_bert(folder, num_hidden_layers=1), "text-classification"),
    "gpt2": (lambda folder: causal.write_model(folder, "gpt2", n_embd=64), "language-modeling"),
    "short gpt2": (lambda folder: causal.write_model(folder, "gpt2", n_embd=64, n_layer=1),
        "language-modeling"),
    "qwen2": (lambda folder: causal.write_model(folder, "qwen2"), "language-modeling"),
    "short qwen2": (partial(causal.write_model, family="qwen2", num_hidden_layers=1), "language-modeling"),
    "mixtral": (partial(every_family.write_model, family="mixtral"), "language-modeling"),
    "resnet": (lambda folder: images.write_model(folder, "resnet"), images.TASK),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A stage with settings on a tiny model of a family; `preceding_stages` are stages that go first.

    outputs_only: a search chooses scales that other layers undo, so weights of equally good choices differ;
        only what the model computes is compared.
    """

    stage: str
    family: str
    settings: dict[str, Any] = field(default_factory=dict)
    preceding_stages: tuple[tuple[str, dict[str, Any]], ...] = ()
    allowed_error: float | None = (
        None  # how far projections may be off, where it is not what `differences` says
    )

    outputs_only: bool = False

    @property
    def tolerance(self) -> float:
        """How far projections may be off, see `differences`."""
        return self.allowed_error or (0.01 if self.settings.get("max_steps") else 0.002)


# Least squares on few tokens of a tiny model multiply what kernels round differently (0.005 was seen), and
# singular vectors of values that are nearly equal turn (0.08).
REFIT_TOLERANCE, ROTATION_TOLERANCE = 0.02, 0.2
# A search over a grid of scales takes the neighbor where two are nearly as good.
SEARCH_TOLERANCE = 0.1
HALF_OF_UNITS: dict[str, Any] = {"targets": ["heads", "ffn"], "keep_ratio": 0.5}
LOGITS_AND_LABELS: dict[str, Any] = {"losses": {"logits": 1.0, "labels": 0.5}, "temperature": 2.0}
INTERMEDIATE_LOSSES: dict[str, Any] = {
    "hidden_states": 1, "input_embeddings": 1, "attention": 1, "cosine": 1, "self_attention_relations": 1,
}  # fmt: skip
INT4: dict[str, Any] = {"scheme": "int4", "group_size": 16, "symmetric": False}
STATIC: dict[str, Any] = {"scheme": "int8-static", "calibration_method": "mse", "sensitivity_samples": 2}
GROUPWISE: dict[str, Any] = {"scheme": "int8-groupwise", "group_size": 32}
NF4: dict[str, Any] = {"scheme": "bnb-nf4", "embedding_scheme": "bnb-nf4"}
INT3: dict[str, Any] = {"scheme": "int3", "group_size": 16, "symmetric": False}
POW2: dict[str, Any] = {"scheme": "pow2", "group_size": 32}
INT2: dict[str, Any] = {"scheme": "int2", "group_size": 32}
TERNARY: dict[str, Any] = {"scheme": "ternary", "group_size": 32, "granularity": "channel"}
BINARY: dict[str, Any] = {"scheme": "binary", "group_size": 32}
SHORTLIST: dict[str, Any] = {"candidates_per_token": 3, "frequent_tokens": 5}
THIRD_PARTY_GRAPH = "graph"  # in place of a family: an ONNX graph that somebody else exported
CASES: dict[str, Case] = {
    "finetune marian": Case("finetune", "marian", TRAINING | {"label_smoothing_factor": 0.1}),
    "finetune bert": Case("finetune", "bert", TRAINING | {"lr_scheduler_type": "cosine", "ema_decay": 0.8}),
    "finetune gpt2": Case("finetune", "gpt2", TRAINING | {"gradient_accumulation_steps": 2}),
    "distill marian": Case("distill", "marian", TRAINING | LOGITS_AND_LABELS),
    "distill bert, half of its layers": Case(
        "distill", "bert", TRAINING | {"temperature": 2.0, "student": {"layers": 1}}
    ),
    "distill bert, inside": Case(
        "distill",
        "bert",
        TRAINING | {"temperature": 2.0, "losses": INTERMEDIATE_LOSSES, "layer_map": {0: 0, 2: 1}},
    ),
    "distill marian, through codes": Case(
        "distill", "marian", TRAINING | LOGITS_AND_LABELS, (("quantize", BINARY),)
    ),
    "finetune marian, learned scales": Case(
        "finetune", "marian", TRAINING | {"qat": {"scales": "lsq"}}, (("quantize", INT2),)
    ),
    "finetune bert, masks of the width": Case(
        "finetune",
        "bert",
        TRAINING | {"learned_masks": {"targets": ["ffn", "width"], "learning_rate": 5, "warmup": 0.5}},
    ),
    "finetune bert, split": Case(
        "finetune",
        "bert",
        TRAINING | {"qat": {"weight_splitting": True}},
        (("quantize", {"scheme": "ternary", "group_size": 32}),),
    ),
    "vocabulary marian": Case("trim-vocabulary", "marian", {"coverage": 0.7, "multiple_of": 1}),
    "vocabulary gpt2": Case("trim-vocabulary", "gpt2", {"size": 280}),
    "depth bert": Case("drop-layers", "bert", {"importance": "block-influence"}),
    "depth marian, by the loss": Case("drop-layers", "marian", {"decoder_layers": 1, "importance": "loss"}),
    "depth bert, of parts": Case(
        "drop-layers", "bert", {"targets": ["attention", "ffn"], "keep_ratio": 0.75}
    ),
    "experts mixtral": Case("drop-experts", "mixtral", {"keep_ratio": 0.5}),
    "prune bert": Case("prune", "bert", HALF_OF_UNITS, allowed_error=REFIT_TOLERANCE),
    "prune marian, by magnitude": Case(
        "prune", "marian", HALF_OF_UNITS | {"importance": "magnitude"}, allowed_error=REFIT_TOLERANCE
    ),
    "prune bert, across layers by Fisher": Case(
        "prune",
        "bert",
        HALF_OF_UNITS | {"scope": "global", "importance": "fisher"},
        allowed_error=REFIT_TOLERANCE,
    ),
    "prune qwen2": Case("prune", "qwen2", HALF_OF_UNITS),
    "prune bert, within a budget": Case(
        "prune", "bert", {"budget": {"parameters": 0.8}}, allowed_error=REFIT_TOLERANCE
    ),
    "prune bert, its width": Case(
        "prune", "bert", {"targets": ["width"], "keep_ratio": 0.5}, allowed_error=REFIT_TOLERANCE
    ),
    "quantize resnet, int8-static": Case(
        "quantize",
        "resnet",
        {"scheme": "int8-static", "calibration_samples": 8, "sensitivity_samples": 2},
        allowed_error=ROTATION_TOLERANCE,
    ),
    "prune resnet, channels": Case(
        "prune", "resnet", {"targets": ["channels"], "keep_ratio": 0.5, "multiple_of": 4}
    ),
    "prune resnet, channels by magnitude": Case(
        "prune",
        "resnet",
        {"targets": ["channels"], "keep_ratio": 0.5, "multiple_of": 4, "importance": "magnitude"},
    ),
    "prune bert, not compensated": Case("prune", "bert", HALF_OF_UNITS | {"reconstruct": False}),
    "sparsify bert": Case("sparsify", "bert"),
    "sparsify marian, wanda 2:4": Case("sparsify", "marian", {"method": "wanda", "pattern": "2:4"}),
    "factorize marian, embeddings": Case("factorize", "marian", {"targets": ["embeddings"], "rank": 7}),
    "factorize marian, one budget": Case(
        "factorize",
        "marian",
        {"parameter_budget": 0.5, "optimize_for": "size"},
        allowed_error=ROTATION_TOLERANCE,
    ),
    "factorize bert, plain, by energy": Case(
        "factorize", "bert", {"method": "svd", "energy": 0.5, "optimize_for": "size"}
    ),
    "factorize resnet, tucker": Case(
        "factorize", "resnet", {"method": "tucker", "keep_ratio": 0.5}, allowed_error=ROTATION_TOLERANCE
    ),
    "factorize resnet, cp by energy": Case(
        "factorize", "resnet", {"method": "cp", "energy": 0.8}, allowed_error=ROTATION_TOLERANCE
    ),
    "rotate gpt2": Case("rotate", "gpt2"),
    "rotate qwen2, then int4": Case("quantize", "qwen2", INT4, (("rotate", {}),)),
    "rotate bert, values": Case("rotate", "bert", {"targets": ["heads"]}),
    "share bert": Case("share-weights", "bert"),
    "share gpt2, layers by cycles": Case(
        "share-weights", "gpt2", {"targets": ["layers"], "groups": 1, "pattern": "cycle"}
    ),
    "share marian, embeddings": Case("share-weights", "marian", {"targets": ["layers", "embeddings"]}),
    "share marian, mean": Case("share-weights", "marian", {"init_from": "mean", "targets": ["ffn"]}),
    "share marian, with differences": Case(
        "share-weights",
        "marian",
        {"init_from": "mean", "low_rank_delta": {"rank": 4, "iterations": 2}},
        allowed_error=ROTATION_TOLERANCE,
    ),
    "shortlist marian": Case("shortlist", "marian", SHORTLIST),
    "quantize marian, int8": Case("quantize", "marian"),
    "quantize marian, int8 of one scale": Case("quantize", "marian", {"granularity": "tensor"}),
    "quantize marian, int8-static": Case("quantize", "marian", STATIC),
    "quantize gpt2, int8-static of the worst float": Case("quantize", "gpt2", STATIC | {"exclude": "auto"}),
    "quantize gpt2, int8-static smoothed": Case("quantize", "gpt2", STATIC | {"smoothquant_alpha": 0.5}),
    "quantize marian, int8-groupwise": Case("quantize", "marian", GROUPWISE),
    "quantize bert, int4": Case("quantize", "bert", INT4),
    "quantize gpt2, int4 symmetric": Case("quantize", "gpt2", INT4 | {"symmetric": True}),
    # the errors of a tiny BERT's candidates depend on roundings that processors do differently
    "quantize gpt2, int3 by awq": Case(
        "quantize",
        "gpt2",
        INT4
        | {"scheme": "int3", "group_size": 16, "method": "awq", "clip": "awq", "calibration_samples": 16},
        allowed_error=SEARCH_TOLERANCE,
        outputs_only=True,
    ),
    "quantize gpt2, int4 by hqq": Case("quantize", "gpt2", INT4 | {"method": "hqq"}),
    "quantize bert, int3": Case("quantize", "bert", INT3),
    "quantize gpt2, int2": Case("quantize", "gpt2", INT2),
    "quantize gpt2, pow2": Case("quantize", "gpt2", POW2),
    "quantize marian, ternary": Case("quantize", "marian", TERNARY),
    "quantize bert, gptq": Case("quantize", "bert", INT4 | {"method": "gptq"}),
    "quantize bert, int2 by autoround": Case(
        "quantize", "bert", INT2 | {"method": "autoround", "iterations": 3}, outputs_only=True
    ),
    "quantize short marian, parts": Case(
        "quantize",
        "short marian",
        {"scheme": {"encoder": "int8-dynamic", "decoder": "int4"}, "group_size": 32},
    ),
    "quantize gpt2, mixed precision": Case(
        "quantize", "gpt2", {"mixed_precision": {"target_bits": 4.5}, "sensitivity_samples": 2}
    ),
    "quantize marian, binary": Case("quantize", "marian", BINARY),
    "quantize bert, int4 and pairs": Case(
        "quantize",
        "bert",
        INT4 | {"low_rank_correction": {"rank": 4, "objective": "outputs"}},
        allowed_error=ROTATION_TOLERANCE,
    ),
    "quantize marian, bnb-nf4": Case("quantize", "marian", NF4),
    "quantize marian, bnb-nf4 of quantized scales": Case(
        "quantize", "marian", NF4 | {"use_double_quant": True}
    ),
    "onnx marian": Case("onnx", "short marian"),
    "onnx t5": Case("onnx", "short t5"),
    "onnx gpt2": Case("onnx", "short gpt2"),
    "onnx marian, int8": Case("onnx", "short marian", {}, (("quantize", {}),)),
    "onnx marian, shortlist": Case("onnx", "short marian", {}, (("shortlist", SHORTLIST),)),
    "onnx bert, int8 of one scale": Case(
        "onnx", "short bert", {}, (("quantize", {"granularity": "tensor"}),)
    ),
    "onnx bert, int8-static": Case("onnx", "short bert", {}, (("quantize", STATIC),)),
    "onnx bert, int8-static for TensorRT": Case(
        "onnx",
        "short bert",
        {"target": "tensorrt"},
        (("quantize", STATIC | {"activations_symmetric": True}),),
    ),
    "onnx bert, int8-groupwise": Case("onnx", "short bert", {}, (("quantize", GROUPWISE),)),
    "onnx bert, int4": Case("onnx", "short bert", {}, (("quantize", INT4),)),
    "onnx bert, int3": Case("onnx", "short bert", {}, (("quantize", INT3),)),
    "onnx gpt2, int2": Case("onnx", "short gpt2", {}, (("quantize", INT2),)),
    "onnx bert, pow2": Case("onnx", "short bert", {}, (("quantize", POW2),)),
    "onnx bert, ternary": Case("onnx", "short bert", {}, (("quantize", TERNARY),)),
    "onnx bert, bnb-nf4": Case("onnx", "short bert", {}, (("quantize", NF4),)),
    "onnx bert, binary of 4-bit activations": Case(
        "onnx", "short bert", {}, (("quantize", BINARY | {"activation_bits": 4}),)
    ),
    "onnx bert, binary": Case("onnx", "short bert", {}, (("quantize", BINARY),)),
    "onnx t5, shared": Case("onnx", "t5", {"simplify": False}, (("share-weights", {}),)),
    "onnx bert, fp8 for TensorRT": Case(
        "onnx",
        "short bert",
        {"target": "tensorrt", "dtype": "fp16"},
        (("quantize", small_settings("fp8")),),
    ),
    "onnx bert, for TensorRT": Case("onnx", "short bert", {"target": "tensorrt", "dtype": "fp16"}),
    "onnx qwen2, for TensorRT": Case("onnx", "short qwen2", {"target": "tensorrt"}),
    "simplify graph": Case("simplify", THIRD_PARTY_GRAPH),
    "quantize-onnx graph": Case("quantize-onnx", THIRD_PARTY_GRAPH),
    "quantize-onnx graph, static": Case("quantize-onnx", THIRD_PARTY_GRAPH, {"scheme": "int8-static"}),
    "fp16 graph": Case("fp16", THIRD_PARTY_GRAPH),
}
_NAMED_SCHEMES = {str(case.settings.get("scheme", DEFAULT_SCHEME)) for case in CASES.values()}
# other schemes: their default options
for _name in (name for name in SCHEMES if name not in _NAMED_SCHEMES):
    CASES[f"quantize bert, {_name}"] = Case("quantize", "bert", small_settings(_name))
    if unsupported_reason(SCHEMES[_name], "ort-cpu") is None:
        CASES[f"onnx bert, {_name}"] = Case("onnx", "short bert", {}, (("quantize", small_settings(_name)),))
