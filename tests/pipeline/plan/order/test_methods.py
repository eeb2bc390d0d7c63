"""A method that does not suit the codes is noted before any work."""

from pathlib import Path

import pytest
import tiny
from planning import plan


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    tiny.marian(folder / "model")
    for name in ("train", "test"):
        tiny.pairs(folder / f"{name}.jsonl")
    return folder


@pytest.mark.parametrize(
    ("settings", "noted"),
    [
        ("scheme: int2, method: hqq", True),
        ("scheme: int3, method: hqq, vocabulary: int2", True),
        ("scheme: int3, method: hqq, vocabulary: int2, embeddings: false, head: false", False),
        ("scheme: int3, method: hqq", False),
        ("scheme: int2, method: nearest", False),
        ("bits: {budget: 6.5}, method: hqq", False),
    ],
)
def test_hqq_at_two_bits_is_noted(folder: Path, settings: str, noted: bool) -> None:
    notes = plan(folder, f"[quantize: {{{settings}}}]").notes
    assert any("method: hqq fits scales" in note for note in notes) == noted
