"""fwd_intra for Hopper: what it refuses, what it compiles to, and, on the device, what it computes."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from chunk_decays import around

pytest.importorskip("cutlass")

from kernel_fun._common import device as devices
from kernel_fun._cute import inspect, tile
from kernel_fun._cute.varlen import chunk_table
from kernel_fun.kda._kernels.sm90 import fwd_intra as module
from kernel_fun.kda._kernels.sm90 import fwd_intra_scores as scores
from kernel_fun.kda._kernels.sm90.fwd_intra import Config, fwd_intra
from kernel_fun.kda._kernels.sm90.fwd_intra_config import SM_REGISTERS

FULL = Config(
    io="bfloat16",
    g="bfloat16",
    beta="bfloat16",
    K=128,
    gate="softplus",
    beta_mode="sigmoid",
    l2norm=True,
    has_A_log=True,
    has_dt_bias=True,
    packed=False,
)
SHIPPED = [
    FULL,
    dataclasses.replace(FULL, gate="bounded"),
    dataclasses.replace(FULL, io="float16", g="float16", K=64, gate="bounded", packed=True),
    dataclasses.replace(FULL, g="float32", beta="float32", packed=True),
    dataclasses.replace(
        FULL, g="float32", beta="float32", gate="log", l2norm=False, has_A_log=False, has_dt_bias=False
    ),
]


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERNEL_FUN_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        yield


@pytest.mark.parametrize("config", SHIPPED, ids=lambda c: f"{c.io}-{c.g}-{c.K}-{c.gate}")
def test_compiles_within_its_resources(config: Config):
    want = config.resources()
    (kernel,) = inspect.resources(module._compile.object(config))
    assert "kda_fwd_intra_sm90" in kernel.name
    assert kernel.registers <= want.registers
    assert kernel.stack_bytes == 0
    assert want.smem_bytes <= tile.SMEM_BYTES
    assert want.ctas_per_sm == 2
    assert want.ctas_per_sm * want.threads * want.registers <= SM_REGISTERS


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
def test_a_config_outside_the_box_names_its_field(field: str, value: Any):
    with pytest.raises(ValueError, match=f"`{field}` must be one of .*, got {value}"):
        dataclasses.replace(FULL, **{field: value})


def test_the_log_gate_has_no_parameters():
    with pytest.raises(ValueError, match="`A_log` and `dt_bias` must be None"):
        dataclasses.replace(FULL, gate="log")


def arguments(B=1, T=70, H=2, HV=2, K=128, device="cpu", **changes: Any) -> dict[str, Any]:
    bf16 = torch.bfloat16
    found: dict[str, Any] = dict(
        q=torch.randn(B, T, H, K, device=device).to(bf16),
        k=torch.randn(B, T, H, K, device=device).to(bf16),
        g=torch.randn(B, T, HV, K, device=device).to(bf16),
        beta=torch.randn(B, T, HV, device=device).to(bf16),
        A_log=torch.randn(HV, device=device),
        dt_bias=torch.randn(HV * K, device=device),
        table=None,
        scale=K**-0.5,
        gate="softplus",
        lower_bound=None,
        beta_mode="sigmoid",
        l2norm=True,
    )
    return {**found, **changes}


@pytest.mark.parametrize(
    "changes, error, match",
    [
        (dict(k=torch.zeros(1, 70, 2, 64)), ValueError, "`k` must have shape"),
        (dict(g=torch.zeros(1, 69, 2, 128)), ValueError, "`g` must have shape"),
        (dict(beta=torch.zeros(1, 70, 2, 1)), ValueError, "`beta` must have shape"),
        (dict(A_log=torch.zeros(3)), ValueError, r"`A_log` must be contiguous float32 \[2\]"),
        (dict(dt_bias=torch.zeros(256).double()), ValueError, "`dt_bias` must be contiguous float32"),
        (dict(k=torch.zeros(1, 70, 2, 128, dtype=torch.float16)), TypeError, "`k` must have the dtype of q"),
        (dict(table=torch.zeros(2, 4)), ValueError, "`table` must be contiguous int32"),
        (dict(gate="bounded"), ValueError, "`lower_bound` must be a number <= 0"),
        (dict(gate="bounded", lower_bound=1.0), ValueError, "`lower_bound` must be a number <= 0"),
        (dict(gate="log"), ValueError, "`A_log` and `dt_bias` must be None"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, Any], error: type[Exception], match: str):
    with pytest.raises(error, match=match):
        fwd_intra(**arguments(**changes))


def test_heads_and_batch_are_checked():
    with pytest.raises(ValueError, match="`g` must have a multiple of 2 heads, got 3"):
        fwd_intra(**arguments(HV=3))
    with pytest.raises(ValueError, match="`q` must have B = 1 with a chunk table"):
        fwd_intra(**arguments(B=2, table=torch.zeros(3, 4, dtype=torch.int32)))


class Recorder:
    """Stands where the compiled kernel would be."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> None:
        self.calls.append(arguments)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    monkeypatch.setattr(module, "_compile", lambda config: found)
    return found


