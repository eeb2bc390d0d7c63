"""Exports models by Optimum; reads a request as JSON, prints the names of the graphs.

A request: {"models": [{"source", "out", "task"}, ...]}.
"""

import json
import logging
import os
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
sys.path.pop(0)  # this folder
answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)  # the exporter prints what it does

from optimum.exporters.onnx import main_export  # noqa: E402

found = []
for model in json.load(sys.stdin)["models"]:
    main_export(model["source"], model["out"], task=model["task"])
    found.append(sorted(path.name for path in Path(model["out"]).glob("*.onnx")))
print(json.dumps(found), file=answers, flush=True)
