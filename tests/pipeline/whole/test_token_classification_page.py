"""The example of docs/how-to/token-classification.md: its script, and its recipe."""

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.support import harness

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "token-classification.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_example_of_page_can_be_run(tmp_path):
    blocks = dict(reversed(BLOCKS))  # the first of each language
    (tmp_path / "make_data.py").write_text(blocks["python"])
    (tmp_path / "bert.json").write_text(blocks["json"])
    (tmp_path / "pii.yaml").write_text(blocks["yaml"])
    subprocess.run([sys.executable, "make_data.py"], cwd=tmp_path, check=True)
    rows = [
        json.loads(line)
        for name in ("train", "validation", "test")
        for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()
    ]
    assert len({row["text"] for row in rows}) == len(rows)
    entities = {e["label"]: row["text"][e["start"] : e["end"]] for row in rows for e in row["entities"]}
    assert entities.keys() == {"NAME", "EMAIL", "DATE"}
    assert entities["EMAIL"].endswith("@example.org")
    result = harness.smelt("plan", tmp_path / "pii.yaml")
    assert result.exit_code == 0, result.output
