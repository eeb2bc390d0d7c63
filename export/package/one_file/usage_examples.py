"""Write the two example programs of a model in one file, and the usage notes of its README."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from smelt.core.data import SENTENCE_SIMILARITY
from smelt.core.labels import SINGLE_LABEL, problem_type
from smelt.export.package.package_format import UsageNotes

NUMBERS_FILE, STRINGS_FILE = "model.onnx", "model_text.onnx"
GENERATION_TASKS = ("translation", "summarization", "language-modeling")
_PYTHON_FILE, _NODE_FILE = "answer.py", "answer.mjs"
# its install scripts would download GPU libraries
_INSTALL_IN_NODE = "npm install --ignore-scripts onnxruntime-node"
_MAX_SHOWN = 24  # characters of an edge-case text

_FROM_STRINGS = """\
import argparse
from pathlib import Path

import numpy as np
import onnxruntime
import onnxruntime_extensions

parser = argparse.ArgumentParser(description="Run the model on texts.")
parser.add_argument("text", nargs="+", type=lambda text: text.encode().decode(), help="a text, in UTF-8")
texts = np.array(parser.parse_args().text, dtype=object)
options = onnxruntime.SessionOptions()
options.log_severity_level = 3  # otherwise it warns about each input with a default
options.register_custom_ops_library(onnxruntime_extensions.get_library_path())
session = onnxruntime.InferenceSession(Path(__file__).with_name("{file}"), options)
for answer in session.run(["{answer}"], {{"texts": texts}})[0]:
    print(answer)
"""

_FROM_NUMBERS = """\
import argparse
from pathlib import Path

import numpy as np
import onnxruntime

parser = argparse.ArgumentParser(description="Run the model on the tokens of a text.")
parser.add_argument("token", nargs="+", type=int, help="id of a token in the vocabulary")
ids = np.array([parser.parse_args().token])  # one text; for several, the mask marks padding
options = onnxruntime.SessionOptions()
options.log_severity_level = 3  # otherwise it warns about each input with a default
session = onnxruntime.InferenceSession(Path(__file__).with_name("{file}"), options)
feeds = {{"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}}
taken = {{one.name: feeds[one.name] for one in session.get_inputs()}}
print(*session.run(["{answer}"], taken)[0][0].tolist())
"""

_IN_NODE = """\
import {{ fileURLToPath }} from "node:url";
import * as ort from "onnxruntime-node";

const given = process.argv.slice(2);  // one text
if (!given.length || !given.every((word) => /^\\d+$/.test(word))) {{
  console.error("usage: node answer.mjs TOKEN..., ids of tokens in the vocabulary");
  process.exit(2);
}}
const words = given.map(BigInt);
const file = fileURLToPath(new URL("{file}", import.meta.url));
const session = await ort.InferenceSession.create(file, {{ logSeverityLevel: 3 }});
const tensor = (values) => new ort.Tensor("int64", BigInt64Array.from(values), [1, words.length]);
const all = {{
  input_ids: tensor(words),
  attention_mask: tensor(words.map(() => 1n)),
  token_type_ids: tensor(words.map(() => 0n)),
}};
const feeds = Object.fromEntries(session.inputNames.filter((n) => n in all).map((n) => [n, all[n]]));
console.log([...(await session.run(feeds, ["{answer}"])).{answer}.data].join(" "));
"""


def answer_outputs(task: str, config: Mapping[str, Any]) -> tuple[str, str]:
    """Return the output that answers a user, of the graph with string inputs and of the other one."""
    if task in GENERATION_TASKS:
        return "generated", "sequences"
    if task == SENTENCE_SIMILARITY:
        return "sentence_embedding", "sentence_embedding"
    return ("labels" if problem_type(config) == SINGLE_LABEL else "logits"), "logits"


def write_usage_examples(
    folder: Path, answers: tuple[str, str], why: str | None, edge_cases: Sequence[str]
) -> UsageNotes:
    """Write the programs into `folder`; return the usage notes.

    Args:
        folder: with the graphs.
        answers: as `answer_outputs` returns them.
        why: the reason why there is no graph with string inputs; None if there is one.
        edge_cases: texts that it tokenizes differently from the model's tokenizer.
    """
    strings, numbers = answers
    node = _IN_NODE.format(file=NUMBERS_FILE, answer=numbers)
    (folder / _NODE_FILE).write_text(node, encoding="utf-8")
    plain = f"`{NUMBERS_FILE}` takes `input_ids` and returns `{numbers}`. It needs only ONNX Runtime."
    made = _FROM_NUMBERS if why is not None else _FROM_STRINGS
    file, answer = (NUMBERS_FILE, numbers) if why is not None else (STRINGS_FILE, strings)
    python = made.format(file=file, answer=answer)
    (folder / _PYTHON_FILE).write_text(python, encoding="utf-8")
    in_node = f"{_INSTALL_IN_NODE}\nnode {_NODE_FILE} 5 6 7"
    load = (
        ("bash", in_node),
        ("python", f"# {_PYTHON_FILE}\n{python}"),
        ("javascript", f"// {_NODE_FILE}\n{node}"),
    )
    if why is not None:
        said = (plain, f"There is no file with string inputs: {why}.")
        return UsageNotes("pip install onnxruntime numpy", f"python {_PYTHON_FILE} 5 6 7", load, said)
    notes = [
        f"`{STRINGS_FILE}` takes `texts` and returns `{strings}`: `python {_PYTHON_FILE} TEXT...`. Its"
        " tokenizer consists of operators of onnxruntime-extensions. Python and C# can load them"
        " (`RegisterOrtExtensions()` in C#, not tested here); onnxruntime-node and onnxruntime-web cannot.",
        f"{plain} `{_NODE_FILE}` runs it in Node. Each file is complete: copy the one you need.",
        "Its tokenizer gives the same tokens as the model's own on 10,000 texts generated from its"
        " vocabulary.",
    ]
    if edge_cases:
        shown = ", ".join(json.dumps(text[:_MAX_SHOWN], ensure_ascii=True) for text in edge_cases)
        notes.append(f"Edge-case texts that are tokenized differently, or not at all: {shown}.")
    needs = "pip install onnxruntime 'onnxruntime-extensions>=0.15' numpy"
    return UsageNotes(needs, f'python {_PYTHON_FILE} "TEXT"', load, tuple(notes))
