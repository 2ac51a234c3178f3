"""Scores as quotients of decays: the kernel's own code on modelled warps, against their definition in fp64."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass")

import torch
import warp_model
from cutlass import BFloat16, cute

from kernel_fun._cute import decay, inspect, tile, trisolve, warp
from kernel_fun.kda._kernels.sm90 import fwd_intra as kernel
from kernel_fun.kda._kernels.sm90 import fwd_intra_quotients as quotients
from kernel_fun.kda._kernels.sm90 import fwd_intra_scores as scores
from kernel_fun.kda._kernels.sm90.fwd_intra_config import BT, FAR, Config

K = 128
TILE = 2 * BT * K
AT = dict(q=0, k=TILE, g=2 * TILE, L=3 * TILE, Aqk=5 * TILE, scales=6 * TILE)
AT |= dict(D=AT["scales"] + 4096, between=AT["scales"] + 8192, beta=AT["scales"] + 12288)
AT |= dict(parameters=AT["beta"] + 256)
CONFIG = Config(
    io="bfloat16",
    g="bfloat16",
    beta="float32",
    K=K,
    gate="bounded",
    beta_mode="raw",
    l2norm=True,
    has_A_log=True,
    has_dt_bias=True,
    packed=False,
    quotients=True,
)
BOUND = -5.0
SCALE = K**-0.5


class Warp(quotients.Quotients):
    """One warp; what has a branch is said again."""

    def __init__(self, machine: warp_model.Machine, index: int) -> None:
        self.c, self.io, self.machine = CONFIG, BFloat16, machine
        self.g_tile = tile.Tile(BFloat16, BT, 64, 2)
        self.warp, self.lane = np.int64(index), warp_model.LANE
        self.r, self.t = warp_model.ROW, warp_model.COLUMN
        self.at = np.int64(AT["q"])
        for name, field, kind, n in (
            ("L", "L", np.float32, trisolve.SIZE * trisolve.PITCH),
            ("D", "D", np.float32, CONFIG.blocks * K),
            ("scales", "scales", np.float32, CONFIG.scales),
            ("beta", "beta", np.float32, BT),
            ("parameters", "parameters", np.float32, K + 1),
            ("between", "between", np.uint32, CONFIG.between_words),
            ("Aqk_words", "Aqk", np.uint32, BT * BT // 2),
        ):
            setattr(self, name, warp_model.View(machine, AT[field], kind, n))

    def put_sums(self, acc: Any) -> None:
        own = (self.r >> 1) == self.t
        at = int(self.half()) * 3 * BT + quotients.BLOCK * int(self.block()) + self.r[own]
        for n in range(3):
            for half in range(2):
                self.scales.x[at + n * BT + 8 * half] = acc[3 * half + n][own]

    def put_diagonal(self, row: Any, x: Any) -> None:
        halves = self.machine.halves(AT["Aqk"], BT * BT)
        halves[2 * self.Aqk_word(row, row) + (row & 1)] = warp_model.bf16_bits(x)

    def far(self) -> None:
        """The blocks of one warp."""
        top, left = self.blocks_of_warp()
        acc = warp_model.Registers(16)
        a_at, b_at = self.rows_of(top), self.columns_of(left)
        f_at = AT["between"] + self.warp * (4 * CONFIG.between_words // FAR) + 16 * self.t
        for p in range(2):
            for j in range(2):
                a, b = self.block_operands(a_at, b_at, p, j)
                self.multiply(acc, a, b, self.block_decays(f_at, p, j))
        for n in range(4):
            i, j = 8 * (top + (n >> 1)) + self.r, 8 * (left + (n & 1)) + 2 * self.t
            columns = self.column_scales(j)
            self.put_q(i, j, acc[4 * n], acc[4 * n + 1], self.far_row(0, i), columns)
            self.put_k(i, j, acc[4 * n + 2], acc[4 * n + 3], self.far_row(1, i), columns, far=True)

    def all_decays_between(self) -> None:
        """Of 32 pairs of channels."""
        pair = 32 * self.warp + self.lane
        D = [warp.load2(AT["D"] + 8 * pair + 4 * K * b) for b in range(quotients.BLOCKS)]
        word = (pair & ~15) + 4 * (pair & 3) + ((pair >> 2) & 3)
        for I in range(1, quotients.BLOCKS):
            self.put_decays(word, D, I)


def run(monkeypatch: pytest.MonkeyPatch, x: dict[str, np.ndarray], valid: int) -> tuple[np.ndarray, ...]:
    """(Aqk, L, decays of blocks) as the kernel makes them of one item."""
    machine = warp_model.Machine()
    warp_model.install(monkeypatch, machine, warp, decay, scores, quotients, trisolve)
    monkeypatch.setattr(cute, "make_rmem_tensor", warp_model.Registers)
    monkeypatch.setattr(cute.math, "rsqrt", lambda y: np.float32(1) / np.sqrt(y))
    machine.smem[:] = 0xFF  # NaN
    for name in ("q", "k", "g"):
        machine.put_tile(AT[name], x[name])
    machine.floats(AT["beta"], BT)[:] = x["beta"]
    machine.floats(AT["parameters"], K)[:] = x["bias"]
    gate = decay.Gate.of_head("bounded", np.float32(x["A_log"]), np.float32(BOUND))
    warps = [Warp(machine, w) for w in range(8)]
    for w in warps:
        w.scores(gate, np.float32(SCALE), np.int64(valid))
    for w in warps[:4]:
        w.near(np.float32(SCALE), np.int64(valid))
    for w in warps[:2]:
        w.all_decays_between()
    for w in warps[:FAR]:
        w.far()
    Aqk = np.stack(
        [
            np.concatenate([machine.halves(AT["Aqk"] + i * 128 + ((u ^ (i % 8)) << 4), 8) for u in range(8)])
            for i in range(BT)
        ]
    )
    L = machine.floats(AT["L"], trisolve.SIZE * trisolve.PITCH).reshape(BT, trisolve.PITCH)
    D = machine.floats(AT["D"], quotients.BLOCKS * K).reshape(-1, K)
    return warp_model.bf16_values(Aqk), L[:, trisolve.place(np.arange(BT))], D


def drawn(kind: str, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    g = rng.standard_normal((BT, K))
    token = np.arange(BT)[:, None] + np.zeros((1, K), int)
    fast, slow = 60.0, -60.0  # decays of e^-5 and of 1
    if kind == "fast":
        g = g + fast
    elif kind == "slow":
        g = g + slow
    elif kind == "either":
        g = np.where(rng.random((BT, K)) < 0.5, fast, slow)
    elif kind == "blocks":
        g = np.where(token // 16 % 2 == 0, fast, slow)
    elif kind == "late":  # a block at the bound, then 8 tokens of e^-2.5 each
        g = np.where(token // 16 % 2 == 0, fast, np.where(token % 16 < 8, 0.0, slow))
    elif kind == "spikes":
        g = np.where(rng.random((BT, K)) < 0.03, fast, slow)
    draw = lambda *size: warp_model.rounded(rng.standard_normal(size))  # noqa: E731
    plain = kind == "random"
    return dict(
        q=draw(BT, K),
        k=draw(BT, K),
        g=warp_model.rounded(g),
        beta=rng.random(BT).astype(np.float32) * 2,
        bias=(rng.standard_normal(K) if plain else np.zeros(K)).astype(np.float32),
        A_log=np.float32(0.3 if plain else 0.0),
    )


def truth(x: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    y = {n: t.astype(np.float64) for n, t in x.items()}
    log_a = BOUND / (1 + np.exp(-np.exp(y["A_log"]) * (y["g"] + y["bias"])))
    q, k = (y[n] / np.sqrt((y[n] ** 2).sum(1, keepdims=True) + 1e-6) for n in ("q", "k"))
    c = log_a.cumsum(0)
    E = np.exp(np.minimum(c[:, None] - c[None], 0.0))
    Aqk, Akk = (np.einsum("ic,jc,ijc->ij", z, k, E) for z in (q, k))
    return (
        np.tril(SCALE * Aqk),
        np.tril(y["beta"][:, None] * Akk, -1),
        np.exp(log_a.reshape(-1, 16, K).sum(1)),
    )


KINDS = ["random", "fast", "slow", "either", "blocks", "late", "spikes"]


@pytest.mark.parametrize("kind", KINDS)
def test_scores_agree_with_fp64(monkeypatch: pytest.MonkeyPatch, kind: str):
    """Also below the diagonal alone, where nothing exact makes up for it."""
    x = drawn(kind)
    Aqk, L, D = run(monkeypatch, x, BT)
    want_Aqk, want_L, want_D = truth(x)
    assert np.array_equal(Aqk[:16, 16:32], np.full((16, 16), np.nan), equal_nan=True)  # left to who stores
    below = np.tril(np.ones((BT, BT), bool), -1)
    for found, want in ((Aqk, want_Aqk), (L, want_L)):
        error = np.linalg.norm((found - want)[below]) / np.linalg.norm(want[below])
        assert error < 5e-3
    assert np.allclose(np.diag(Aqk), np.diag(want_Aqk), rtol=2.0**-8, atol=1e-6)
    for block in range(4):
        own = slice(16 * block, 16 * block + 16)
        assert (np.triu(Aqk[own, own], 1) == 0).all()
    assert np.allclose(D, want_D, rtol=1e-4, atol=0)


@pytest.mark.parametrize("token", [3, 21, 40])
def test_rows_do_not_depend_on_later_tokens(monkeypatch: pytest.MonkeyPatch, token: int):
    """To the bit, and not on NaN either."""
    x = drawn("random")
    before = run(monkeypatch, x, BT)
    for value in (7.0, np.nan):
        y = {n: t.copy() for n, t in x.items()}
        for name in ("q", "k", "g"):
            y[name][token:] = value
        after = run(monkeypatch, y, BT)
        for a, b, first in zip(before, after, (0, -1), strict=False):
            rows = np.tril(np.ones((BT, BT), bool), first)[:token]
            assert np.array_equal(a[:token][rows], b[:token][rows])


@pytest.mark.parametrize("valid", [1, 17, 50])
def test_rows_past_the_last_token_are_zeros(monkeypatch: pytest.MonkeyPatch, valid: int):
    x = drawn("random")
    for name, value in (("q", 0.0), ("k", 0.0), ("g", -np.inf)):  # what `blank` writes
        x[name][valid:] = value
    Aqk, L, D = run(monkeypatch, x, valid)
    want_Aqk, want_L, _ = truth({**x, "g": np.maximum(x["g"], -100.0)})
    for found, want, first in ((Aqk, want_Aqk, 0), (L, want_L, -1)):
        rows = np.tril(np.ones((BT, BT), bool), first)
        assert (abs(found[valid:][rows[valid:]]) < 1e-38).all()  # 0, and 0 as a rounded tf32 word
        assert np.allclose(found[rows], want[rows], atol=3e-3)
    assert (D[-(-valid // 16) :] == 1).all()


SHIPPED = [
    dataclasses.replace(CONFIG, beta="bfloat16", beta_mode="sigmoid"),
    dataclasses.replace(CONFIG, beta="bfloat16", beta_mode="sigmoid", overlapped=True),
    dataclasses.replace(CONFIG, g="float16", l2norm=False, has_A_log=False, has_dt_bias=False, packed=True),
]


@pytest.mark.parametrize("config", SHIPPED, ids=lambda c: f"{c.g}-{c.beta_mode}-{c.overlapped}")
def test_compiles_within_its_resources(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, config: Config):
    monkeypatch.setenv("KERNEL_FUN_CACHE_DIR", str(tmp_path))
    want = config.resources()
    (found,) = inspect.resources(kernel._compile.object(config))
    assert found.registers <= want.registers
    assert found.stack_bytes == 0
    assert want.smem_bytes <= tile.SMEM_BYTES
    assert want.ctas_per_sm * config.teams == 2


@pytest.mark.parametrize(
    "changes", [dict(gate="softplus"), dict(io="float16"), dict(g="float32"), dict(K=64)], ids=str
)
def test_what_has_no_quotients_is_refused(changes: dict[str, Any]):
    with pytest.raises(ValueError, match="`quotients` must be False but for"):
        dataclasses.replace(CONFIG, **changes)


@pytest.mark.parametrize(
    "changes, expected",
    [
        (dict(), True),
        (dict(lower_bound=-0.1), True),
        (dict(lower_bound=-5.01), False),
        (dict(gate="softplus", lower_bound=None), False),
        (dict(g=torch.float32), False),
        (dict(io=torch.float16), False),
        (dict(K=64), False),
    ],
    ids=str,
)
def test_quotients_are_for_bounds_they_can_bear(changes: dict[str, Any], expected: bool):
    x = dict(io=torch.bfloat16, g=torch.bfloat16, K=K, gate="bounded", lower_bound=-5.0) | changes
    q, g = (torch.zeros(1, 70, 2, x["K"], dtype=x[n]) for n in ("io", "g"))
    facts = kernel.facts_of(q, q, g, g[..., 0].contiguous(), None, None, None)
    plan = kernel.prepare(
        facts, torch.device("cpu"), scale=1.0, gate=x["gate"], lower_bound=x["lower_bound"],
        beta_mode="raw", l2norm=True,
    )  # fmt: skip
    assert plan.config.quotients == expected