def test_strided_views_of_one_projection_are_not_copied(recorder: Recorder):
    qkg = torch.randn(2, 70, 4, 3 * 128).to(torch.bfloat16)
    q, k, g = qkg.split(128, -1)
    A_log, bias = torch.randn(4), torch.randn(512)
    fwd_intra(**arguments(B=2, H=4, HV=4, A_log=A_log, dt_bias=bias) | dict(q=q, k=k, g=g))
    for given, x in zip((q, k, g), recorder.calls[0]):
        assert x.shape == (1, 140, 4, 128)
        assert x.data_ptr() == given.data_ptr()


def test_one_row_of_a_batch_is_read_and_written_as_it_is(recorder: Recorder):
    x = arguments()
    A, Aqk, q_rstd, k_rstd, _ = fwd_intra(**x)
    (given,) = recorder.calls
    own = x["q"], x["k"], x["g"], x["beta"], A, Aqk, q_rstd, k_rstd
    assert all(a is b for a, b in zip((*given[:4], *given[7:11]), own))


@pytest.mark.parametrize("name", ["offset", "transposed", "gap"])
def test_what_tma_cannot_address_is_copied(recorder: Recorder, name: str):
    x = torch.randn(2, 70, 2, 130).to(torch.bfloat16)
    q = {
        "offset": x[..., 1:129],
        "transposed": torch.randn(2, 70, 128, 2).to(torch.bfloat16).transpose(2, 3),
        "gap": torch.randn(2, 71, 2, 128).to(torch.bfloat16)[:, :70],
    }[name]
    fwd_intra(**arguments(B=2) | dict(q=q))
    (given,) = (c[0] for c in recorder.calls)
    assert torch.equal(given.view(2, 70, 2, 128), q)
    assert given.stride()[1:] == (256, 128, 1)


def test_sizes_one_get_strides_tma_accepts(recorder: Recorder):
    q = torch.randn(1, 1, 1, 128).to(torch.bfloat16).as_strided((1, 1, 1, 128), (1, 3, 5, 1))
    fwd_intra(**arguments(T=1, H=1) | dict(q=q))
    assert recorder.calls[0][0].stride()[1:] == (128, 128, 1)


def test_outputs_of_nothing(recorder: Recorder):
    A, Aqk, q_rstd, _, total = fwd_intra(**arguments(T=0))
    assert A.shape == Aqk.shape == (1, 0, 2, 64)
    assert q_rstd is not None
    assert q_rstd.shape == (1, 0, 2)
    assert total.shape == (0, 2, 9 * 128)
    assert not recorder.calls


def test_without_l2norm_there_are_no_norms(recorder: Recorder):
    _, _, q_rstd, k_rstd, total = fwd_intra(**arguments(B=2, l2norm=False))
    assert q_rstd is None
    assert k_rstd is None
    assert total.shape == (4, 2, 9 * 128)


