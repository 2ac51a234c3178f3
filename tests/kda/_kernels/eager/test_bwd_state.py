"""The reverse scan that gives the gradient of the state before it, and nothing else."""

from __future__ import annotations

import inspect

import pytest
import torch

from kernel_fun.kda import chunk_kda
from kernel_fun.kda._kernels.eager.bwd_state import bwd_state
from kernel_fun.kda._kernels.eager.fwd_intra import fwd_intra
from kernel_fun.kda.call import bind
from kernel_fun.testing import make_inputs, make_upstream


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("shape", [dict(T=130, B=2), dict(seqlens=(64, 0, 65, 1))], ids=str)
def test_it_is_that_of_the_whole_with_an_initial_state_or_without(shape, v_first):
    x = make_inputs(
        "softplus_random", **shape, H=1, HV=2, K=8, V=4, dtype=torch.float64, initial_state=True,
        output_final_state=True, state_v_first=v_first,
    )  # fmt: skip
    bound = inspect.signature(chunk_kda).bind(**x)
    bound.apply_defaults()
    call = bind(bound.arguments)
    intra, (do, dht) = fwd_intra(call), make_upstream(x).values()
    want = bwd_state(call, intra, do, dht, None, None)
    kept = want.h, want.v_new
    for some in (call, call.like(notes=call.notes.of(None), initial_state=None)):
        for states in ((None, None), kept):
            dh, dv2, dh0, h, v_new = bwd_state(some, intra, do, dht, *states, only_dh0=True)
            assert (dh, dv2, h, v_new) == (None,) * 4
            assert torch.equal(dh0, want.dh0)
