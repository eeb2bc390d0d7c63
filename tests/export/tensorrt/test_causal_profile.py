"""Sizes that an engine of a decoder-only graph is built for."""

import json

import pytest

from smelt.data.splits import Columns
from smelt.export.settings import TensorrtSettings
from smelt.export.tensorrt.build_engine import SizeRange, causal_ranges, profile_shapes
from smelt.export.tensorrt.preflight import check_profile
from smelt.export.tensorrt.profiles import max_output_tokens, profile_ranges
from smelt.tasks.read_split import read_split
from tests.support import harness
from tests.support.models import causal

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("prompt", "new", "limit"), [(32, 16, 64), (64, 128, 64), (1, 1, 2), (512, 128, 10**6)]
)
def test_ranges_are_consistent_and_within_positions(prompt, new, limit):
    ranges = causal_ranges(prompt, new, limit)
    input_range, past, total = ranges["input"], ranges["past"], ranges["total"]
    assert input_range.opt + past.opt == total.opt
    assert (input_range.min, past.min, total.min) == (1, 0, 1)
    assert total.max == input_range.max + past.max  # TensorRT warns where the maxima do not add up
    assert past.max + 1 == max(2, min(limit, input_range.max + new))


def test_profiles_share_cache_length_of_longest_text():
    single = causal_ranges(1, 16, 64, longest_prompt=32)
    prompt_ranges = causal_ranges(32, 16, 64, longest_prompt=32, usual_prompt=16)
    assert single["input"] == SizeRange(1, 1, 1)
    assert single["past"].max == prompt_ranges["past"].max == 47
    for ranges in (single, prompt_ranges):
        assert ranges["input"].opt + ranges["past"].opt == ranges["total"].opt
        assert ranges["input"].max + ranges["past"].max == ranges["total"].max
    assert (prompt_ranges["input"].opt, prompt_ranges["past"].opt) == (16, 0)


def _graph(places):
    from onnx import TensorProto, helper

    shapes = {
        "input_ids": ["batch", "sequence_length"],
        "attention_mask": ["batch", "total_sequence_length"],
        "past_key_values.0.key": ["batch", 2, "past_sequence_length", 16],
    }
    inputs = [helper.make_tensor_value_info(n, TensorProto.INT64, shape) for n, shape in shapes.items()]
    return helper.make_model(helper.make_graph([], "g", inputs, []))


def test_profile_from_text_windows_passes_preflight(tmp_path):
    folder = causal.write_model(tmp_path / "m", "gpt2")
    causal.write_lines(folder / "t.txt", 1)
    data = {"train": read_split("t.txt", "language-modeling", Columns(), folder)}
    ctx = harness.make_context(tmp_path, "language-modeling", data=data)
    [ranges], limit = profile_ranges(folder, TensorrtSettings(max_batch_size=4), ctx)
    assert limit == json.loads((folder / "config.json").read_text())["n_positions"] == 64
    model = _graph(limit)
    shapes = profile_shapes(model, ranges, "model.onnx")
    assert shapes["input_ids"] == ((1, 1), (1, 1), (4, 64))
    assert shapes["attention_mask"] == ((1, 1), (1, 32), (4, 127))
    assert shapes["past_key_values.0.key"] == ((1, 2, 0, 16), (1, 2, 31, 16), (4, 2, 63, 16))
    assert check_profile(model, shapes, limit) == []
    stage_settings = TensorrtSettings(lengths={"opt": 8, "max": 16}, max_new_tokens=8)
    assert profile_ranges(folder, stage_settings, ctx)[0][0]["past"].max == 23


@pytest.mark.parametrize(("task", "generation_config", "longest"), [
    ("translation", {}, 128), ("translation", {"max_length": 512}, 511),  # the start token counts
    ("translation", {"max_length": 512, "max_new_tokens": 20}, 20),
    ("language-modeling", {"max_length": 50}, 128),  # of a prompt of 50 tokens or more
    ("language-modeling", {"max_length": 512}, 511), ("language-modeling", {"max_new_tokens": 20}, 20),
])  # fmt: skip
def test_max_output_tokens_come_from_generation_config(tmp_path, task, generation_config, longest):
    (tmp_path / "config.json").write_text('{"max_length": 7}')
    (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
    assert max_output_tokens(tmp_path, task) == longest


@pytest.mark.parametrize(("family", "graph", "rows"), [
    ("marian", "encoder_model.onnx", (2, 4)), ("marian", "decoder_with_past_model.onnx", (6, 12)),
    ("llama", "model.onnx", (6, 12)),
])  # fmt: skip
def test_decoder_takes_a_row_for_each_beam(family: str, graph: str, rows: tuple[int, int]) -> None:
    from tests.support.graphs import tensorrt_graphs

    shapes = tensorrt_graphs.graphs_with_shapes(
        family, tensorrt_graphs.exported_folder(family), opt_batch_size=2, num_beams=3
    )
    [profile] = next(profiles for path, profiles in shapes.items() if path.name == graph)
    for name, (minimum, opt, most) in profile.items():
        if name != "num_logits_to_keep":
            assert (minimum[0], opt[0], most[0]) == (1, *rows)
