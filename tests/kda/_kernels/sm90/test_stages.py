"""Everything the dispatcher gives to Hopper reaches a kernel: no launcher and no config refuses it.

The kernels themselves do not run here; what they would be launched with is checked by the launchers.
"""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("cutlass")

from kernel_fun._common import config, support
from kernel_fun._common import device as devices
from kernel_fun._common.device import named
from kernel_fun._cute.varlen import chunk_table, sequence_chunks
from kernel_fun.kda import chunk_kda
from kernel_fun.kda._kernels.sm90 import bwd_grads, bwd_grads_reduce, bwd_state, fwd_intra, fwd_state, stages

KERNELS = (fwd_intra, fwd_state, bwd_state, bwd_grads, bwd_grads_reduce)


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """CPU tensors count as an H200's; a launch is recorded instead of made. Returns the configs launched."""
    seen: list[tuple[str, object]] = []

    def compiler(name):
        def compile(config, *rest):
            seen.append((name, config))
            return lambda *tensors: None

        return compile

    for module in KERNELS:
        monkeypatch.setattr(module, "_compile", compiler(module.__name__.rpartition(".")[2]))
    monkeypatch.setattr(stages, "chunk_tables", lambda cu, T: (sequence_chunks(cu), chunk_table(cu, T)))
    monkeypatch.setattr(devices, "of", lambda device: named("sm90"))
    monkeypatch.setattr(support, "missing", lambda need: None)
    monkeypatch.setenv(config.KDA_BACKEND.name, "sm90")
    return seen


def inputs(
    *,
    io=torch.bfloat16,
    g=None,
    beta=None,
    H=2,
    HV=2,
    K=64,
    V=64,
    T=130,
    B=1,
    gate="softplus",
    cu=None,
    state=False,
    v_first=False,
):
    make = lambda *s, dtype=io: torch.zeros(s, dtype=dtype, requires_grad=True)  # noqa: E731
    x = dict(q=make(B, T, H, K), k=make(B, T, H, K), v=make(B, T, HV, V))
    x |= dict(g=make(B, T, HV, K, dtype=g or io), beta=make(B, T, HV, dtype=beta or io))
    if gate != "log":
        x |= dict(
            use_gate_in_kernel=True,
            A_log=make(HV, dtype=torch.float32),
            dt_bias=make(HV * K, dtype=torch.float32),
        )
    if gate == "bounded":
        x |= dict(lower_bound=-5.0, safe_gate=True)
    if cu is not None:
        x |= dict(cu_seqlens=torch.tensor(cu))
    if state:
        N = B if cu is None else len(cu) - 1
        x |= dict(initial_state=make(N, HV, *((V, K) if v_first else (K, V)), dtype=torch.float32))
        x |= dict(output_final_state=True, state_v_first=v_first)
    return x


CASES = [
    dict(),
    dict(io=torch.float16),
    dict(beta=torch.float32),
    dict(K=128, V=256, HV=4),
    dict(gate="bounded", state=True),
    dict(gate="log", state=True, v_first=True),
    dict(cu=(0, 0, 5, 70, 130), state=True, V=192),
    dict(T=1, H=1, HV=1),
    dict(T=1, H=1, HV=1, cu=(0, 1)),
    dict(B=3, T=64),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(f"{k}={v}" for k, v in c.items()) or "plain")
@pytest.mark.parametrize("l2norm", [False, True])
def test_training_reaches_every_kernel(case, l2norm, launched):
    x = inputs(**case)
    o, ht = chunk_kda(**x, use_qk_l2norm_in_kernel=l2norm, use_beta_sigmoid_in_kernel=True)
    leaves = {n: a for n, a in x.items() if isinstance(a, torch.Tensor) and a.requires_grad}
    loss = o.float().sum() + (0.0 if ht is None else ht.sum())
    grads = torch.autograd.grad(loss, tuple(leaves.values()))
    expected = ["fwd_intra", "fwd_state", "fwd_state", "bwd_state", "bwd_grads"]
    grouped = ["bwd_grads_reduce"] * 2 if x["v"].shape[2] > x["q"].shape[2] else []
    assert [name for name, _ in launched] == expected + grouped
    assert o.shape == x["v"].shape
    assert o.dtype == x["q"].dtype
    for (name, leaf), grad in zip(leaves.items(), grads):
        assert (grad.shape, grad.dtype) == (leaf.shape, leaf.dtype), name


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(f"{k}={v}" for k, v in c.items()) or "plain")
def test_inference_reaches_the_forward_kernels(case, launched):
    with torch.inference_mode():
        chunk_kda(**inputs(**case))
    assert [name for name, _ in launched] == ["fwd_intra", "fwd_state"]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(f"{k}={v}" for k, v in c.items()) or "plain")
