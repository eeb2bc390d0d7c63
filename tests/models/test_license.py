"""What a model's folder says of its license."""

import pytest

from smelt.models.import_model import read_license


@pytest.mark.parametrize(("card", "expected"), [
    ("---\nlanguage: en\nlicense: apache-2.0\n---\n# Model\n", "apache-2.0 (its model card)"),
    ("---\r\nlicense: mit\r\n---\r\n", "mit (its model card)"),
    ("---\nlicense:\n- mit\n- cc-by-4.0\n---\n", "mit, cc-by-4.0 (its model card)"),
    ("---\nlicense: other\nlicense_name: llama3\nlicense_link: LICENSE\n---\n",
     "other, llama3, LICENSE (its model card)"),
    ("# Model\nlicense: mit\n", None), ("---\nlanguage: en\n---\nlicense: mit\n", None),
    ("---\n- a list\n---\n", None), ("---\n: : [broken\n---\n", None),
    ('---\nlicense: "a\\x1b[2Jb"\n---\n', "a [2Jb (its model card)"), ("", None),
])  # fmt: skip
def test_license_is_read_from_model_card(card, expected, tmp_path):
    (tmp_path / "README.md").write_text(card, newline="")
    assert read_license(tmp_path) == expected


def test_license_file_is_used_if_card_has_none(tmp_path):
    (tmp_path / "README.md").write_text("# Model\n")
    (tmp_path / "LICENSE.txt").write_text("\n    Apache License\n   Version 2.0\n")
    assert read_license(tmp_path) == "Apache License (its file LICENSE.txt)"
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    assert read_license(tmp_path) == "mit (its model card)"


def test_long_license_is_truncated_and_missing_is_none(tmp_path):
    assert read_license(tmp_path) is None
    assert read_license(tmp_path / "none") is None
    (tmp_path / "COPYING").write_text("word " * 100)
    text = read_license(tmp_path)
    assert text is not None
    assert len(text) == 100
    assert text.endswith("...")
