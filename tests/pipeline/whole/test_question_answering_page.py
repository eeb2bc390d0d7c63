"""The example of docs/how-to/question-answering.md: its script, and its recipe."""

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.support import harness

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "question-answering.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
TEXT = """ = Heading of 1999 =
 In 1{0}84 the crew of 1{0} men sailed for two weeks . It sank on 3 May , 1{0} miles off . Nothing was found
 The town has 4{0} @.@ 5 percent of the votes , and 3 @,@ 0{0}0 people . In 1850 and 1851 it won 2{0} games
"""


def test_example_of_page_can_be_run(tmp_path):
    blocks = dict(reversed(BLOCKS))  # the first of each language
    (tmp_path / "make_data.py").write_text(blocks["python"])
    (tmp_path / "bert.json").write_text(blocks["json"])
    (tmp_path / "qa.yaml").write_text(blocks["yaml"])
    for name, digits in {"train": range(10), "validation": (3, 4), "test": (4, 5)}.items():
        (tmp_path / f"{name}.txt").write_text("".join(TEXT.format(digit) for digit in digits))
    # the last file has also the texts of the others, which are used once
    command = [sys.executable, "make_data.py", "validation.txt", "test.txt", "train.txt"]
    subprocess.run(command, cwd=tmp_path, check=True)
    rows = [json.loads(line) for line in (tmp_path / "test.jsonl").read_text().splitlines()]
    answers = {text for row in rows for text in row["answers"]["text"]}
    assert {"1684", "16 men", "two weeks", "3 May", "16 miles", "46 @.@ 5 percent", "26 games"} <= answers
    assert "3 @,@ 060 people" in answers
    assert not {"1850", "1851", "1999"} & answers
    assert any(not row["answers"]["text"] for row in rows)
    for row in rows:
        for text, start in zip(*row["answers"].values(), strict=True):
            assert row["context"][start : start + len(text)] == text
    seen = [json.loads(line)["context"] for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert not {*seen} & {row["context"] for row in rows}
    result = harness.smelt("plan", tmp_path / "qa.yaml")
    assert result.exit_code == 0, result.output
