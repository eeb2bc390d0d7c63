"""Quantizes one linear layer by GPTQModel; reads a request as JSON, prints how many cases are done.

A request: {"folder", "cases": [{"bits", "group", "symmetric", "act_order"}, ...]}. The folder holds
weight.npy, float32 [N, K], and fed.npy, float32 [tokens, K]; of each case it gets N.npz with codes, scales
and zeros.
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
from gptqmodel.looper.named_module import NamedModule  # noqa: E402
from gptqmodel.quantization import QuantizeConfig  # noqa: E402
from gptqmodel.quantization.gptq import GPTQ  # noqa: E402

asked = json.load(sys.stdin)
folder = Path(asked["folder"])
weight = torch.from_numpy(np.load(folder / "weight.npy"))
fed = torch.from_numpy(np.load(folder / "fed.npy"))
for at, case in enumerate(asked["cases"]):
    layer = torch.nn.Linear(weight.shape[1], len(weight), bias=False)
    layer.weight.data = weight.clone()
    settings = QuantizeConfig(
        bits=case["bits"],
        group_size=case["group"],
        sym=case["symmetric"],
        damp_percent=0.01,
        # the grids of the whole weights, ends not cut off: as smelt has it
        static_groups=True,
        desc_act=case["act_order"] == "static",
        act_group_aware=False,
        mse=0.0,
    )
    work = GPTQ(NamedModule(layer, name="layer", full_name="layer", layer_index=0), settings)
    work.quantizer.configure(perchannel=True)
    work.add_batch(fed[None], torch.zeros(1, len(fed), len(weight)))
    values, scales, zeros = work.quantize(blocksize=128)[:3]
    steps = values.view(len(weight), -1, case["group"]) / scales[..., None] + zeros[..., None]
    np.savez(folder / f"{at}.npz", codes=steps.round().numpy(), scales=scales.numpy(), zeros=zeros.numpy())
print(json.dumps(len(asked["cases"])), file=answers, flush=True)
