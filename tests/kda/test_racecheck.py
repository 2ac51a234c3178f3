"""What racecheck reports of chunk_kda on Hopper's kernels is what it reports of right kernels: see docs/numerics.md."""

from __future__ import annotations

import pytest
import torch

import racecheck
from kernel_fun._common import device as devices

absent = not torch.cuda.is_available() or devices.of(torch.device("cuda")).arch != "sm90"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sm90,
    pytest.mark.skipif(absent, reason="needs a Hopper GPU"),
    racecheck.needed,
]

CALL = """
import os
os.environ["KERNEL_FUN_KDA_BACKEND"] = "sm90"
import torch
from kernel_fun import testing
from kernel_fun.kda import chunk_kda
x = testing.make_inputs("softplus_random", seqlens=(61, 0, 124), tail=9, H=1, HV=2, K=128, V=128, dtype=torch.bfloat16,
    initial_state=True, output_final_state=True, device="cuda")
out = testing.run(chunk_kda, x, **testing.make_upstream(x))
print("finite" if all(v.isfinite().all() for v in out.values()) else "NOT FINITE")
"""
BUILD = 8
"""Warps 0..7 of fwd_state write the operands, two for each 16 tokens: warps w and w + 4."""


def test_no_race_but_those_of_the_tool():
    report, found = racecheck.run("-c", CALL)
    assert "\nfinite" in report
    for x in found:
        first, second = x.first // 32, x.second // 32
        equal_betas = "kda_fwd_state" in x.kernel and abs(first - second) == 4 and max(first, second) < BUILD
        own_barrier = "kda_bwd_grads" in x.kernel and (x.first // 128, x.second // 128) == (1, 0)
        # the lane that arrives for its warp is the only one whose order racecheck sees
        assert x.first % 32 or equal_betas or own_barrier, x
