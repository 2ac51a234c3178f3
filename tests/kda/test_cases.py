"""Small inputs with known right answers, for the oracles and for every backend.

Each case is compared with the recurrence on the same (rounded) inputs, with the values written here
(float64 and float32), and bit for bit where the answer is exact.

The standard problem ``std`` uses no random numbers: with t the token, i the channel of K, j of V,

    q = cos(0.7 t + 1.3 h + 0.05 i), k = sin(0.4 t + 0.9 h + 0.11 i + 0.5), rows normalised
    v = sin(0.3 t + 0.21 j + h)
    g = -0.3 (0.5 + 0.5 sin(0.13 t + 0.37 i)), beta = 0.5 + 0.4 sin(0.9 t + h)
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from kernel_fun.kda import chunk_kda, fused_recurrent_kda
from kernel_fun.kda.reference import recurrent
from kernel_fun.testing import assert_close, run

if TYPE_CHECKING:
    from collections.abc import Callable

F64 = torch.float64
INF = math.inf


def std(T: int, K: int = 64, V: int = 64, h: int = 0) -> dict[str, Any]:
    """The standard problem in float64, one head."""
    t = torch.arange(T, dtype=F64)[:, None]
    i, j = torch.arange(K, dtype=F64), torch.arange(V, dtype=F64)
    q = torch.cos(0.7 * t + 1.3 * h + 0.05 * i)
    k = torch.sin(0.4 * t + 0.9 * h + 0.11 * i + 0.5)
    q, k = (x / torch.linalg.vector_norm(x, dim=-1, keepdim=True) for x in (q, k))
    v = torch.sin(0.3 * t + 0.21 * j + h)
    g = -0.3 * (0.5 + 0.5 * torch.sin(0.13 * t + 0.37 * i))
    beta = 0.5 + 0.4 * torch.sin(0.9 * t[:, 0] + h)
    return {"q": heads(q), "k": heads(k), "v": heads(v), "g": heads(g), "beta": heads(beta)}


def heads(*rows: Tensor) -> Tensor:
    """``[T, ...]`` per head -> ``[1, T, heads, ...]``."""
    return torch.stack(rows, 1)[None]


def std_do(T: int, V: int = 64) -> Tensor:
    t, j = torch.arange(T, dtype=F64)[:, None], torch.arange(V, dtype=F64)
    return heads(torch.cos(0.05 * t + 0.02 * j))


def std_dht(K: int = 64, V: int = 64) -> Tensor:
    i, j = torch.arange(K, dtype=F64)[:, None], torch.arange(V, dtype=F64)
    return (0.01 * torch.sin(i - 0.5 * j))[None, None]


def axis(T: int, *, g: float, beta: float | Tensor, K: int = 64, V: int = 64) -> dict[str, Any]:
    """q = k = e0 and v = 1 at every token: the state is one number per value channel."""
    e0 = torch.zeros(1, T, 1, K, dtype=F64)
    e0[..., 0] = 1.0
    return {
        "q": e0,
        "k": e0.clone(),
        "v": torch.ones(1, T, 1, V, dtype=F64),
        "g": torch.full((1, T, 1, K), g, dtype=F64),
        "beta": torch.zeros(1, T, 1, dtype=F64) + beta,
    }


def rounded(target: Any, name: str, value: Any) -> Any:
    """A tensor as ``target`` takes it: on its device, in its dtype or, a state, its wide one."""
    if not isinstance(value, Tensor):
        return value
    if not value.is_floating_point():
        return value.to(target.device)
    is_state = name in ("initial_state", "dht")
    return value.to(target.device, target.wide if is_state else target.dtype)


def solve(
    target: Any, x: dict[str, Any], do: Tensor | None = None, dht: Tensor | None = None
) -> dict[str, Tensor]:
    """Forward and backward on rounded inputs; compared with the recurrence; returned."""
    x = {name: rounded(target, name, value) for name, value in x.items()}
    up = {"do": rounded(target, "do", do), "dht": rounded(target, "dht", dht)}
    out = run(target.op, x, **up)
    if not target.is_oracle:
        ref = run(recurrent, x, **up, double=True)
        for name in ref:
            assert_close(name, ref[name], out[name], dtype=target.dtype)
    return out


def expect(target: Any, given: Tensor | float, value: float, *, size: float = 0.0) -> None:
    """Compare a number with the value written down to about ten digits.

    float32 is allowed 1e-5 of the value, or of ``size`` where the number is a sum of terms of
    either sign. In a 16-bit dtype the inputs are rounded and the written value does not apply.
    """
    if target.dtype not in (torch.float64, torch.float32):
        return
    given = float(given)
    exact = target.dtype == torch.float64
    limit = 1e-9 + 1e-9 * abs(value) if exact else 1e-7 + 1e-5 * max(size, abs(value))
    assert abs(given - value) <= limit, f"expected {value!r}, got {given!r}"


def test_c1_one_token(implementation: Any) -> None:
    x = axis(1, g=-1.0, beta=0.5)
    x["v"] = ((torch.arange(64, dtype=F64) + 1) / 64).reshape(1, 1, 1, 64)
    x["output_final_state"] = True
    out = solve(implementation, x, do=torch.ones(1, 1, 1, 64, dtype=F64))
    assert out["o"][0, 0, 0, 0] == 0.0009765625
    assert out["o"][0, 0, 0, 63] == 0.0625
    assert out["ht"][0, 0, 0, 0] == 0.0078125
    assert out["ht"][0, 0, 0, 63] == 0.5
    assert not out["ht"][0, 0, 1:].any()
    assert out["dq"][0, 0, 0, 0] == out["dk"][0, 0, 0, 0] == 2.03125
    assert (out["dv"] == 0.0625).all()
    assert out["dbeta"].item() == 4.0625
    assert not out["dg"].any(), "the first token of a sequence without state decays nothing"


def test_c1b_one_token_and_a_state(implementation: Any) -> None:
    x = axis(1, g=-1.0, beta=0.5)
    x["v"] = ((torch.arange(64, dtype=F64) + 1) / 64).reshape(1, 1, 1, 64)
    x.update(initial_state=torch.ones(1, 1, 64, 64, dtype=F64), output_final_state=True)
    out = solve(implementation, x, do=torch.ones(1, 1, 1, 64, dtype=F64))
    for name, index, value in (
        ("o", (0, 0, 0, 0), 0.0239690276),
        ("o", (0, 0, 0, 63), 0.0854924651),
        ("ht", (0, 0, 0, 0), 0.1917522206),
        ("ht", (0, 0, 1, 0), 0.3678794412),
        ("dg", (0, 0, 0, 0), 1.4715177647),
        ("dh0", (0, 0, 0, 0), 0.0229924651),
        ("dbeta", (0, 0, 0), 1.1194644706),
        ("dk", (0, 0, 0, 0), -0.9117855294),
        ("dk", (0, 0, 0, 1), -1.4715177647),
        ("dq", (0, 0, 0, 0), 3.5027677647),
        ("dq", (0, 0, 0, 1), 2.9430355294),
    ):
        expect(implementation, out[name][index], value)
    assert out["dg"][0, 0, 0, 1] == 0
    assert out["dh0"][0, 0, 1, 0] == 0


@pytest.mark.parametrize(
    ("T", "value"),
    [
        (1, 1.0),
        (15, 0.869358235),
        (16, 0.860707976),
        (17, 0.852143789),
        (31, 0.740818221),
        (33, 0.726149037),
        (63, 0.537944438),
        (64, 0.532591801),
        (65, 0.527292424),
        (127, 0.283654026),
        (129, 0.278037300),
    ],
)
def test_c2_only_decay_carries_the_value_to_the_tail(implementation: Any, T: int, value: float) -> None:
    beta = torch.zeros(1, T, 1, dtype=F64)
    beta[:, 0] = 1.0
    x = axis(T, g=-0.01, beta=beta) | {"output_final_state": True}
    out = solve(implementation, x)
    expect(implementation, out["ht"][0, 0, 0, 0], value)
    expect(implementation, out["o"][0, -1, 0, 0], value / 8)
    assert not out["ht"][0, 0, 1:].any()


@pytest.mark.parametrize("T", [16, 22, 64])
def test_c4_saturated_bound(implementation: Any, T: int) -> None:
    x = axis(T, g=-5.0, beta=0.5)
    do = torch.ones(1, T, 1, 64, dtype=F64)
    out = solve(implementation, x, do=do)
    s = 8 * out["o"][0, :, 0, 0].double()
    expect(implementation, s[0], 0.5)
    expect(implementation, s[1], 0.5016844867)
    expect(implementation, out["dg"][0, 1, 0, 0], 0.0135214474)
    if T == 64:
        expect(implementation, s[63], 0.5016901809)
        expect(implementation, out["dg"].double().sum(), 0.8546390274)

    raw = x | {"g": torch.full_like(x["g"], 50.0), "A_log": torch.zeros(1, dtype=F64)}
    raw |= {"use_gate_in_kernel": True, "lower_bound": -5.0, "safe_gate": True}
    in_kernel = solve(implementation, raw, do=do)
    assert torch.equal(in_kernel["o"], out["o"]), "-5 sigmoid(50) is -5 in every dtype"
    assert not in_kernel["dg"].any() or in_kernel["dg"].abs().max() < 1e-20


@pytest.mark.parametrize("dead", [-INF, -1000.0])
def test_c5_hard_reset(implementation: Any, dead: float) -> None:
    x = std(16)
    x["g"][:, 5] = dead
    do = torch.ones(1, 16, 1, 64, dtype=F64)
    out = solve(implementation, x, do=do)
    expect(implementation, out["o"].double().sum(), 0.8752096943, size=10)
    expect(implementation, out["o"][0, 15, 0, 0], 0.0448268163)
    assert not out["dg"][:, 5].any()

    fresh = solve(implementation, {name: a[:, 5:] for name, a in x.items()})
    assert_close("o", fresh["o"], out["o"][:, 5:], dtype=implementation.dtype)

    do[:, :5] = 0
    later = solve(implementation, x, do=do)
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        assert not later[name][:, :5].any(), f"{name}: a gradient crossed the reset"


@pytest.mark.parametrize("dead", [-INF, -1000.0])
def test_c5_half_reset(implementation: Any, dead: float) -> None:
    x = std(16)
    x["g"][:, 5, :, :32] = dead
    out = solve(implementation, x, do=torch.ones(1, 16, 1, 64, dtype=F64))
    expect(implementation, out["o"].double().sum(), 0.8203316583, size=10)
    expect(implementation, out["o"][0, 15, 0, 0], 0.0550101299)
    expect(implementation, out["dv"].double().sum(), -10.8992591772, size=100)
    assert not out["dg"][:, 5, :, :32].any()
    assert out["dg"][:, 5, :, 32:].all()


NAMES = ("o", "ht", "dq", "dk", "dv", "dg", "dbeta", "dh0")
SWEEP = """
1   .036974440 .155422591 2.763666178 .216206553 .219928381 .176205041 0 .196299270 .733968291
2   .137321821 .305394100 5.048201137 .475397094 .432791922 .329586567 .021120476 .299493076 1.131364694
16  .473827898 1.044300484 7.444511587 1.959599075 .846712142 .439059956 .465403209 .556008350 1.029425788
22  -.415606781 1.306506180 6.977721930 2.282939201 .938933241 .409011895 .486796129 .325692472 1.005155865
63  -.640566751 2.418600528 6.977904766 3.582808924 1.270176543 .996525507 .709629508 .492581362 1.009629782
64  -.717294077 2.459067834 6.972704934 3.605303637 1.263316773 1.057465003 .710658246 .510930120 1.009619937
65  -.704739343 2.485776531 7.495926345 3.641942664 1.281460557 1.125883426 .704122681 .531523359 1.009564161
130 -1.023590776 3.570504825 7.785867708 5.244670512 1.836303674 1.488482053 1.034813313 .684306691 1.009491679
"""


@pytest.mark.parametrize("row", SWEEP.strip().splitlines(), ids=lambda row: f"T{row.split()[0]}")
def test_c9_lengths_sweep(implementation: Any, row: str) -> None:
    """T, sum of o, then the Frobenius norms of o, ht and the gradients."""
    T, total, *norms = row.split()
    x = std(int(T)) | {"initial_state": torch.zeros(1, 1, 64, 64, dtype=F64)}
    x["output_final_state"] = True
    out = solve(implementation, x, do=std_do(int(T)), dht=std_dht())
    expect(implementation, out["o"].double().sum(), float(total), size=10)
    for name, norm in zip(NAMES, norms, strict=True):
        expect(implementation, torch.linalg.vector_norm(out[name].double()), float(norm))


@pytest.mark.parametrize(("beta", "period"), [(0.0, (0.0, 0.0)), (1.0, (1.0, 1.0)), (2.0, (2.0, 0.0))])
def test_c10_beta_edges(implementation: Any, beta: float, period: tuple[float, float]) -> None:
    out = solve(implementation, axis(8, g=0.0, beta=beta), do=torch.ones(1, 8, 1, 64, dtype=F64))
    s = torch.tensor(period * 4, dtype=F64)
    assert torch.equal(8 * out["o"][0, :, 0].double(), s[:, None].expand(8, 64))
    if beta == 0.0:
        assert not out["dk"].any()
        assert not out["dv"].any()
        assert out["dbeta"].all()


def test_c12_empty_sequences(implementation: Any) -> None:
    x = std(70)
    lone = solve(implementation, x)
    expect(implementation, lone["o"].double().sum(), -0.267814211, size=10)

    x["cu_seqlens"] = torch.tensor([0, 0, 5, 5, 70, 70])
    x["initial_state"] = (0.1 * torch.arange(1, 6, dtype=F64)).reshape(5, 1, 1, 1).repeat(1, 1, 64, 64)
    x["output_final_state"] = True
    dht = std_dht() * torch.arange(1, 6, dtype=F64).reshape(5, 1, 1, 1)
    out = solve(implementation, x, do=std_do(70), dht=dht)
    expect(implementation, out["o"].double().sum(), 4.384932592, size=10)
    for n, norm in enumerate((6.4, 9.75220243, 19.2, 6.93258788, 32.0)):
        expect(implementation, torch.linalg.vector_norm(out["ht"][n].double()), norm, size=norm)
    for n in (0, 2, 4):
        assert torch.equal(out["ht"][n], x["initial_state"][n].to(implementation.wide))
        assert torch.equal(out["dh0"][n], dht[n].to(implementation.wide))


def test_c12_nothing_but_an_empty_sequence(implementation: Any) -> None:
    x = std(0) | {"cu_seqlens": torch.tensor([0, 0]), "output_final_state": True}
    x["initial_state"] = torch.full((1, 1, 64, 64), 0.1, dtype=F64)
    out = solve(implementation, x, do=std_do(0), dht=std_dht())
    assert out["o"].shape == (1, 0, 1, 64)
    assert torch.equal(out["ht"], x["initial_state"].to(implementation.wide))
    assert torch.equal(out["dh0"], std_dht().to(implementation.wide))


def test_c13_rows_after_the_last_sequence(target: Any) -> None:
    x, do = std(946), std_do(946)
    for name in x:
        x[name][:, 944:] = math.nan
    do[:, 944:] = math.nan
    bounds = [0, 144, 432, 944]
    packed = solve(target, x | {"cu_seqlens": torch.tensor(bounds)}, do=do)
    for name, value in packed.items():
        assert not value[:, 944:].any(), f"{name}: rows outside every sequence must be 0"
    for first, last in pairwise(bounds):
        rows = slice(first, last)
        alone = run(
            target.op,
            {name: rounded(target, name, a[:, rows]) for name, a in x.items()},
            do=rounded(target, "do", do[:, rows]),
        )
        for name in alone:
            assert torch.equal(packed[name][:, rows], alone[name]), f"{name}: packed differs"


def one_token_each(N: int, HV: int, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """N sequences of one token: q = k = e0, v = 1, g = -1, beta = 0.5."""
    x = axis(N, g=-1.0, beta=0.5)
    x = {name: a.to(device, dtype).repeat_interleave(HV, 2) for name, a in x.items()}
    return x | {"cu_seqlens": torch.arange(N + 1, device=device)}


def test_c14_many_sequences_of_one_token(target: Any) -> None:
    """On a GPU 65536 pairs of sequence and head, more than a grid dimension of 16 bits."""
    N, HV = (64, 2) if target.device == "cpu" else (4096, 16)
    x = one_token_each(N, HV, target.dtype, target.device)
    out = run(target.op, x, do=torch.ones_like(x["v"]))
    assert (out["o"] == 0.0625).all()
    assert not out["dg"].any()


def test_c17_grouped_value_heads(implementation: Any) -> None:
    T, x, other = 65, std(65), std(65, h=1)
    for name in ("v", "beta"):
        x[name] = torch.cat((x[name], other[name]), 2)
    x["g"] = torch.cat((x["g"], 1.7 * other["g"]), 2)
    do = std_do(T).repeat(1, 1, 2, 1)
    out = solve(implementation, x, do=do)
    for head, norm in enumerate((2.485776531, 2.238365504)):
        expect(implementation, torch.linalg.vector_norm(out["o"][:, :, head].double()), norm)
    expect(implementation, torch.linalg.vector_norm(out["dq"].double()), 6.126813127)
    expect(implementation, torch.linalg.vector_norm(out["dk"].double()), 2.193627465)

    repeated = x | {name: x[name].repeat_interleave(2, 2) for name in ("q", "k")}
    wide = solve(implementation, repeated, do=do)
    for name in ("o", "dv", "dg", "dbeta"):
        assert_close(name, wide[name], out[name], dtype=implementation.dtype)
    for name in ("dq", "dk"):
        assert_close(name, wide[name].double().sum(2, True), out[name], dtype=implementation.dtype)


def moved(x: dict[str, Tensor], names: str, i: int, j: int) -> dict[str, Tensor]:
    """The same values with dimensions i and j swapped in memory."""
    swapped = {n: x[n].transpose(i, j).contiguous().transpose(i, j) for n in names.split()}
    return x | swapped


LAYOUTS: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "slices of one qkv": lambda x: (
        x | dict(zip("qkv", torch.stack([x[n] for n in "qkv"], 2).unbind(2), strict=True))
    ),
    "beta of stride 0": lambda x: x | {"beta": x["beta"][:, :1, :1].expand_as(x["beta"])},
    "g of stride 0": lambda x: x | {"g": x["g"][..., :1].expand_as(x["g"])},
    "heads before tokens": lambda x: moved(x, "q k v g beta", 1, 2),
    "channels before tokens": lambda x: moved(x, "q k v g", 1, 3),
    "every second channel": lambda x: (
        x | {n: x[n].repeat_interleave(2, -1)[..., ::2] for n in ("q", "k", "v", "g", "beta")}
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_c19_strides(target: Any, layout: str) -> None:
    x = {n: torch.cat((a, b), 2) for (n, a), b in zip(std(65).items(), std(65, h=1).values(), strict=True)}
    x = LAYOUTS[layout]({name: rounded(target, name, a) for name, a in x.items()})
    assert any(not a.is_contiguous() for a in x.values())
    before = {name: a.clone() for name, a in x.items()}
    dense = {name: a.clone(memory_format=torch.contiguous_format) for name, a in x.items()}
    do = torch.ones((), dtype=target.dtype, device=target.device).expand(1, 65, 2, 64)
    out, ref = run(target.op, x, do=do), run(target.op, dense, do=do.contiguous())
    for name in ref:
        assert torch.equal(ref[name], out[name]), f"{name} depends on the strides"
    for name in x:
        assert torch.equal(x[name], before[name]), f"{name} was modified"


def test_c19_gradient_of_an_expanded_gate_sums_over_channels(target: Any) -> None:
    x = {name: rounded(target, name, a) for name, a in std(65).items()}
    gate = x["g"][..., :1].clone().requires_grad_()
    o, _ = target.op(**x | {"g": gate.expand(1, 65, 1, 64)})
    o.sum().backward()
    assert gate.grad is not None
    assert gate.grad.shape == gate.shape
    x["g"] = gate.detach().expand(1, 65, 1, 64)
    ref = run(recurrent, x, do=torch.ones_like(o), double=True)
    assert_close("dg", ref["dg"].sum(-1, True), gate.grad, dtype=target.dtype)


def test_c20_a_split_at_a_chunk_is_the_whole(target: Any) -> None:
    """64 + 66 tokens with the state handed over equal 130 tokens, bit for bit."""
    x = {name: rounded(target, name, a) for name, a in std(130).items()}
    o, ht = target.op(**x, output_final_state=True)
    head = {name: a[:, :64] for name, a in x.items()}
    rest = {name: a[:, 64:] for name, a in x.items()}
    o1, state = target.op(**head, output_final_state=True)
    o2, state = target.op(**rest, initial_state=state, output_final_state=True)
    assert torch.equal(torch.cat((o1, o2), 1), o)
    assert torch.equal(state, ht)
    expect(target, torch.linalg.vector_norm(ht), 7.785867708)
    _, boundary = target.op(**{n: a[:, :128] for n, a in x.items()}, output_final_state=True)
    expect(target, torch.linalg.vector_norm(boundary), 7.618796860)


def test_c20_a_decoding_step_between_two_chunked_parts(target: Any) -> None:
    x = {name: rounded(target, name, a) for name, a in std(130).items()}
    o, ht = target.op(**x, output_final_state=True)
    parts: list[Tensor] = []
    state = None
    for rows, op in (
        (slice(0, 64), chunk_kda),
        (slice(64, 65), fused_recurrent_kda),
        (slice(65, 130), chunk_kda),
    ):
        part = {name: a[:, rows] for name, a in x.items()}
        out, state = op(**part, initial_state=state, output_final_state=True)
        parts.append(out)
    assert state is not None
    assert_close("o", o, torch.cat(parts, 1), dtype=target.dtype)
    assert_close("ht", ht, state, dtype=target.dtype)
