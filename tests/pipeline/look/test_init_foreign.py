"""A first recipe of a graph, whatever its author called things."""

from pathlib import Path

import foreign_graphs as graphs

from smelt.look.init_foreign import graph_recipe


def test_names_that_yaml_does_not_allow_are_written_as_escapes(tmp_path: Path) -> None:
    model = graphs.two_layers()
    model.producer_name = "by\x1b[31m\nme"
    path = graphs.save(model, tmp_path / "m.onnx")
    text = graph_recipe(str(path), [], None, Path("m.yaml"), tmp_path)
    assert "by\\x1b[31m" in text
    assert text.replace("\n", "").isprintable()
    assert all(line.startswith("#") for line in text.splitlines()[:4])
