"""Names of stages, settings and values in other tools, and in smelt before its first release."""

from __future__ import annotations

from collections.abc import Collection

# A name may map to several; the first one that is valid at the place is suggested.
OTHER_NAMES: dict[str, tuple[str, ...]] = {
    # stages and tasks
    "depth": ("drop-layers",),
    "vocabulary": ("trim-vocabulary", "embedding_scheme"),
    "share": ("share-weights",),
    "quantize-graph": ("quantize-onnx",),
    "tensors": ("custom",),
    # settings
    "accumulate": ("gradient_accumulation_steps",),
    "aim": ("optimize_for",),
    "beams": ("num_beams",),
    "begin": ("init",),
    "bits": ("mixed_precision", "bit_widths", "target_bits"),
    "budget": ("parameter_budget", "max_excluded", "target_bits"),
    "by": ("objective",),
    "by_frequency": ("frequency_weighted",),
    "checkpoint_minutes": ("checkpoint_interval_minutes",),
    "choose": ("layer_selection",),
    "codebook_inputs": ("group_size",),
    "codes": ("qat", "quantize"),
    "compensate": ("reconstruct",),
    "damage": ("sensitivity",),
    "damage_rows": ("sensitivity_samples",),
    "decoded_by": ("generator",),
    "difference": ("low_rank_delta",),
    "ema": ("ema_decay",),
    "embedding": ("sentence_embedding",),
    "embeddings": ("input_embeddings",),
    "error": ("objective",),
    "evals": ("num_evals",),
    "every": ("group_size",),
    "frequent": ("frequent_tokens",),
    "head": ("output_layer",),
    "hidden": ("hidden_states",),
    "keep": ("keep_ratio", "keep_fp32"),
    "keep_ends": ("exclude_first_and_last",),
    "keep_ffn": ("keep_ratio",),
    "keep_heads": ("keep_ratio",),
    "keep_logits": ("cache_logits",),
    "keep_weights": ("save_master_weights",),
    "leave": ("exclude",),
    "length": ("sequence_length",),
    "loop": ("generation_graph",),
    "low_rank": ("low_rank_correction",),
    "masks": ("learned_masks",),
    "method": ("calibration_method",),
    "mix": ("original_ratio",),
    "on": ("measure_on",),
    "operations": ("flops",),
    "operators": ("op_types",),
    "per_token": ("candidates_per_token",),
    "percentile": ("calibration_percentile",),
    "range": ("calibration_method",),
    "ratio": ("keep_ratio", "sparsity", "energy"),
    "relations": ("self_attention_relations",),
    "reverse_logits": ("reverse_kl",),
    "round_to": ("multiple_of",),
    "rows": ("calibration_samples", "train_on", "max_train_samples"),
    "schedule": ("lr_schedule",),
    "scores": ("cosent",),
    "select": ("metric_for_best_model",),
    "sequences": ("sequence_level",),
    "similarity": ("pairwise_similarity",),
    "skip": ("exclude",),
    "smooth": ("smoothquant_alpha",),
    "split": ("weight_splitting",),
    "strict": ("truncation",),
    "take": ("init_from",),
    "tokens_per_batch": ("max_tokens_per_batch",),
    "top": ("top_k",),
    "tune": ("autotune",),
    "validation_rows": ("max_validation_samples",),
    "what": ("targets",),
    "widths": ("bit_widths",),
    # values
    "alternate": ("uniform",),
    "follow": ("dynamic",),
    "inside": ("embedded",),
    "nearest": ("rtn",),
    "outside": ("stripped",),
    "own": ("dedicated",),
    "pair": ("svd",),
    "row": ("channel",),
    "spread": ("uniform",),
    "train": ("labelled",),
    # options
    "--beams": ("--num-beams",),
    "--for": ("--format",),
    "--fresh": ("--rebuild",),
    # other tools
    "alpha": ("losses", "smoothquant_alpha"),
    "amount": ("keep_ratio", "sparsity"),
    "dtype": ("precision", "scheme"),
    "lr": ("learning_rate",),
    "lr_scheduler_type": ("lr_schedule",),
    "num_train_epochs": ("epochs",),
    "per_device_train_batch_size": ("batch_size",),
    "pruning_ratio": ("keep_ratio", "sparsity"),
    "rank": ("keep_ratio", "energy"),
    "sparsity": ("keep_ratio",),
    "warmup_ratio": ("warmup",),
    "warmup_steps": ("warmup",),
}


def own_name(word: str, known: Collection[str]) -> str | None:
    """Return the name in `known` that corresponds to `word` of another tool or version; None without one."""
    return next((name for name in OTHER_NAMES.get(word, ()) if name in known), None)


# A rename that also has another form.
_FORMS = {
    "keep_ffn": "keep_ratio: {ffn: ...}",
    "keep_heads": "keep_ratio: {heads: ...}",
    "strict": "truncation: error",
}


def other_name_hint(word: str, known: Collection[str]) -> str:
    """Return a hint such as " 'depth' is called 'drop-layers'.", or an empty string."""
    found = own_name(word, known)
    kept = " (the fraction to keep, not to remove)" if found == "keep_ratio" else ""
    kept = "" if word in _FORMS else kept
    return f" '{word}' is called '{_FORMS.get(word, found)}'{kept}." if found else ""
