"""bwd_grads for Hopper: its register schedule on a modelled warp, what it compiles to, what it refuses, and, on the
device, what it computes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import warp_model

pytest.importorskip("cutlass")

from kernel_fun._common import cache
from kernel_fun._common import device as devices
from kernel_fun._cute import decay, inspect, sweep, warp
from kernel_fun._cute.tile import SMEM_BYTES
from kernel_fun._cute.varlen import chunk_table
from kernel_fun.kda._kernels.eager import bwd_grads as eager
from kernel_fun.kda._kernels.eager.decay import whole
from kernel_fun.kda._kernels.sm90 import bwd_grads as kernel
from kernel_fun.kda._kernels.sm90 import (
    bwd_grads_chunk,
    bwd_grads_config,
    bwd_grads_finish,
    bwd_grads_gate,
    bwd_grads_sweeps,
    bwd_grads_thread,
)
from kernel_fun.kda._kernels.sm90 import bwd_grads_reduce as reduce
from kernel_fun.testing import poisoned_empty

PHASES = (bwd_grads_thread, bwd_grads_gate, bwd_grads_chunk, bwd_grads_sweeps, bwd_grads_finish)
"""What runs on a modelled warp."""
T, C, HALF_BYTES = kernel.BT, kernel.CHANNELS, bwd_grads_config.HALF_BYTES
AT = dict(
    q=0, k=16384, g=32768, X=49152, Y=81920, A=94208, beta=90112, q_factor=90368, b_factor=90624, k_factor=90880,
    diagonal=91136, base=91392, seen=91904, dvb_v=92416,
)  # fmt: skip


def config(**changes):
    given = dict(
        io="bfloat16", g="bfloat16", beta="bfloat16", K=128, gate="softplus", beta_mode="sigmoid", l2norm=True,
        has_A_log=True, has_dt_bias=True, packed=False,
    )  # fmt: skip
    return kernel.Config(**{**given, **changes})


class Chunk:
    """Random inputs of phases C and D of one chunk, as shared memory and accumulators hold them."""

    def __init__(self, gate: str, seed: int) -> None:
        r = np.random.default_rng(seed)

        def normal(*shape):
            return r.standard_normal(shape).astype(np.float32)

        self.gate, self.A_log, self.lower_bound = gate, np.float32(0.3), np.float32(-5.0)
        self.bias = normal(C) * 0.5
        g = normal(T, C)
        if gate == "log":
            g = -np.abs(g) * 0.3
            g[r.random((T, C)) < 0.02] = -np.inf
            g[r.random((T, C)) < 0.02] = -1000.0
            self.bias[:] = 0.0
        self.g, self.q, self.k = (warp_model.rounded(x) for x in (g, normal(T, C), normal(T, C)))
        self.q_rstd, self.k_rstd = (1 / np.sqrt((x * x).sum(1) + 1e-6) for x in (self.q, self.k))
        self.beta = r.random(T).astype(np.float32)
        lower = np.tril(np.ones((T, T), bool), -1)
        self.dAqk, self.dAkk = (np.where(lower, normal(T, T), np.float32(0.0)) for _ in range(2))
        self.dAkk = warp_model.rounded(self.dAkk)
        self.diagonal = normal(T)
        self.dq, self.dk, self.rk = normal(T, C), normal(T, C), normal(T, C)
        self.s = normal(C)
        self.scale = np.float32(0.09)

    def expected(self) -> dict[str, np.ndarray]:
        """The same in fp64, by the eager stage's own functions."""

        def d(x):
            return torch.from_numpy(np.asarray(x, np.float64))

        q, k = (d(x) * d(y)[:, None] for x, y in ((self.q, self.q_rstd), (self.k, self.k_rstd)))
        g, beta = d(self.g) + d(self.bias), d(self.beta)[:, None]
        A = float(np.exp(self.A_log))
        if self.gate == "log":
            l, slope = g, torch.ones_like(g)
        elif self.gate == "softplus":
            l, slope = -A * torch.nn.functional.softplus(g), -A * torch.sigmoid(g)
        else:
            z = torch.sigmoid(A * g)
            l, slope = self.lower_bound * z, self.lower_bound * A * z * (1 - z)
        a = l.exp()
        E, R = whole(a[None].clone(), torch.ones(1, T, C, dtype=torch.float64))
        dq, rk, ck = d(self.dq)[None] * E * float(self.scale), d(self.rk)[None] * E, d(self.dk)[None] * R
        dl = torch.zeros_like(dq) + d(self.s) * E[:, -1:]
        dl += torch.cumsum(k * ck, 1) - k * ck
        rows = q * dq + beta * k * rk
        dl += rows.flip(1).cumsum(1).flip(1)
        ones = torch.ones_like(dq)
        eager.sweeps(
            d(self.dAqk)[None] * float(self.scale), d(self.dAkk)[None], q[None], k[None], (beta * k)[None], a[None].clone(), ones, dq, rk, ck, dl
        )  # fmt: skip
        dq, rk, ck, dl = dq[0], rk[0], ck[0], dl[0]
        on_diagonal = d(self.diagonal)[:, None] * float(self.scale)
        dl = torch.where(a == 0, 0.0, dl)
        dx = dl * slope
        dA = (dx * g).sum(0) if self.gate == "bounded" else torch.where(dl == 0, 0.0, dl * l).sum(0)

        def y(dy, x, r):
            return d(r)[:, None] * (dy - (dy * x).sum(1, keepdim=True) * x)

        dq, dk = dq + on_diagonal * k, ck + beta * rk + on_diagonal * q
        out = dict(
            dq=y(dq, q, self.q_rstd),
            dk=y(dk, k, self.k_rstd),
            dg=dx,
            dbeta=(rk * k).sum(1),
            dbias=dx.sum(0),
            dA=dA,
        )
        out["kE"] = beta * k * E[0]
        return {name: x.numpy() for name, x in out.items()}


