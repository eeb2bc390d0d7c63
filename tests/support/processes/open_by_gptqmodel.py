"""Opens folders with GPTQModel on the CPU; reads a request as JSON, prints how many it has opened.

A request: {"folders": [...], "ids": [[...]]}. Each folder gets logits.npy, float32 [texts, tokens, V].
"""

import json
import os
import sys
from pathlib import Path

sys.path.pop(0)  # this folder
answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)  # it prints a banner

import numpy as np  # noqa: E402
import torch  # noqa: E402
from gptqmodel import BACKEND, GPTQModel  # noqa: E402

asked = json.load(sys.stdin)
for folder in asked["folders"]:
    opened = GPTQModel.load(folder, device="cpu", backend=BACKEND.AUTO, dtype=torch.float16)
    with torch.no_grad():
        logits = opened.model(torch.tensor(asked["ids"])).logits
    np.save(Path(folder) / "logits.npy", logits.float().numpy())
print(json.dumps(len(asked["folders"])), file=answers, flush=True)
