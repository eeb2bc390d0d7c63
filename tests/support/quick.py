"""The quick part of the tests, `make test ARGS="-m quick"`: of each room what takes little time.

A file stands here with all of its tests, or with the names of some. Files that are not here are not even
imported. `tests/house/test_suite.py` asks that each room has some, and that what stands here exists.
"""

from __future__ import annotations

from pathlib import Path

QUICK_TESTS: dict[str, str] = {
    "benchmarks": "test_peers test_gpu",
    "compress": "test_float_model",
    "compress/calibration": "test_statistics::test_a_sum_of_many_small_values_keeps_them",
    "compress/depth": "test_fit",
    "compress/distill": "test_fit test_layer_map",
    "compress/distill/losses": "test_hidden test_cosine test_attention test_relations",
    "compress/distill/teachers": "test_kept::test_what_would_save_nothing_is_refused",
    "compress/factorize": "test_svd",
    "compress/factorize/kernels": "test_vbmf",
    "compress/prune": "test_fit test_structured::test_counts_that_stay",
    "compress/prune/budget": "test_choose",
    "compress/prune/importance": "test_fisher::test_rows_in_one_batch_give_less",
    "compress/prune/learned": "test_hard_concrete",
    "compress/prune/width": "test_scores",
    "compress/quantize": "test_coding test_settings",
    "compress/quantize/from_schemes": "test_options",
    "compress/quantize/methods": "test_clip",
    "compress/quantize/sensitivity": "test_choice",
    "compress/quantize/training": "test_steps",
    "compress/share": "test_layers::test_groups_are_neighbours",
    "compress/shortlist": "test_word_table",
    "compress/sparsify": "test_pattern test_wanda test_sparsegpt",
    "compress/train": "test_terms test_memory",
    "compress/train/losses": "test_of_tokens test_of_classes",
    "compress/train/stored": "test_resume::test_the_time_between_checkpoints_is_no_part_of_what_a_step_is",
    "compress/vocabulary": "test_kept",
    "configs": "test_phrases",
    "core": "test_artifact test_data test_errors test_hub test_labels test_shares test_text",
    "core/rows": "test_arrays test_csv_rows test_examples test_images test_json_rows test_targets",
    "core/store": "test_store::test_the_first_of_two_writers_wins test_store::test_remove_forgets",
    "evaluate": "test_frontier test_label_quality test_footprint test_stored_floats",
    "evaluate/latency": "test_summary test_rounds test_settings test_prompts test_watch",
    "evaluate/report": "test_chart test_html test_markdown test_schema test_table test_view",
    "export": "test_load_time",
    "export/foreign": "test_fp16",
    "export/graphs": "test_every_family::test_a_config_that_no_graph_computes_is_refused_before_it_is_traced",
    "export/loop": "test_rules",
    "export/package/hub": "test_card",
    "export/package": "test_fit test_new_folder test_registry",
    "export/package/one_file": "test_compare::test_texts_by_rule_are_the_same_each_time_and_no_two_alike",
    "export/package/standalone": "test_assemble",
    "export/package/standalone/parts": "test_search",
    "export/package/triton": "test_config",
    "export/parity": "test_compare test_rows",
    "export/precision": "test_narrow",
    "export/precision/caches": "test_fit::test_widths_of_heads_are_the_operator_s"
    " test_ranges::test_a_channel_that_was_always_0_gets_the_largest_scale",
    "export/tensorrt": "test_preflight test_messages test_causal_profile",
    "export/tensorrt/rules": "test_table::test_rule_names_the_place_the_reason_and_what_to_do",
    "export/tokenizer": "test_tokenizer_export",
    "export/tune": "test_threads::test_the_fewest_threads_that_are_as_fast_as_any_are_taken",
    "export/weights": "test_stored_once",
    "families": "test_registry",
    "house": "test_circles test_families test_layers test_recipes test_rooms test_schemes test_suite",
    "pipeline": "test_cli::test_stages_lists_all_and_explains_one",
    "pipeline/commands": "test_stage_help",
    "pipeline/execute": "test_display test_gate_verdicts test_lengths",
    "pipeline/execute/roots": "test_foreign",
    "pipeline/faults": "test_faults::test_trace_is_kept_only_of_what_nobody_foresaw",
    "pipeline/look": "test_model_files",
    "pipeline/planning": "test_plan test_gates test_inputs test_printed test_text_rules",
    "pipeline/planning/order": "test_checks test_lost",
    "pipeline/recipe": "test_recipe test_stage_table test_yaml_file",
    "pipeline/use": "test_arguments test_calls test_predict_data",
    "pipeline/whole": "test_bad_recipes",
    "runtime": "test_class_predictions test_pairs",
    "runtime/backends": "test_device::test_a_cpu_build_of_torch_is_named_where_there_is_a_gpu",
    "runtime/backends/ort_tensorrt": "test_cache test_told",
    "runtime/foreign": "test_signature test_take",
    "runtime/third_party/generators": "test_layout test_edit",
    "runtime/generate": "test_rules test_sampling test_settings test_shortlist",
    "runtime/images": "test_processor",
    "runtime/layers": "test_quantized",
    "runtime/models/coded": "test_said",
    "runtime/models": "test_conv1d test_structure",
    "runtime/models/making": "test_empty_model",
    "runtime/models/places": "test_unread_tensors::test_what_one_family_holds_for_nothing_another_may_need",
    "runtime/models/edits": "test_skip::test_an_edit_that_does_not_fit_is_refused",
    "runtime/schemes": "test_registry test_int8_dynamic",
    "runtime/schemes/parts": "test_groups test_integers test_packing",
    "runtime/text": "test_limits test_rules test_tokenizing_file test_tools test_windows test_write_rules",
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
