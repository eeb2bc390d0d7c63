"""Codes of GPTQ compared with those of GPTQModel's, which quantizes the checkpoints that others publish."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from smelt.calibration.statistics import empty_statistics
from smelt.compress.quantize.gptq import gptq_quantize
from smelt.compress.quantize.plan_layers import scheme_grid
from smelt.quantization.schemes.registry import SCHEMES_BY_BITS, default_options
from tests.support.processes import peer_tools

pytestmark = pytest.mark.peers
CASES = [
    {"bits": bits, "group": group, "symmetric": symmetric}
    for bits in sorted(SCHEMES_BY_BITS)
    for group in (32, 64)
    for symmetric in (False, True)
]


@pytest.fixture(scope="module")
def decided(tmp_path_factory):
    """The weight of a layer, what it is fed, and what GPTQModel makes of it in each case."""
    folder, draw = tmp_path_factory.mktemp("codes"), torch.Generator().manual_seed(0)
    fed = torch.randn(800, 320, generator=draw) @ torch.randn(320, 320, generator=draw)
    weight = torch.randn(16, 320, generator=draw)
    np.save(folder / "weight.npy", weight.numpy())
    np.save(folder / "fed.npy", fed.numpy())
    done = peer_tools.run_in_gptqmodel("quantize_by_gptqmodel.py", {"folder": str(folder), "cases": CASES})
    assert done == len(CASES)
    found = empty_statistics(320, second=True)
    found.update(fed)
    return weight, found, [dict(np.load(folder / f"{at}.npz")) for at in range(len(CASES))]


@pytest.mark.parametrize("at", range(len(CASES)), ids=[str(case) for case in CASES])
def test_codes_are_those_of_gptqmodel_on_its_grids(decided, at):
    weight, found, theirs = decided
    case, made = CASES[at], theirs[at]
    scheme = SCHEMES_BY_BITS[case["bits"]]
    options = default_options(scheme) | {"group_size": case["group"], "symmetric": case["symmetric"]}
    scales, zeros = torch.from_numpy(made["scales"]), torch.from_numpy(made["zeros"]).byte()
    middle = 2 ** (case["bits"] - 1)
    if case["symmetric"]:
        assert bool((zeros == middle).all())
    grid = {"scales": scales} | ({} if case["symmetric"] else {"zeros": zeros})
    codes = gptq_quantize(weight, found, scheme, options, lambda *_: grid).q_weight
    wanted = torch.from_numpy(made["codes"])
    # a weight between two codes may become either, and what it leaves moves others a little
    assert float((codes == wanted).float().mean()) > 0.999
    rounded = scheme.quantize(weight.view(16, -1, case["group"]), grid, options)
    assert float((rounded == wanted).float().mean()) < 0.9  # it is not the nearest that agrees


@pytest.mark.parametrize("at", [i for i, case in enumerate(CASES) if not case["symmetric"]])
def test_grids_with_zero_points_are_those_of_gptqmodel_to_float16(decided, at):
    weight, _, theirs = decided
    case, made = CASES[at], theirs[at]
    scheme = SCHEMES_BY_BITS[case["bits"]]
    options = default_options(scheme) | {"group_size": case["group"], "symmetric": False}
    grid = scheme_grid(weight.view(16, -1, case["group"]), 320, scheme, options)
    torch.testing.assert_close(grid["scales"], torch.from_numpy(made["scales"]), rtol=2**-11, atol=0)
    off = grid["zeros"].float().numpy() - made["zeros"]  # a scale of fewer digits may move one by a step
    assert np.abs(off).max() <= 1
    assert np.mean(off == 0) > 0.95