def run(chunk: Chunk, monkeypatch) -> dict[str, np.ndarray]:
    """The gate and phases C and D of the kernel on eight modelled warps."""
    c = config(gate=chunk.gate, has_A_log=chunk.gate != "log", has_dt_bias=chunk.gate != "log")
    machine = warp_model.Machine()
    warp_model.install(monkeypatch, machine, warp, sweep, decay, *PHASES)
    for name in ("q", "k", "g"):
        machine.put_tile(AT[name], getattr(chunk, name))
    for name, x in (
        ("beta", chunk.beta),
        ("q_factor", chunk.scale * chunk.q_rstd),
        ("b_factor", chunk.beta * chunk.k_rstd),
        ("k_factor", chunk.k_rstd),
        ("diagonal", chunk.diagonal),
    ):
        machine.floats(AT[name], T)[:] = x
    gate = decay.Gate.of_head(chunk.gate, chunk.A_log if chunk.gate != "log" else None, chunk.lower_bound)
    lane = sweep.Lanes(warp_model.LANE)
    warps = []
    for w in range(8):
        self = kernel.KdaBwdGradsSm90(c)
        self.place_lane(AT, np.int64(32 * w) + warp_model.LANE, np.int64(w // 4), np.int64(w), lane)
        t = np.stack([8 * (i // 4) + 2 * warp_model.COLUMN + i % 2 for i in range(32)])
        ch = np.stack([16 * w + warp_model.ROW + 8 * (i // 2 % 2) for i in range(32)])
        bias = [chunk.bias[2 * self.pair + odd] for odd in range(2)]
        for n in range(2):
            self.scan_eight(gate, bias, np.int64(n))
        warps.append((self, t, ch, bias))
    factors = [(self.factors(), self.between()) for self, *_ in warps]
    B = [self.betas(x, s, t) for (self, *_), (x, (s, _, t)) in zip(warps, factors, strict=True)]
    out = {"kE": machine.get_tile(AT["X"] + 2 * HALF_BYTES, T, C)}
    machine.put_tile(AT["X"], chunk.dAqk)
    machine.put_tile(AT["X"] + 3 * HALF_BYTES, chunk.dAqk - warp_model.rounded(chunk.dAqk))
    machine.put_tile(AT["X"] + HALF_BYTES, chunk.dAkk)
    results = []
    for (self, t, ch, _), (x, between), b in zip(warps, factors, B, strict=True):
        QB = [[*q, *k] for q, k in zip(self.queries(x), b, strict=True)]
        dq, dk, rk = (list(y[t, ch]) for y in (chunk.dq, chunk.dk, chunk.rk))
        sums, k_dk = self.sweeps(x, QB, between, dq, dk, rk)
        s = [
            chunk.s[16 * int(self.warp) + warp_model.ROW + 8 * row] / 4 for row in range(2)
        ]  # a quarter a lane
        base = self.of_states(s, k_dk, between)
        for row in range(2):
            machine.floats(AT["base"], C)[ch[2 * row]] = base[row]
        results.append((dq, dk, rk, sums))
    machine.floats(AT["seen"], C)[:] = 1.0
    for (self, *_), (_dq, _dk, dg, sums) in zip(warps, results, strict=True):
        self.put_sums(sums, dg)
    sums = machine.floats(AT["Y"], 3 * 8 * T).reshape(3, 8, T).sum(1)
    out["dbeta"] = sums[0] / chunk.beta
    machine.floats(AT["q_factor"], T)[:] = -sums[1] * chunk.q_rstd**2
    machine.floats(AT["b_factor"], T)[:] = -(sums[0] + sums[2]) * chunk.k_rstd**2
    for self, *_ in warps:
        self.put_quarter_sums()
    out |= {name: np.zeros(C, np.float32) for name in ("dbias", "dA")}
    quarters = machine.floats(AT["Y"] + 6144, 4 * C).reshape(4, C)
    for (self, _t, _ch, bias), (dq, dk, *_) in zip(warps, results, strict=True):
        self.put_rows(dq, self.q_at, "q_factor")
        self.put_rows(dk, self.k_at, "b_factor")
        channel = [2 * self.pair + odd for odd in range(2)]
        later = quarters[int(self.quarter[0]) + 1 :].sum(0)
        carry = [machine.floats(AT["base"], C)[x] + later[x] for x in channel]
        parts = [np.zeros(32, np.float32) for _ in range(3)]
        for n in (1, 0):
            self.gate_eight(
                gate, chunk.lower_bound, bias, carry, [np.ones(32, np.float32)] * 2, parts, np.int64(n)
            )
        for odd in range(2):
            np.add.at(out["dbias"], channel[odd], parts[1 + odd])
        out["dA"][0] += parts[0].sum()
    for name, at in (("dq", "q"), ("dk", "k"), ("dg", "g")):
        out[name] = machine.get_tile(AT[at], T, C)
    return out


@pytest.mark.parametrize("gate", ["log", "softplus", "bounded"])
def test_sweeps_and_epilogue_agree_with_fp64(gate, monkeypatch):
    chunk = Chunk(gate, seed=len(gate))
    want = chunk.expected()
    got = run(chunk, monkeypatch)
    dA = want.pop("dA")
    if gate == "log":
        want.pop("dbias")
    else:
        assert abs(got["dA"].sum() - dA.sum()) < 4e-3 * np.linalg.norm(dA)
    for name, x in want.items():
        error = np.linalg.norm(got[name] - x) / np.linalg.norm(x)
        assert error < 4e-3, (name, error)


def test_no_gradient_where_the_decay_is_zero(monkeypatch):
    chunk = Chunk("log", seed=1)
    got = run(chunk, monkeypatch)["dg"]
    dead = chunk.g < -500.0
    assert dead.sum() > 100
    assert not got[dead].any()
    assert np.isfinite(got).all()


def test_the_digest_covers_every_file_of_the_kernel():
    package = Path(kernel.__file__).parent
    files = {f"{kernel.__package__}.{path.stem}" for path in package.glob("bwd_grads*.py")}
    assert files
    assert files <= set(cache.sources(kernel.__name__))


def test_compiles_within_its_resources(tmp_path, monkeypatch):
    monkeypatch.setenv("KERNEL_FUN_CACHE_DIR", str(tmp_path / "kernels"))
    full = config()
    (found,) = inspect.resources(kernel._compile.object(full))
    assert "kda_bwd_grads_sm90" in found.name
    assert found.registers == 168
    assert found.stack_bytes <= 128
    assert full.smem_bytes <= SMEM_BYTES
    (found,) = inspect.resources(reduce._compile.object(reduce.Config("bfloat16", 128, True)))
    assert found.stack_bytes == 0


@pytest.mark.parametrize(
    "field, value",
    [
        ("io", "float32"),
        ("g", "float64"),
        ("beta", "int32"),
        ("K", 96),
        ("gate", "linear"),
        ("beta_mode", "tanh"),
    ],
)
def test_a_config_outside_the_box_names_its_field(field, value):
    with pytest.raises(ValueError, match=f"`{field}` must be one of .*, got {value}"):
        config(**{field: value})
    with pytest.raises(ValueError, match="`A_log` and `dt_bias` must be None"):
        config(gate="log")


def arguments(
    B=1, T=70, H=2, HV=2, K=128, V=64, device="cpu", dtype=torch.bfloat16, **changes: Any
) -> dict[str, Any]:
    NT = B * -(-T // 64)

    def io(*shape):
        return torch.randn(*shape, device=device).to(dtype)

    found: dict[str, Any] = dict(
        q=io(B, T, H, K), k=io(B, T, H, K), v=io(B, T, HV, V), g=io(B, T, HV, K), beta=io(B, T, HV),
        A=io(B, T, HV, 64), q_rstd=torch.ones(B, T, H, device=device), k_rstd=torch.ones(B, T, H, device=device),
        h=io(NT, HV, K, V), v_new=io(B, T, HV, V), dh=io(NT, HV, K, V), dv2=io(B, T, HV, V), do=io(B, T, HV, V),
        A_log=torch.zeros(HV, device=device), dt_bias=torch.zeros(HV * K, device=device), table=None, scale=K**-0.5,
        gate="softplus", lower_bound=None, beta_mode="sigmoid", l2norm=True,
    )  # fmt: skip
    return {**found, **changes}


@pytest.mark.parametrize(
    "changes, error, match",
    [
        (dict(k=torch.zeros(1, 70, 2, 64)), ValueError, "`k` must have shape"),
        (dict(h=torch.zeros(1, 2, 128, 64)), ValueError, "`h` must have shape"),
        (dict(dv2=torch.zeros(1, 70, 2, 64)), TypeError, "`dv2` must be torch.bfloat16"),
        (dict(q_rstd=None), ValueError, "`q_rstd` and `k_rstd` must be given"),
        (dict(l2norm=False), ValueError, "`q_rstd` and `k_rstd` must be given"),
        (dict(table=torch.zeros(2, 4)), TypeError, "`table` must be torch.int32"),
        (dict(A_log=torch.zeros(4)[::2]), ValueError, "`A_log` must be contiguous"),
        (dict(gate="bounded"), ValueError, "`lower_bound` must be a number <= 0"),
        (dict(V=96), ValueError, "`v` must have a multiple of 64 values"),
        (dict(H=3, HV=4), ValueError, "`v` must have a multiple of 3 heads"),
    ],
)
def test_bad_arguments_are_named(changes, error, match):
    sizes = {name: changes.pop(name) for name in ("H", "HV", "V") if name in changes}
    with pytest.raises(error, match=match):
        kernel.bwd_grads(**{**arguments(**sizes), **changes})


# on the device

KINDS = ["softplus", "slow", "hard", "bounded", "-1000", "-inf"]
TOLERANCE = dict(dq=6e-3, dk=6e-3, dv=5e-3, dg=6e-3, dbeta=5e-3, dA_log=12e-3, ddt_bias=8e-3)
"""Relative norm of the error, per output."""
FORMS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "K64": dict(K=64),
    "K64 shared": dict(K=64, HV=4),
    "fp16": dict(dtype=torch.float16),
    "fp32 gate": dict(g=torch.float32),
    "fp32 gate, V256": dict(g=torch.float32, V=256),
    "fp32 beta": dict(beta=torch.float32),
    "beta as it is": dict(beta_mode="raw"),
    "beta to 2": dict(beta_mode="sigmoid2"),
    "not normalised": dict(l2norm=False),
    "not normalised, shared": dict(l2norm=False, HV=4),
}


def sm90(test):
    absent = not torch.cuda.is_available() or devices.of(torch.device("cuda")).arch != "sm90"
    for mark in (pytest.mark.gpu, pytest.mark.sm90, pytest.mark.skipif(absent, reason="needs a Hopper GPU")):
        test = mark(test)
    return test


@pytest.fixture
def poisoned():
    """Whatever is allocated and not written is NaN."""
    with poisoned_empty():
        yield


def problem(
    kind, B, T, H, HV, V, lengths=None, device="cuda", K=128, dtype=torch.bfloat16, g=None, beta=None,
    beta_mode="sigmoid", l2norm=True,
):  # fmt: skip
    """(arguments of bwd_grads, gradients of the eager stage in fp64, tokens inside a sequence).

    The tensors of the stages before are theirs, rounded; what lies outside the sequences is NaN.
    """
    from kernel_fun.kda._kernels.eager.bwd_state import bwd_state
    from kernel_fun.kda._kernels.eager.fwd_intra import fwd_intra
    from kernel_fun.kda._kernels.eager.fwd_state import fwd_state
    from kernel_fun.kda.call import Call
    from kernel_fun.kda.stages import Intra, ReverseScan

    torch.manual_seed(T + V)
    x = arguments(B, T, H, HV, K, V, device, dtype, beta_mode=beta_mode, l2norm=l2norm)
    gate = kind if kind == "bounded" else "log" if kind.startswith("-") else "softplus"
    A_log, bias = torch.randn(HV, device=device), torch.randn(HV * K, device=device)
    if kind == "slow":
        A_log = torch.empty(HV, device=device).uniform_(1, 16).log()
        d = torch.empty(HV * K, device=device).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        bias = d + torch.log(-torch.expm1(-d))
    if kind == "hard":  # decays of 0 and of 1 side by side
        x["g"] = x["g"] * 40
    if gate == "log":
        A_log = bias = None
        dead = torch.rand(x["g"].shape, device=device) < 0.03
        x["g"] = torch.where(dead, float(kind), -x["g"].abs())
    if not l2norm:
        x["q"], x["k"] = x["q"] * K**-0.5, x["k"] * K**-0.5
    if beta_mode == "raw":
        x["beta"] = torch.rand(x["beta"].shape, device=device)
        x["beta"][:, ::7] = 0.0
    x["g"], x["beta"] = x["g"].to(g or dtype), x["beta"].to(beta or dtype)
    cu = None
    if lengths is not None:
        cu = torch.tensor([0, *np.cumsum(lengths)], device=device)
    x.update(gate=gate, lower_bound=-5.0 if gate == "bounded" else None, A_log=A_log, dt_bias=bias)
    wide = {
        n: None if x[n] is None else x[n].double() for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
    }
    call = Call(
        **wide, initial_state=None, cu_seqlens=cu, cu_seqlens_cpu=None if cu is None else cu.cpu(), scale=x["scale"],
        gate=gate, lower_bound=x["lower_bound"], beta_mode=beta_mode, l2norm=l2norm, state_v_first=False,
        output_final_state=True, return_intermediate_states=False, disable_recompute=False, chunk_size=64,
        use_graph=False, max_num_seqs=None, context_parallel=False, unknown=(), verbatim={},
    )  # fmt: skip
    intra = fwd_intra(call)
    scan = fwd_state(call, intra, keep=True)
    back = bwd_state(call, intra, x["do"].double(), 0.1 * torch.randn_like(scan.ht), scan.h, scan.v_new)
    given = dict(A=intra.A, h=scan.h, v_new=scan.v_new, dh=back.dh, dv2=back.dv2)
    x.update({name: y.to(dtype) for name, y in given.items()})
    norms = dict(q_rstd=intra.q_rstd, k_rstd=intra.k_rstd)
    x.update({name: y.float() if l2norm else None for name, y in norms.items()})
    d = {name: None if x[name] is None else x[name].double() for name in (*given, *norms)}
    rounded = Intra(d["A"], intra.Aqk, d["q_rstd"], d["k_rstd"], None)
    reverse = ReverseScan(d["dh"], d["dv2"], None, d["h"], d["v_new"])
    want = eager.bwd_grads(call, rounded, reverse, x["do"].double())
    inside = torch.ones(B * T, dtype=torch.bool, device=device)
    if lengths is not None:
        inside[sum(lengths) :] = False
        x["table"] = chunk_table(cu, T)
        empty = x["table"].shape[0] - x["h"].shape[0]
        for name in ("h", "dh"):
            x[name] = torch.cat([x[name], x[name].new_full((empty, HV, K, V), math.nan)])
        for name in ("q", "k", "v", "g", "beta", "A", "v_new", "dv2", "do"):
            x[name].flatten(0, 1)[~inside] = math.nan
    return x, want, inside


def assert_agrees(found, want, inside):
    for (name, bound), x, y in zip(TOLERANCE.items(), found, want):
        if y is None:
            assert x is None
            continue
        if name.startswith("d") and name not in ("dA_log", "ddt_bias"):
            x, y = x.flatten(0, 1)[inside], y.flatten(0, 1)[inside]
        else:
            x, y = x[: y.shape[0]], y
        assert (x.double() - y).norm() <= bound * y.norm(), name


def assert_repeats(found, x):
    for a, b in zip(found, kernel.bwd_grads(**x), strict=True):
        assert a is None or torch.equal(a, b)


@sm90
@pytest.mark.parametrize("B, T, V", [(1, 1, 64), (1, 15, 64), (20, 65, 64), (2, 1000, 192)])
@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_fp64(kind, B, T, V, poisoned):
    x, want, inside = problem(kind, B, T, 2, 4, V)
    found = kernel.bwd_grads(**x)
    assert_agrees(found, want, inside)
    assert not found[3][:, 0].any(), "no decay precedes a sequence without initial state"
    assert_repeats(found, x)


@sm90
@pytest.mark.parametrize("form", FORMS)
def test_forms_agree_with_fp64(form, poisoned):
    x, want, inside = problem("softplus", **{**dict(B=3, T=200, H=2, HV=2, V=128), **FORMS[form]})
    found = kernel.bwd_grads(**x)
    assert_agrees(found, want, inside)
    assert_repeats(found, x)


@sm90
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [[1, 0, 63, 64, 65, 0, 15, 92], [0, 0, 5], [300]], ids=str)
def test_packed_sequences_agree_with_fp64(kind, lengths, poisoned):
    x, want, inside = problem(kind, 1, sum(lengths) + 9, 2, 2, 128, lengths)
    found = kernel.bwd_grads(**x)
    assert_agrees(found, want, inside)
    for gradient in found[:5]:
        assert not gradient.flatten(0, 1)[~inside].any()
    assert_repeats(found, x)


@sm90
def test_rows_of_no_sequence_are_zero_where_heads_are_shared(poisoned):
    x, want, inside = problem("softplus", 1, 209, 2, 4, 64, [70, 130])
    found = kernel.bwd_grads(**x)
    assert_agrees(found, want, inside)
    for gradient in found[:5]:
        assert not gradient.flatten(0, 1)[~inside].any()
