"""Headers and vocabularies, against files that the libraries themselves write."""

import json
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from smelt.core.messages import message_codes
from smelt.pipeline.inspect.model_folder import check_file_consistency, damaged_tensor_problem

pytestmark = pytest.mark.quick

KINDS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.float16, torch.bfloat16, torch.int32]
KINDS += [torch.float32, torch.int64, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64]


def _header(path):
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_safetensors_files_are_not_damaged(tmp_path, kind):
    tensors = {
        "a": torch.zeros(3, 5).to(kind),
        "b": torch.zeros(()).to(kind),
        "c": torch.zeros(0, 4).to(kind),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    header = _header(tmp_path / "x.safetensors")
    assert damaged_tensor_problem(header) is None
    header["a"]["shape"] = [3, 6]
    assert "'a'" in damaged_tensor_problem(header)


@pytest.mark.parametrize("shape", [[-3, -5], [3.0, 5], [True, 15]])
def test_invalid_tensor_shapes_raise_damaged_file(shape):
    header = {"a": {"dtype": "U8", "shape": shape, "data_offsets": [0, 15]}}
    assert damaged_tensor_problem(header) is not None


def _model(folder, rows=10, width=4, **config):
    (folder / "config.json").write_text("{}")
    tensors = {"model.shared.weight": torch.from_numpy(np.zeros((rows, width), np.float32))}
    save_file(tensors, folder / "model.safetensors")
    return {"model_type": "bart", "vocab_size": 10, "d_model": 4} | config


def _unigram(count):
    return {
        "model": {"type": "Unigram", "vocab": [[f"w{i}", -1.0] for i in range(count)]},
        "added_tokens": [],
    }


def _words(count, added=()):
    vocabulary = {f"w{i}": i for i in range(count)}
    return {"model": {"type": "BPE", "vocab": vocabulary}, "added_tokens": [{"id": i} for i in added]}


@pytest.mark.parametrize(("tokenizer", "code", "named"), [
    (_unigram(10), None, ()), (_unigram(11), "tokenizer-mismatch", ("up to 10,", "10 rows")),
    (_words(10), None, ()), (_words(10, added=(3, 9)), None, ()),
    (_words(10, added=(10,)), "tokenizer-mismatch", ("up to 10,", "10 rows")),
    ({"model": {"vocab": {"a": "b"}}}, "damaged-tokenizer", ()), ({"model": None}, None, ()),
    ([], "damaged-tokenizer", ("tokenizer.json",)),
])  # fmt: skip
def test_highest_token_id_must_have_embedding_row(tmp_path, tokenizer, code, named):
    config = _model(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    problems, warnings = check_file_consistency(tmp_path, config)
    assert warnings == []
    assert message_codes(problems) == ([] if code is None else [code])
    assert all(value in problem.message for problem in problems for value in named)


def test_embedding_shape_must_match_config(tmp_path):
    assert check_file_consistency(tmp_path, _model(tmp_path)) == ([], [])
    for rows, width in ((11, 4), (10, 5)):
        [problem], _ = check_file_consistency(tmp_path, _model(tmp_path, rows, width))
        assert problem.code == "shape-mismatch"
        assert all(shape in problem.message for shape in (f"[{rows}, {width}]", "[10, 4]"))
    assert check_file_consistency(tmp_path, _model(tmp_path, 99, vocab_size=None)) == ([], [])


def test_pruned_width_in_structure_is_accepted(tmp_path):
    """`prune: {targets: [width]}` leaves the config as wide as it was where other things follow from that."""
    config = _model(tmp_path, 10, 3)
    structure = tmp_path / "structure.json"
    for kept_columns, is_valid in (([[0, 1, 3]], True), ([[0, 1, 2, 3], [0, 2, 3]], True), ([[0, 1]], False)):
        edits = [{"op": "width", "module": "", "keep": keep} for keep in kept_columns]
        structure.write_text(json.dumps({"schema": 1, "edits": edits}))
        assert (check_file_consistency(tmp_path, config)[0] == []) == is_valid
    for broken in ("{", "[]", '{"edits": 3}', '{"edits": [{"op": "width", "keep": 3}]}'):
        structure.write_text(broken)
        [problem] = check_file_consistency(tmp_path, config)[0]
        assert problem.code == "shape-mismatch"
        assert "[10, 4]" in problem.message


def test_tokenizer_much_smaller_than_embedding_warns(tmp_path):
    config = _model(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(_words(4)))
    [warning] = check_file_consistency(tmp_path, config)[1]
    assert (warning.code, warning.severity) == ("tokenizer-much-smaller", "warning")
    assert all(value in warning.message for value in ("4 tokens", "10 rows"))
