"""fwd_state on Hopper, without one: its builder on numpy, warp by warp; its compiled form; its launcher's checks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cutlass import BFloat16, Float32

from kernel_fun._cute import inspect, pipe
from kernel_fun._cute.tile import SMEM_BYTES
from kernel_fun.kda._kernels.sm90 import fwd_state as kernel
from kernel_fun.kda._kernels.sm90.fwd_state import BT, SPAN, Config


def config(**changes: Any) -> Config:
    given = dict(
        io="bfloat16", g="bfloat16", beta="bfloat16", K=128, BV=128, gate="softplus", beta_mode="sigmoid",
        l2norm=True, has_h0=True, want_ht=True,
    )  # fmt: skip
    return Config(**{**given, **changes})


# ------------------------------------------------------------------------------ the builder, on numpy


def rounded(x: np.ndarray) -> np.ndarray:
    """fp32 to the bits of the nearest bf16, ties to even."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def value(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def swizzled(x: np.ndarray) -> np.ndarray:
    """A (64, channels) tile as K-major shared memory: blocks of 128 bytes a row, 16-byte units permuted by row."""
    width, unit = 128 // x.itemsize, 16 // x.itemsize
    rows, blocks = np.arange(len(x))[:, None], []
    for first in range(0, x.shape[1], width):
        c = np.arange(width)[None]
        blocks.append(x[rows, first + ((c // unit) ^ (rows % 8)) * unit + c % unit].reshape(-1))
    return np.concatenate(blocks)


def straight(flat: np.ndarray, channels: int) -> np.ndarray:
    """The inverse of :func:`swizzled`; the permutation is its own inverse."""
    width = 128 // flat.itemsize
    blocks = [b.reshape(BT, width) for b in flat[: BT * channels].reshape(-1, BT * width)]
    return np.concatenate([swizzled(b).reshape(BT, width) for b in blocks], 1)


class Tile:
    def __init__(self, tile: Any) -> None:
        self.stage_bytes, self.pitch_bytes = tile.stage_bytes, tile.pitch_bytes

    def words(self, field: np.ndarray, word: Any, slot: int) -> np.ndarray:
        kind = word.word if isinstance(word, Kind) else np.int64
        return field.view(np.uint8)[slot * (self.pitch_bytes or self.stage_bytes) :].view(kind)


class Vectors:
    """Shared (n, m) fp32 with n contiguous; None is a whole mode."""

    def __init__(self, n: int, m: int) -> None:
        self.x = np.full((m, n), np.nan, np.float32)

    def get_tensor(self, layout: Any) -> Any:
        return self

    def __setitem__(self, at: Any, new: Any) -> None:
        self.x[at[1], at[0]] = new

    def __getitem__(self, at: Any) -> Any:
        return self.x[at[1]]


def vector_of(x: np.ndarray, size: int, index: Any) -> list[np.ndarray]:
    lanes = np.arange(32)
    rows = x if x.ndim == 2 else np.broadcast_to(x, (32, len(x)))
    return [rows[lanes, index * size + i] for i in range(size)]


@pytest.fixture
def on_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = dict(
        unpack=lambda w, io: (
            value(w.view(np.uint32) & 0xFFFF),
            value(w.view(np.uint32) >> 16),
        ),
        pack=lambda lo, hi, io: (rounded(lo) | rounded(hi).astype(np.uint32) << 16).view(np.int32),
        halves=lambda w: (w.view(np.float32)[0::2], w.view(np.float32)[1::2]),
        select=np.where,
        vector_of=vector_of,
        Float32=Kind(np.float32, np.float32),
        Int32=Kind(np.int32, int),
        const_expr=lambda x: x,
        cutlass=SimpleNamespace(range_constexpr=range, BFloat16=BFloat16, Float32=Float32),
        cute=SimpleNamespace(make_layout=lambda *a: None),
    )
    for name, fake in fakes.items():
        monkeypatch.setattr(kernel, name, fake)


class Kind:
    """A type of words that also makes constants."""

    def __init__(self, word: Any, constant: Any) -> None:
        self.word, self.constant = word, constant

    def __call__(self, x: Any) -> Any:
        return self.constant(x)


CASES = [
    dict(left=64),
    dict(left=64, g="float32"),
    dict(left=37),
    dict(left=37, index="int32"),
    dict(left=1, index="int64", g="float32"),
    dict(left=48, K=64, index="int32", BV=64),
    dict(left=64, l2norm=False, BV=64),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_operands(case: dict[str, Any], on_numpy: None):
    left = case["left"]
    c = config(**{k: x for k, x in case.items() if k != "left"})
    r = np.random.default_rng(left)
    K, slot, scale, row_slot = c.K, 1, np.float32(0.09), 1

    def normal(*shape: int) -> np.ndarray:
        return r.standard_normal(shape).astype(np.float32)

    q, k = rounded(normal(BT, K)), rounded(normal(BT, K))
    log_decay = -np.abs(normal(BT, K)) * 0.1
    log_decay[r.random((BT, K)) < 0.03] = -1000.0
    log_decay[r.random((BT, K)) < 0.03] = -np.inf
    bias = -np.abs(normal(K)) * 0.01
    if c.wide_g:
        raw = log_decay
    else:
        raw = value(rounded(log_decay))
    beta, q_rstd, k_rstd = r.random(BT).astype(np.float32), normal(BT) ** 2 + 1, normal(BT) ** 2 + 1
    q[left:], k[left:], raw[left:] = 0x7FC0, 0x7FC0, np.nan  # what a packing may hold there

    k_ = kernel.KdaFwdStateSm90(c)
    stages = c.raw_stages
    st = SimpleNamespace(
        q=np.zeros(stages * BT * K, np.uint16),
        k=np.zeros(stages * BT * K, np.uint16),
        g=np.zeros(stages * BT * K * (2 if c.wide_g else 1), np.uint16),
        v=rounded(np.full(2 * BT * c.BV, np.nan, np.float32)),
        A=rounded(np.full(2 * BT * BT, np.nan, np.float32)),
        beta=Vectors(BT, stages),
        rstd=Vectors(2 * SPAN, c.build.warps),
    )
    at = slice(slot * BT * K, (slot + 1) * BT * K)
    st.q[at], st.k[at] = swizzled(q), swizzled(k)
    if c.wide_g:
        st.g.view(np.float32)[at] = swizzled(raw)
    else:
        st.g[at] = swizzled(rounded(raw))
    for name in "QGERAV":
        setattr(k_, name, Tile(getattr(k_, name)))
    waited: list[Any] = []
    ring = SimpleNamespace(wait_full=waited.append)
    at_row = SimpleNamespace(index=row_slot)
    warps = range(c.build.warps)
    threads = [np.arange(32) + 32 * w for w in warps]
    held = [np.zeros((SPAN, 2, 32), np.float32) for _ in warps]
    past_end = kernel.KdaFwdStateSm90.past_end
    past_end = getattr(past_end, "__wrapped__", past_end)
    with np.errstate(invalid="ignore"):
        for w in warps:
            pair = 64 * (w // 4) + 2 * np.arange(32)
            gate = SimpleNamespace(decay=np.exp)
            k_.decays(st, threads[w], slot, held[w], [bias[pair], bias[pair + 1]], gate)
        for w in warps:
            if left < BT:
                past_end(k_, st, threads[w], slot, ring, at_row, held[w], w // 4, w % 4, left)
        for w in warps:
            rows = np.minimum(w % 4 * SPAN + np.arange(32) % SPAN, left - 1)
            lanes = np.where(np.arange(32) < SPAN, q_rstd[rows], k_rstd[rows])
            k_.share(st, threads[w], slot, held[w], lanes, beta[rows], scale, left)
        around = [k_.around(st, threads[w], slot, held[w], w % 4) for w in warps]
        for w in warps:
            k_.sweep(st, threads[w], slot, held[w], *around[w], scale)

    valid = (np.arange(BT) < left)[:, None]
    a = np.where(valid, np.exp(raw.astype(np.float64) + bias), 1.0)
    E = np.cumprod(a, 0)
    R = np.concatenate((np.cumprod(a[::-1], 0)[::-1][1:], np.ones((1, K))))
    fq, fk = (q_rstd, k_rstd) if c.l2norm else (np.ones(BT), np.ones(BT))
    qn, kn = (np.where(valid, value(x) * f[:, None].astype(np.float64), 0.0) for x, f in ((q, fq), (k, fk)))
    b = np.where(valid[:, 0], beta, 0.0)
    E_at = slice(slot * (2 if c.wide_g else 1) * BT * K, None)
    for name, got, expected in (
        ("qE", st.q[at], scale * qn * E),
        ("kE", st.g[E_at], -b[:, None] * kn * E),
        ("kR", st.k[at], kn * R),
    ):
        got = value(straight(got, K)).astype(np.float64)
        assert np.isfinite(got).all(), name
        assert np.abs(got - expected).max() <= 2.0**-8 * np.abs(expected).max(), name
        assert np.linalg.norm(got - expected) <= 2e-3 * np.linalg.norm(expected), name
    assert np.array_equal(st.beta.x[slot], b.astype(np.float32))
    assert np.isnan(np.delete(st.beta.x, slot, 0)).all()
    assert not st.q[: at.start].any(), "other slots are left alone"
    assert not st.k[at.stop :].any(), "other slots are left alone"
    # v and A: rows past the end of a packing are zero, nothing else is touched
    v = value(st.v).reshape(2, c.BV // 64, BT, 64)
    A = value(st.A).reshape(2, BT, BT)
    cleared = left if c.is_packed and left < BT else BT
    assert bool(waited) == (cleared < BT)
    for tile in (*v[row_slot], A[row_slot]):
        assert (tile[cleared:] == 0).all()
        assert np.isnan(tile[:cleared]).all()
    assert np.isnan(v[1 - row_slot]).all()
    assert np.isnan(A[1 - row_slot]).all()


# ------------------------------------------------------------------------------ what is compiled


BOX = [
    config(io=io, g=g, beta=io, K=K, BV=BV, want_h=keep, want_v_new=keep, l2norm=l2norm, index=index)
    for io in ("bfloat16", "float16")
    for g in (io, "float32")
    for K in (64, 128)
    for BV in (64, 128)
    for keep in (False, True)
    if not (keep and g == "float32" and BV == 128 and K == 128)
    for l2norm in (False, True)
    for index in ("", "int64")
]


@pytest.mark.parametrize("c", BOX[::7], ids=lambda c: f"{c.io}-{c.g}-{c.K}-{c.BV}-{c.want_h}-{c.index}")
def test_every_config_fits(c: Config):
    assert c.smem_bytes <= SMEM_BYTES
    assert pipe.register_budget(c.threads, (c.build, c.state)) >= 0


def test_all_of_the_box_fits():
    assert max(c.smem_bytes for c in BOX) <= SMEM_BYTES


COMPILED = [
    config(),
    config(g="float32", gate="log", has_A_log=False, has_dt_bias=False, index="int32"),
    config(
        K=64,
        BV=64,
        io="float16",
        g="float16",
        beta="float16",
        gate="bounded",
        want_h=True,
        want_v_new=True,
        state_v_first=True,
    ),
]


@pytest.mark.parametrize("c", COMPILED, ids=lambda c: f"{c.io}-{c.g}-{c.K}-{c.BV}-{c.gate}-{c.index}")
def test_compiled_without_spills(c: Config):
    (found,) = inspect.resources(kernel._compile.object(c))
    assert "kda_fwd_state_sm90" in found.name
    assert found.stack_bytes == 0
    assert found.registers <= pipe.registers_at_entry(c.threads)


# ------------------------------------------------------------------------------ the launcher


def tensors(B: int = 1, T: int = 65, H: int = 1, HV: int = 2, K: int = 64, V: int = 64) -> dict[str, Any]:
    io = torch.bfloat16

    def new(*shape: int, dtype: torch.dtype = io) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    return dict(
        q=new(B, T, H, K), k=new(B, T, H, K), v=new(B, T, HV, V), g=new(B, T, HV, K), beta=new(B, T, HV),
        A=new(B, T, HV, BT), Aqk=new(B, T, HV, BT), q_rstd=new(B, T, H, dtype=torch.float32),
        k_rstd=new(B, T, H, dtype=torch.float32), total=new(B * -(-T // BT), HV, K, dtype=torch.float32), h0=None,
        A_log=new(HV, dtype=torch.float32), dt_bias=new(HV, K, dtype=torch.float32), table=None,
    )  # fmt: skip


FLAGS = dict(
    scale=0.1, gate="softplus", lower_bound=None, beta_mode="sigmoid", l2norm=True, state_v_first=False,
    want_ht=True, want_h=False, want_v_new=False,
)  # fmt: skip


BAD = [
    (
        dict(q=torch.zeros(1, 64, 1, 64, dtype=torch.bfloat16)),
        ValueError,
        r"`q` must have shape \[1, 65, 1, 64\]",
    ),
    (dict(k=torch.zeros(1, 65, 1, 64)), TypeError, "`k` must have dtype torch.bfloat16, got torch.float32"),
    (dict(g=torch.zeros(1, 65, 2, 64, dtype=torch.float16)), TypeError, "`g` must have dtype"),
    (dict(v=torch.zeros(1, 65, 2, 64)), TypeError, "`v` must have dtype|must have dtype"),
    (dict(total=torch.zeros(1, 2, 64)), ValueError, r"`total` must have shape \[2, 2, 64\]"),
    (dict(h0=torch.zeros(1, 2, 32, 64)), ValueError, "`h0` must have shape"),
    (dict(q_rstd=None), ValueError, "`q_rstd` and `k_rstd` must be given"),
    (dict(A_log=torch.zeros(3)), ValueError, "`A_log` must have shape"),
    (
        dict(q=torch.zeros(1, 65, 64, 1, dtype=torch.bfloat16).mT),
        ValueError,
        "`q` must be contiguous in its last",
    ),
    (
        dict(beta=torch.zeros(1, 2, 65, dtype=torch.bfloat16).mT),
        ValueError,
        "`beta` must be contiguous",
    ),
]


@pytest.mark.parametrize(
    "change, error, message", BAD, ids=lambda x: next(iter(x)) if isinstance(x, dict) else None
)
def test_bad_tensors_are_refused(change: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        kernel.fwd_state(**{**tensors(), **change}, **FLAGS)


def test_bad_flags_are_refused():
    with pytest.raises(ValueError, match="`lower_bound` must be given"):
        kernel.fwd_state(**tensors(), **{**FLAGS, "gate": "bounded"})
    with pytest.raises(ValueError, match="multiple of 64, got K=64, V=32"):
        kernel.fwd_state(**tensors(V=32), **FLAGS)
    with pytest.raises(ValueError, match="`gate` must be one of"):
        config(gate="relu")
    with pytest.raises(ValueError, match="shared memory"):
        config(g="float32", want_h=True)


@pytest.mark.parametrize("v_first", [False, True])
def test_no_tokens(v_first: bool):
    h0 = torch.randn(1, 2, 64, 64)
    flags = {**FLAGS, "state_v_first": v_first}
    o, ht, h, v_new = kernel.fwd_state(**{**tensors(T=0), "h0": h0}, **flags)
    assert o.shape == (1, 0, 2, 64)
    assert ht is not None
    assert torch.equal(ht, h0)
    assert h is v_new is None
    _, ht, _, _ = kernel.fwd_state(**tensors(T=0), **flags)
    assert ht is not None
    assert not ht.any()


def test_v_tile_depends_on_counts_alone():
    assert kernel.v_tile(256, 256, wide=False) == 128
    assert kernel.v_tile(256, 256, wide=True) == 64
    assert kernel.v_tile(256, 192, wide=False) == 64
    assert kernel.v_tile(32, 128, wide=False) == 64
    assert kernel.v_tile(100, 128, wide=False) == 128