# on the device


@pytest.mark.parametrize("bound", [-5.0, -1e-30, 0.0])
@pytest.mark.parametrize("A_log", [-100.0, -1.0, 0.0, 2.77, 20.0, 100.0])
@pytest.mark.parametrize("bias", [None, -7.3, 0.0, 1e-3, 11.0])
def test_bounded_decays(monkeypatch: pytest.MonkeyPatch, bound: float, A_log: float, bias: float | None):
    """On numpy, as it is traced: the decay of a raw gate whose bias is off by no more than fp32 rounds it by."""
    f32 = np.float32

    def exp2(x: Any) -> Any:
        y = np.exp2(f32(x))
        return np.where(y < f32(2.0**-126), f32(0), y)

    arch = SimpleNamespace(rcp_approx=lambda x: f32(1) / x)
    for name, stand_in in dict(
        exp2=exp2,
        cut=lambda x, limit: np.clip(x, f32(-limit), f32(limit)),
        cute=SimpleNamespace(arch=arch),
        cutlass=SimpleNamespace(min=np.minimum),
        Float32=f32,
    ).items():
        monkeypatch.setattr(scores, name, stand_in)
    x = np.concatenate([np.linspace(-120, 120, 4001), -np.logspace(-6, 2, 200)]).astype(f32)
    rate = f32(min(math.exp(A_log) * math.log2(math.e), 2.0**126))
    gate = SimpleNamespace(kind="bounded", rate=-rate, bound=f32(bound * math.log2(math.e)))
    with np.errstate(all="ignore"):
        decay = scores.decays_of(gate, None if bias is None else [f32(bias)] * 2)[1]
        a = np.asarray(decay(x), np.float64)
        assert decay(f32(-np.inf)) == 1.0
        assert np.isnan(decay(f32(np.nan)))  # pyright: ignore[reportCallIssue]
        off = (abs(f32(bias or 0.0)) + np.abs(x)).astype(np.float64) * 2.0**-22
        total = x.astype(np.float64) + float(f32(bias or 0.0))
        high, low = (np.exp(bound / (1 + np.exp(-math.exp(A_log) * z))) for z in (total - off, total + off))
    assert (a <= high * (1 + 1e-6)).all()
    assert (a >= low * (1 - 1e-6)).all()


