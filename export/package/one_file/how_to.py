"""How a model in one file is used: the two small programs that lie beside it, and what its README says."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from smelt.core.data import SIMILARITY
from smelt.core.labels import SINGLE, problem_type
from smelt.export.package.form import HowTo

NUMBERS, STRINGS = "model.onnx", "model_text.onnx"
GENERATES = ("translation", "summarization", "language-modeling")
_PYTHON, _NODE = "answer.py", "answer.mjs"
# its scripts would fetch what GPUs need
_INSTALL_IN_NODE = "npm install --ignore-scripts onnxruntime-node"
_SHOWN = 24  # characters of an awkward text

_FROM_STRINGS = """\
import argparse
from pathlib import Path

import numpy as np
import onnxruntime
import onnxruntime_extensions

parser = argparse.ArgumentParser(description="Answers texts.")
parser.add_argument("text", nargs="+", type=lambda text: text.encode().decode(), help="a text, in UTF-8")
texts = np.array(parser.parse_args().text, dtype=object)
options = onnxruntime.SessionOptions()
options.log_severity_level = 3  # else it warns of each input that has a default
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

parser = argparse.ArgumentParser(description="Answers the tokens of a text.")
parser.add_argument("token", nargs="+", type=int, help="the number of a token in the vocabulary")
ids = np.array([parser.parse_args().token])  # one text; of several the mask says what is padding
options = onnxruntime.SessionOptions()
options.log_severity_level = 3  # else it warns of each input that has a default
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
  console.error("usage: node answer.mjs TOKEN..., numbers of tokens in the vocabulary");
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


def answers_of(task: str, config: Mapping[str, Any]) -> tuple[str, str]:
    """Return the output that answers a user, of the graph that takes strings and of the other one."""
    if task in GENERATES:
        return "generated", "sequences"
    if task == SIMILARITY:
        return "sentence_embedding", "sentence_embedding"
    return ("labels" if problem_type(config) == SINGLE else "logits"), "logits"


def how_to(folder: Path, answers: tuple[str, str], why: str | None, awkward: Sequence[str]) -> HowTo:
    """Write the programs into `folder`; say how the files are used.

    Args:
        folder: with the graphs.
        answers: as `answers_of` gives them.
        why: there is no graph that takes strings; None where there is one.
        awkward: texts that it does not read as the model's tokenizer does.
    """
    strings, numbers = answers
    node = _IN_NODE.format(file=NUMBERS, answer=numbers)
    (folder / _NODE).write_text(node, encoding="utf-8")
    plain = f"`{NUMBERS}` takes `input_ids` and gives `{numbers}`. It needs ONNX Runtime alone."
    made = _FROM_NUMBERS if why is not None else _FROM_STRINGS
    file, answer = (NUMBERS, numbers) if why is not None else (STRINGS, strings)
    python = made.format(file=file, answer=answer)
    (folder / _PYTHON).write_text(python, encoding="utf-8")
    in_node = f"{_INSTALL_IN_NODE}\nnode {_NODE} 5 6 7"
    load = (("bash", in_node), ("python", f"# {_PYTHON}\n{python}"), ("javascript", f"// {_NODE}\n{node}"))
    if why is not None:
        said = (plain, f"No file takes strings: {why}.")
        return HowTo("pip install onnxruntime numpy", f"python {_PYTHON} 5 6 7", load, said)
    notes = [
        f"`{STRINGS}` takes `texts` and gives `{strings}`: `python {_PYTHON} TEXT...`. Its tokenizer is"
        " operators of onnxruntime-extensions, which Python and C# can load (`RegisterOrtExtensions()`, not"
        " run here), and onnxruntime-node and onnxruntime-web cannot.",
        f"{plain} `{_NODE}` runs it in Node. Each file is whole in itself: copy the one you need.",
        "10,000 texts by rule, of the words of its vocabulary, are read as by the model's own tokenizer.",
    ]
    if awkward:
        shown = ", ".join(json.dumps(text[:_SHOWN], ensure_ascii=True) for text in awkward)
        notes.append(f"Awkward texts that are read otherwise, or not at all: {shown}.")
    needs = "pip install onnxruntime 'onnxruntime-extensions>=0.15' numpy"
    return HowTo(needs, f'python {_PYTHON} "TEXT"', load, tuple(notes))
