"""The example of docs/how-to/image-text.md: its script, and its recipe."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.support import harness
from tests.support.models import images

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "image-text.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_example_of_page_can_be_run(tmp_path):
    blocks = dict(reversed(BLOCKS))  # the first of each language
    (tmp_path / "make_data.py").write_text(blocks["python"])
    (tmp_path / "images-texts.yaml").write_text(blocks["yaml"])
    archives = [images.write_archive(tmp_path / f"{name}.npz", 120) for name in ("train", "test")]
    command = [sys.executable, "make_data.py", *map(str, archives)]
    subprocess.run(command, cwd=tmp_path, check=True)
    rows = [json.loads(line) for line in (tmp_path / "test.jsonl").read_text().splitlines()]
    assert [row["label"] for row in rows[:2]] == ["airplane", "automobile"]  # classes 0 and 1
    archive = np.load(archives[1])
    assert (tmp_path / rows[0]["image"]).read_bytes() == archive["jpeg"][: archive["offsets"][1]].tobytes()
    result = harness.smelt("plan", tmp_path / "images-texts.yaml")
    assert result.exit_code == 0, result.output
