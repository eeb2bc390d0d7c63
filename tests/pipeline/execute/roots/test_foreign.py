"""A graph becomes the first artifact: a copy that says what it is, made once."""

from pathlib import Path
from typing import Any

import foreign_graphs as graphs
import pytest

from smelt.core.data import Columns
from smelt.core.rows.examples import read_split
from smelt.core.store.store import Store
from smelt.execute.roots import foreign
from smelt.execute.steps import Workshop
from smelt.look.foreign import ForeignModel
from smelt.runtime.foreign.examine import answer
from smelt.runtime.foreign.signature import Signature


class Silent:
    """A display of nothing."""

    log_path = Path("log.txt")

    def line(self, text: str) -> None:
        raise AssertionError(text)


def model_in(path: Path) -> ForeignModel:
    said = answer([str(path)])
    return ForeignModel(
        path, Signature.model_validate(said["signature"]), tuple(said["files"]), None, said["details"]
    )


def test_it_is_a_whole_artifact_and_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []
    monkeypatch.setattr("smelt.runtime.foreign.trial.try_graph", lambda *given: tried.append(given))
    path = graphs.save(graphs.two_layers(batch=4), tmp_path / "m.onnx", "weights.bin")
    rows = read_split(str(graphs.rows(tmp_path / "test.npz")), "custom", Columns(), tmp_path)
    shop: Any = Workshop(
        Store(tmp_path / "store"),
        "custom",
        {"test": rows},
        0,
        1,
        None,
        Silent(),
        {},  # type: ignore[arg-type]
    )
    made, cached = foreign.begin_with_graph(shop, model_in(path), {"test": rows}, fresh=False)
    assert not cached
    assert sorted(made.manifest.files) == ["model.onnx", "model.onnx_data", "signature.json"]
    assert (made.format, made.manifest.details["foreign"], made.manifest.details["opset"]) == (
        "onnx",
        True,
        17,
    )
    assert [feeds["x"].shape for _, feeds, _ in tried] == [(4, 8)]  # as many rows as the graph takes
    made.verify()
    again, cached = foreign.begin_with_graph(shop, model_in(path), {"test": rows}, fresh=False)
    assert cached
    assert again.key == made.key
    # other weights in the file beside it are another model
    (tmp_path / "weights.bin").write_bytes(bytes((tmp_path / "weights.bin").stat().st_size))
    other, _ = foreign.begin_with_graph(shop, model_in(path), {"test": rows}, fresh=False)
    assert other.key != made.key
