"""The quick part of the tests, `make test ARGS="-m quick"`: of each room what takes little time.

A file stands here with all of its tests, or with the names of some. Files that are not here are not even
imported. `tests/house/test_suite.py` asks that each room has some, and that what stands here exists.
"""

from __future__ import annotations

from pathlib import Path

QUICK_TESTS: dict[str, str] = {
    "api": "test_arguments test_concurrent_calls test_predict_inputs",
    "benchmarks": "test_gpu test_peers",
    "cli": "test_cli::test_stages_lists_all_and_explains_one test_stage_help",
    "compress": "test_float_model test_ibm_model1 test_share_weights_stage::test_groups_are_neighbours",
    "calibration": "test_statistics::test_a_sum_of_many_small_values_keeps_them",
    "compress/distill": "test_attention"
    " test_cached_teacher::test_what_would_save_nothing_is_refused"
    " test_check_config"
    " test_cosine"
    " test_hidden_state_loss"
    " test_layer_map"
    " test_relations",
    "compress/drop_layers": "test_check_config",
    "compress/factorize": "test_svd test_vbmf",
    "compress/prune": "test_allocate"
    " test_channel_scores"
    " test_check_config"
    " test_fisher::test_rows_in_one_batch_give_less"
    " test_hard_concrete"
    " test_stage::test_counts_that_stay",
    "compress/quantize": "test_clip"
    " test_knapsack"
    " test_scheme_settings"
    " test_settings"
    " test_step_sizes"
    " test_weight_quantizer",
    "compress/sparsify": "test_pattern test_sparsegpt test_wanda",
    "training": "test_classification"
    " test_loss_terms"
    " test_resume::test_the_time_between_checkpoints_is_no_part_of_what_a_step_is"
    " test_tokens"
    " test_training_memory",
    "compress/trim_vocabulary": "test_kept_tokens",
    "configs": "test_phrases",
    "core": "test_artifact test_errors test_hub test_text",
    "core/store": "test_store::test_remove_forgets test_store::test_the_first_of_two_writers_wins",
    "data": "test_csv_rows"
    " test_data"
    " test_examples"
    " test_image_rows"
    " test_json_rows"
    " test_label_targets"
    " test_labels"
    " test_npz_arrays"
    " test_split_division",
    "evaluate": "test_float_dtype test_frontier test_label_quality",
    "evaluate/latency": "test_rounds test_settings test_summary test_timed_runner test_timing_prompts",
    "evaluate/report": "test_chart test_html test_markdown test_schema test_terminal_table test_view",
    "export": "test_choose_threads::test_the_fewest_threads_that_are_as_fast_as_any_are_taken"
    " test_deduplicate"
    " test_expand_placeholders"
    " test_export_tokenizer",
    "export/generation_graph": "test_rule_nodes",
    "export/graphs": "test_every_family::test_a_config_that_no_graph_computes_is_refused_before_it_is_traced",
    "export/package": "test_atomic_folder test_check_support test_model_card test_registry",
    "export/package/one_file": "test_verify_tokenizer"
    "::test_texts_by_rule_are_the_same_each_time_and_no_two_alike",
    "export/package/standalone": "test_assemble",
    "export/package/standalone/parts": "test_generation_inputs",
    "export/package/triton": "test_config_pbtxt",
    "export/parity": "test_parity_samples test_tolerances",
    "export/precision": "test_cache_ranges::test_a_channel_that_was_always_0_gets_the_largest_scale"
    " test_convert_to_half"
    " test_kv_cache_support::test_widths_of_heads_are_the_operator_s",
    "export/tensorrt": "test_causal_profile test_explain_messages test_preflight",
    "export/tensorrt/rules": "test_rule_table::test_rule_names_the_place_the_reason_and_what_to_do",
    "export/third_party": "test_fp16",
    "generation": "test_logits_processors test_sampling test_settings test_shortlist",
    "house": "test_circles test_families test_layers test_recipes test_rooms test_schemes test_suite",
    "models": "test_conv1d"
    " test_empty_model"
    " test_image_processor"
    " test_length_limits"
    " test_quantization_config"
    " test_skip_sublayer::test_an_edit_that_does_not_fit_is_refused"
    " test_structure"
    " test_text_preprocessing"
    " test_text_tools"
    " test_text_windows"
    " test_tokenizer_info"
    " test_unused_tensors::test_what_one_family_holds_for_nothing_another_may_need"
    " test_write_text_rules",
    "models/families": "test_registry",
    "pipeline": "test_python_api",
    "pipeline/execute": "test_display test_gate_verdicts test_text_lengths test_third_party_onnx",
    "pipeline/faults": "test_faults::test_trace_is_kept_only_of_what_nobody_foresaw",
    "pipeline/inspect": "test_model_files",
    "pipeline/plan": "test_gates"
    " test_input_checks"
    " test_lost_work"
    " test_plan"
    " test_plan_checker"
    " test_printed"
    " test_text_rules",
    "pipeline/recipe": "test_recipe test_stage_table test_yaml_file",
    "pipeline/whole": "test_bad_recipes",
    "quantization": "test_groupwise test_int8_matmul test_packing test_quantized",
    "quantization/schemes": "test_int8_dynamic test_registry",
    "runtimes": "test_class_predictions"
    " test_device::test_a_cpu_build_of_torch_is_named_where_there_is_a_gpu"
    " test_engine_cache"
    " test_pairs"
    " test_provider_options",
    "runtimes/third_party": "test_graph_edits test_import_graph test_optimum_layout test_signature",
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