def test_a_reverse_summary_is_one_launch(case, launched, monkeypatch):
    """It spares the rescan of a backward that kept no states, and wants no initial state."""
    found = []

    def only_dh0(call, intra, do, dht, h, v_new):
        del launched[:]
        found.append(stages._reverse_scan(call, intra, do, dht, h, v_new, only_dh0=True))
        raise StopIteration

    monkeypatch.setattr(stages, "bwd_state", only_dh0)
    o, _ = chunk_kda(**inputs(**case))
    with pytest.raises(StopIteration):
        o.float().sum().backward()
    ((name, config),) = launched
    assert (name, config.want_dh, config.want_dh0, config.overlapped) == ("bwd_state", False, True, False)
    ((dh, dv2, dh0, h, v_new),) = found
    assert (dh, dv2, h, v_new) == (None,) * 4
    x = inputs(**{**case, "state": True})
    assert (dh0.shape, dh0.dtype) == (x["initial_state"].shape, torch.float32)


def test_kept_states_spare_the_rescan(launched):
    o, _ = chunk_kda(**inputs(), disable_recompute=True)
    o.sum().backward()
    assert [name for name, _ in launched] == ["fwd_intra", "fwd_state", "bwd_state", "bwd_grads"]


@pytest.mark.parametrize("use_graph", [False, True])
def test_intermediate_states_of_a_packing(use_graph):
    x = inputs(cu=(0, 0, 5, 70, 130), state=True)
    with torch.inference_mode():
        *_, h = chunk_kda(**x, return_intermediate_states=True, use_graph=use_graph)
    assert h.shape == (1, 3 + 4 - 1 if use_graph else 4, 2, 64, 64)


def test_views_are_copied_only_where_tma_cannot_read_them(launched):
    x = inputs(gate="log")
    qkv = torch.zeros(1, 130, 3, 2, 64, dtype=torch.bfloat16)
    x |= dict(q=qkv[:, :, 0], k=qkv[:, :, 1], v=qkv[:, :, 2].mT.contiguous().mT)
    x |= dict(
        beta=torch.zeros(1, dtype=torch.bfloat16).expand(1, 130, 2),
        g=x["g"].detach()[..., :1].expand(1, 130, 2, 64),
    )
    with torch.inference_mode():
        chunk_kda(**x)
    assert len(launched) == 2


@pytest.mark.parametrize("dtype, read_as", [(torch.float32, "float32"), (torch.float16, "float32")])
def test_a_gate_of_another_dtype_is_read_as_it_is_or_in_float32(dtype, read_as, launched):
    x = inputs(g=dtype)
    o, _ = chunk_kda(**x)
    (dg,) = torch.autograd.grad(o.float().sum(), x["g"])  # pyright: ignore[reportCallIssue]
    assert dg.dtype == dtype
    assert {config.g for name, config in launched if name != "bwd_grads_reduce"} == {read_as}


def test_the_table_and_the_kernels_agree_on_the_box():
    sizes = itertools.product((32, 64, 100, 128, 256), (32, 64, 96, 128, 320))
    for K, V in sizes:
        x = inputs(K=K, V=V)
        if K in (64, 128) and V % 64 == 0:
            chunk_kda(**x)
        else:
            with pytest.raises(RuntimeError, match=r"kernels (are built for|take multiples)"):
                chunk_kda(**x)


def test_the_decays_of_a_chunk_are_as_many_as_the_kernels_keep():
    from kernel_fun.kda._kernels.sm90 import scan_config
    from kernel_fun.kda.stages import DECAYS

    assert scan_config.DECAYS == DECAYS
