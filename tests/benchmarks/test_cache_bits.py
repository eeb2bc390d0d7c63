"""GroupQueryAttention with int8 caches computes what docs/measurements/int8-caches.md says."""

from __future__ import annotations

import benchmarks_path  # noqa: F401 -- before what lies in benchmarks
import cache_bits


def test_codes_are_those_of_numpy_and_the_output_is_attention_over_them() -> None:
    cases = list(cache_bits.compare_with_numpy())
    assert len(cases) == 24
    assert [case for *case, differ, _ in cases if differ] == []
    assert max(error for *_, error in cases) < 2e-6
