"""Codes of GPTQ compared with those of GPTQModel's, which quantizes the checkpoints that others publish."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from smelt.calibration.statistics import empty_statistics
from smelt.compress.quantize.gptq import column_updates, gptq_quantize
from smelt.compress.quantize.plan_layers import scheme_grid
from smelt.quantization.schemes.registry import SCHEMES_BY_BITS, default_options
from tests.support.processes import peer_tools

pytestmark = pytest.mark.peers
CASES = [
    {"bits": bits, "group": group, "symmetric": symmetric, "act_order": act_order}
    for bits in sorted(SCHEMES_BY_BITS)
    for group in (32, 64)
    for symmetric in (False, True)
    for act_order in ("none", "static")
]


@pytest.fixture(scope="module")
def decided(tmp_path_factory):
    """The weight of a layer, what it is fed, and what GPTQModel makes of it in each case."""
    folder, draw = tmp_path_factory.mktemp("codes"), torch.Generator().manual_seed(0)
    inputs = torch.randn(800, 320, generator=draw) @ torch.randn(320, 320, generator=draw)
    weight = torch.randn(16, 320, generator=draw)
    np.save(folder / "weight.npy", weight.numpy())
    np.save(folder / "fed.npy", inputs.numpy())
    done = peer_tools.run_in_gptqmodel("quantize_by_gptqmodel.py", {"folder": str(folder), "cases": CASES})
    assert done == len(CASES)
    statistics = empty_statistics(320, second=True)
    statistics.update(inputs)
    return weight, statistics, [dict(np.load(folder / f"{index}.npz")) for index in range(len(CASES))]


@pytest.mark.parametrize("case_index", range(len(CASES)), ids=[str(case) for case in CASES])
def test_gptq_weights_equal_gptqmodel_on_its_grids(decided, case_index):
    weight, statistics, references = decided
    case, reference = CASES[case_index], references[case_index]
    scheme = SCHEMES_BY_BITS[case["bits"]]
    options = default_options(scheme) | {"group_size": case["group"], "symmetric": case["symmetric"]}
    scales, zeros = torch.from_numpy(reference["scales"]), torch.from_numpy(reference["zeros"]).byte()
    middle = 2 ** (case["bits"] - 1)
    if case["symmetric"]:
        assert bool((zeros == middle).all())
    grid = {"scales": scales} | ({} if case["symmetric"] else {"zeros": zeros})
    updates = column_updates(statistics, case["act_order"])
    codes = gptq_quantize(weight, updates, scheme, options, lambda *_: grid).q_weight
    expected = torch.from_numpy(reference["codes"])
    # a weight between two codes may become either, which moves later ones of its row
    differing_rows = (codes != expected).flatten(1).float().mean(dim=1) > 0.001
    assert int(differing_rows.sum()) <= 1
    rounded = scheme.quantize(weight.view(16, -1, case["group"]), grid, options)
    assert float((rounded == expected).float().mean()) < 0.9  # it is not the nearest that agrees


@pytest.mark.parametrize("case_index", [i for i, case in enumerate(CASES) if not case["symmetric"]])
def test_zero_point_grids_equal_gptqmodel_in_float16(decided, case_index):
    weight, _, references = decided
    case, reference = CASES[case_index], references[case_index]
    scheme = SCHEMES_BY_BITS[case["bits"]]
    options = default_options(scheme) | {"group_size": case["group"], "symmetric": False}
    grid = scheme_grid(weight.view(16, -1, case["group"]), 320, scheme, options)
    torch.testing.assert_close(grid["scales"], torch.from_numpy(reference["scales"]), rtol=2**-11, atol=0)
    difference = (
        grid["zeros"].float().numpy() - reference["zeros"]
    )  # a scale of fewer digits may move one by a step
    assert np.abs(difference).max() <= 1
    assert np.mean(difference == 0) > 0.95