def truth(x: dict[str, Any], sequences: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    """The stage in float64 from its definition: pairwise decays as running products, rows outside sequences NaN."""
    q, k, g, beta = (x[n].flatten(0, 1).double() for n in ("q", "k", "g", "beta"))
    H, HV, K = q.shape[1], g.shape[1], q.shape[2]
    q_rstd, k_rstd = (
        torch.rsqrt(t.square().sum(-1) + 1e-6) if x["l2norm"] else torch.ones_like(t[..., 0]) for t in (q, k)
    )
    q, k = ((t * r[..., None]).repeat_interleave(HV // H, 1) for t, r in ((q, q_rstd), (k, k_rstd)))
    if x["gate"] != "log":
        raw = g + (0.0 if x["dt_bias"] is None else x["dt_bias"].double().view(HV, K))
        rate = 1.0 if x["A_log"] is None else x["A_log"].double().exp()[:, None]
        if x["gate"] == "softplus":
            g = -rate * torch.nn.functional.softplus(raw, threshold=1e9)
        else:
            g = x["lower_bound"] * torch.sigmoid(rate * raw)
    a = g.exp()
    if x["beta_mode"] != "raw":
        beta = torch.sigmoid(beta) * (2 if x["beta_mode"] == "sigmoid2" else 1)
    A = torch.full((q.shape[0], HV, 64), math.nan, dtype=torch.float64, device=q.device)
    Aqk, total = A.clone(), []
    for start, length in sequences:
        for c in range(start, start + length, 64):
            n = min(64, start + length - c)
            rows = slice(c, c + n)
            Q, K_, d = (t[rows].transpose(0, 1) for t in (q, k, a))
            run = torch.zeros_like(d)
            S = torch.zeros(2, HV, n, 64, dtype=torch.float64, device=q.device)
            for i in range(n):
                run[:, :i] *= d[:, i : i + 1]
                run[:, i] = 1
                S[0, :, i, : i + 1] = (K_[:, : i + 1] * run[:, : i + 1] * Q[:, i : i + 1]).sum(-1)
                S[1, :, i, :i] = (K_[:, :i] * run[:, :i] * K_[:, i : i + 1]).sum(-1)
            eye = torch.eye(n, dtype=torch.float64, device=q.device)
            L = beta[rows].t()[..., None] * S[1, :, :, :n]
            A[rows] = 0
            A[rows, :, :n] = torch.linalg.inv(eye + L).transpose(0, 1)
            Aqk[rows] = x["scale"] * S[0].transpose(0, 1)
            total.append(around(torch.nn.functional.pad(d, (0, 0, 0, 64 - n), value=1.0)))
    return dict(A=A, Aqk=Aqk, q_rstd=q_rstd, k_rstd=k_rstd, total=torch.stack(total))


def spiked(value: float, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    g = torch.nn.functional.logsigmoid(torch.randn(shape, device="cuda"))
    hit = (torch.rand(shape, device="cuda") < 0.03) | (torch.rand(*shape[:-1], 1, device="cuda") < 0.03)
    return torch.where(hit, value, g).to(dtype)


def case(kind: str, T: int, **changes: Any) -> dict[str, Any]:
    x = arguments(T=T, device="cuda", **changes)
    HV, K = x["g"].shape[2:]
    if kind == "slow":
        x["A_log"] = torch.empty(HV, device="cuda").uniform_(1, 16).log()
        dt = torch.empty(HV * K, device="cuda").uniform_(math.log(1e-3), math.log(1e-1)).exp()
        x["dt_bias"] = dt + torch.log(-torch.expm1(-dt))
    elif kind == "bounded":
        x |= dict(gate="bounded", lower_bound=-5.0, beta_mode="sigmoid2")
    elif kind.startswith("-"):
        g = spiked(float(kind), changes.get("g_dtype", torch.float32), tuple(x["g"].shape))
        x |= dict(gate="log", g=g, A_log=None, dt_bias=None)
    return x


def check(x: dict[str, Any], sequences: list[tuple[int, int]]) -> None:
    from kernel_fun.testing import poisoned_empty

    with poisoned_empty():
        found = dict(zip(("A", "Aqk", "q_rstd", "k_rstd", "total"), fwd_intra(**x)))
        again = fwd_intra(**x)
    want = truth(x, sequences)
    inside = torch.zeros(x["q"].shape[0] * x["q"].shape[1], dtype=torch.bool, device="cuda")
    for start, length in sequences:
        inside[start : start + length] = True
    for (name, y), z in zip(found.items(), again):
        assert torch.equal(y.nan_to_num(7.0), z.nan_to_num(7.0)), f"{name} differs between two runs"
        true = want[name]
        if name == "total":
            y = y[: len(true)]
            assert (y - true).abs().max() < 1e-5
            continue
        y = y.flatten(0, 1)
        assert y[~inside].isnan().all(), f"{name} was written outside the sequences"
        error = (y[inside] - true[inside]).norm() / true[inside].norm()
        assert error < (1e-6 if "rstd" in name else 4e-3), f"{name}: {error:.1e}"


def on_hopper(test: Any) -> Any:
    """Marks of a test that needs the device."""
    absent = not torch.cuda.is_available() or devices.of(torch.device("cuda")).arch != "sm90"
    for mark in (pytest.mark.gpu, pytest.mark.sm90, pytest.mark.skipif(absent, reason="needs a Hopper GPU")):
        test = mark(test)
    return test


@pytest.mark.parametrize("T", [1, 15, 16, 63, 64, 65, 130, 1000])
@pytest.mark.parametrize("kind", ["softplus", "slow", "bounded", "-1000", "-inf"])
@on_hopper
def test_dense(kind: str, T: int):
    check(case(kind, T, B=2, HV=4), [(0, T), (T, T)])


@pytest.mark.parametrize("kind", ["softplus", "slow", "bounded", "-inf"])
@pytest.mark.parametrize("lengths", [[1, 0, 63, 64, 65, 0, 15, 92], [0, 0, 5], [300]], ids=str)
@pytest.mark.parametrize("K", [64, 128])
@on_hopper
def test_packed(K: int, kind: str, lengths: list[int]):
    ends = torch.tensor(lengths).cumsum(0).tolist()
    x = case(kind, ends[-1] + 9, K=K, HV=4)
    for name in ("q", "k", "g", "beta"):
        x[name][:, ends[-1] :] = math.nan
    x["table"] = chunk_table(torch.tensor([0, *ends], device="cuda"), ends[-1] + 9)
    check(x, [(e - n, n) for e, n in zip(ends, lengths)])


FAST, SLOW = 60.0, -60.0
"""Raw bounded gates of decays e^-5 and 1."""


@pytest.mark.parametrize("bound", [-5.0, -7.0])  # quotients and products
@pytest.mark.parametrize("kind", ["fast", "slow", "either", "blocks", "eights", "spikes"])
@on_hopper
def test_ends_of_the_bounded_gate(kind: str, bound: float):
    x = case("bounded", 250, HV=4, A_log=None, dt_bias=None) | dict(lower_bound=bound)
    token = torch.arange(250, device="cuda")[None, :, None, None]
    chance = torch.rand(x["g"].shape, device="cuda")
    is_fast = {
        "fast": chance >= 0,
        "slow": chance < 0,
        "either": chance < 0.5,
        "blocks": (token // 16 % 2 == 0).expand_as(chance),
        "eights": (token // 8 % 2 == 0).expand_as(chance),
        "spikes": chance < 0.03,
    }[kind]
    x["g"] = torch.where(is_fast, FAST, SLOW).to(torch.bfloat16)
    check(x, [(0, 250)])


@pytest.mark.parametrize("kind", ["softplus", "bounded", "-inf"])
@on_hopper
def test_rows_do_not_depend_on_later_tokens(kind: str):
    x = case(kind, 130, HV=4)
    before = fwd_intra(**x)
    later = {n: x[n].clone() for n in ("q", "k", "g", "beta")}
    for t in later.values():
        t[:, 77:] = -3.0
    for a, b in zip(before[:4], fwd_intra(**x | later)[:4]):
        assert a is not None
        assert b is not None
        assert torch.equal(a[:, :77], b[:, :77])


@on_hopper
def test_a_sequence_does_not_depend_on_its_neighbours():
    x = case("slow", 300, HV=4)
    boundaries = [0, 64, 129, 300]
    packed = fwd_intra(**x | dict(table=chunk_table(torch.tensor(boundaries, device="cuda"), 300)))
    for start, end in zip(boundaries, boundaries[1:]):
        alone = fwd_intra(**x | {n: x[n][:, start:end] for n in ("q", "k", "g", "beta")})
        for one, all_ in zip(alone[:4], packed[:4]):
            assert one is not None
            assert all_ is not None
            assert torch.equal(one, all_[:, start:end])


@pytest.mark.parametrize("io", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("g", [torch.bfloat16, torch.float16, torch.float32])
@on_hopper
def test_dtypes(io: torch.dtype, g: torch.dtype):
    x = case("slow", 130)
    x |= dict(q=x["q"].to(io), k=x["k"].to(io), g=x["g"].to(g), beta=x["beta"].float())
    check(x, [(0, 130)])
