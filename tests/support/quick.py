"""The quick part of the tests, `make test ARGS="-m quick"`: of each room what takes little time.

A file stands here with all of its tests, or with the names of some. Files that are not here are not even
imported. `tests/house/test_suite.py` asks that each room has some, and that what stands here exists.
"""

from __future__ import annotations

from pathlib import Path

QUICK_TESTS: dict[str, str] = {
    "benchmarks": "test_gpu test_peers",
    "compress": "test_float_model",
    "compress/calibration": "test_statistics::test_a_sum_of_many_small_values_keeps_them",
    "compress/distill": "test_check_config test_layer_map",
    "compress/distill/losses": "test_attention test_cosine test_hidden_state_loss test_relations",
    "compress/distill/teachers": "test_cached_teacher::test_what_would_save_nothing_is_refused",
    "compress/drop_layers": "test_check_config",
    "compress/factorize": "test_svd",
    "compress/factorize/kernels": "test_vbmf",
    "compress/prune": "test_check_config test_stage::test_counts_that_stay",
    "compress/prune/budget": "test_allocate",
    "compress/prune/importance": "test_fisher::test_rows_in_one_batch_give_less",
    "compress/prune/learned": "test_hard_concrete",
    "compress/prune/width": "test_channel_scores",
    "compress/quantize": "test_settings test_weight_quantizer",
    "compress/quantize/methods": "test_clip",
    "compress/quantize/scheme_options": "test_scheme_settings",
    "compress/quantize/sensitivity": "test_knapsack",
    "compress/quantize/training": "test_step_sizes",
    "compress/share_weights": "test_stage::test_groups_are_neighbours",
    "compress/shortlist": "test_ibm_model1",
    "compress/sparsify": "test_pattern test_sparsegpt test_wanda",
    "compress/train": "test_loss_terms test_training_memory",
    "compress/train/checkpoints": "test_resume"
    "::test_the_time_between_checkpoints_is_no_part_of_what_a_step_is",
    "compress/train/losses": "test_classification test_tokens",
    "compress/trim_vocabulary": "test_kept_tokens",
    "configs": "test_phrases",
    "core": "test_artifact test_data test_errors test_hub test_labels test_split_division test_text",
    "core/readers": "test_csv_rows"
    " test_examples"
    " test_image_rows"
    " test_json_rows"
    " test_label_targets"
    " test_npz_arrays",
    "core/store": "test_store::test_remove_forgets test_store::test_the_first_of_two_writers_wins",
    "evaluate": "test_float_dtype test_footprint test_frontier test_label_quality",
    "evaluate/latency": "test_rounds test_settings test_summary test_timed_runner test_timing_prompts",
    "evaluate/report": "test_chart test_html test_markdown test_schema test_terminal_table test_view",
    "export": "test_expand_placeholders",
    "export/autotune": "test_choose_threads::test_the_fewest_threads_that_are_as_fast_as_any_are_taken",
    "export/generation_graph": "test_rule_nodes",
    "export/graphs": "test_every_family::test_a_config_that_no_graph_computes_is_refused_before_it_is_traced",
    "export/package": "test_atomic_folder test_check_support test_registry",
    "export/package/hub": "test_model_card",
    "export/package/one_file": "test_verify_tokenizer"
    "::test_texts_by_rule_are_the_same_each_time_and_no_two_alike",
    "export/package/standalone": "test_assemble",
    "export/package/standalone/parts": "test_generation_inputs",
    "export/package/triton": "test_config_pbtxt",
    "export/parity": "test_parity_samples test_tolerances",
    "export/precision": "test_convert_to_half",
    "export/precision/kv_cache": "test_cache_ranges::test_a_channel_that_was_always_0_gets_the_largest_scale"
    " test_kv_cache_support::test_widths_of_heads_are_the_operator_s",
    "export/tensorrt": "test_causal_profile test_explain_messages test_preflight",
    "export/tensorrt/rules": "test_rule_table::test_rule_names_the_place_the_reason_and_what_to_do",
    "export/third_party": "test_fp16",
    "export/tokenizer": "test_export_tokenizer",
    "export/weights": "test_deduplicate",
    "families": "test_registry",
    "house": "test_circles test_families test_layers test_recipes test_rooms test_schemes test_suite",
    "pipeline": "test_cli::test_stages_lists_all_and_explains_one",
    "pipeline/api": "test_arguments test_concurrent_calls test_predict_inputs",
    "pipeline/commands": "test_stage_help",
    "pipeline/execute": "test_display test_gate_verdicts test_text_lengths",
    "pipeline/execute/sources": "test_third_party_onnx",
    "pipeline/faults": "test_faults::test_trace_is_kept_only_of_what_nobody_foresaw",
    "pipeline/inspect": "test_model_files",
    "pipeline/planning": "test_gates test_input_checks test_plan test_printed test_text_rules",
    "pipeline/planning/order": "test_lost_work test_plan_checker",
    "pipeline/recipe": "test_recipe test_stage_table test_yaml_file",
    "pipeline/whole": "test_bad_recipes",
    "runtime": "test_class_predictions test_pairs",
    "runtime/backends": "test_device::test_a_cpu_build_of_torch_is_named_where_there_is_a_gpu",
    "runtime/backends/ort_tensorrt": "test_engine_cache test_provider_options",
    "runtime/generate": "test_logits_processors test_sampling test_settings test_shortlist",
    "runtime/images": "test_image_processor",
    "runtime/layers": "test_quantized",
    "runtime/models": "test_conv1d test_structure",
    "runtime/models/create": "test_empty_model",
    "runtime/models/edits": "test_skip_sublayer::test_an_edit_that_does_not_fit_is_refused",
    "runtime/models/quantized_checkpoint": "test_quantization_config",
    "runtime/models/weights": "test_unused_tensors::test_what_one_family_holds_for_nothing_another_may_need",
    "runtime/schemes": "test_int8_dynamic test_registry",
    "runtime/schemes/common": "test_groupwise test_int8_matmul test_packing",
    "runtime/text": "test_length_limits"
    " test_text_preprocessing"
    " test_text_tools"
    " test_text_windows"
    " test_tokenizer_info"
    " test_write_text_rules",
    "runtime/third_party": "test_import_graph test_signature",
    "runtime/third_party/generators": "test_graph_edits test_optimum_layout",
}


def is_quick(path: Path, root: Path, test: str | None = None) -> bool:
    """Return whether a test of the file `path` is in the quick part; without `test`, whether any is."""
    try:
        place = path.relative_to(root / "tests")
    except ValueError:
        return False
    for entry in QUICK_TESTS.get(place.parent.as_posix(), "").split():
        file, _, name = entry.partition("::")
        if file == place.stem and (not name or test is None or test.partition("[")[0] == name):
            return True
    return False
