"""chunk_kda on Hopper's kernels, whole: right against float64, to the bit where bits are promised.

Every call is forced onto the kernels, in memory that holds NaN before it is written.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernel_fun._common import device as devices
from kernel_fun.kda import chunk_kda, dispatch
from kernel_fun.kda.call import Problem
from kernel_fun.kda.reference import chunked
from kernel_fun.testing import (
    TOLERANCE,
    Case,
    Tolerance,
    assert_close,
    make_inputs,
    make_upstream,
    poisoned_empty,
    run,
)

absent = not torch.cuda.is_available() or devices.of(torch.device("cuda")).arch != "sm90"
pytestmark = [pytest.mark.gpu, pytest.mark.sm90, pytest.mark.skipif(absent, reason="needs a Hopper GPU")]

BF16, FP16, F32 = torch.bfloat16, torch.float16, torch.float32
HEADS: dict[str, Any] = dict(H=2, HV=4, K=128, V=128, dtype=BF16, device="cuda")
MANY = dict(H=8, HV=16)
"""dA_log is one number a head, a sum that nearly cancels in some: its norm means something over many."""
STATES = dict(initial_state=True, output_final_state=True)
LENGTHS = (1, 0, 63, 64, 65, 0, 15, 92)


@pytest.fixture(autouse=True)
def _forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNEL_FUN_KDA_BACKEND", "sm90")


def both(**fields: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(float64 oracle, kernels in poisoned memory) of one problem, with every gradient."""
    x = make_inputs(**{**HEADS, **fields})
    up = make_upstream(x)
    with poisoned_empty():
        out = run(chunk_kda, x, **up)
    return run(chunked, x, **up, double=True), out


def assert_right(ref: dict[str, Tensor], out: dict[str, Tensor], dtype: torch.dtype = BF16) -> None:
    assert ref.keys() == out.keys()
    for name, value in ref.items():
        assert_close(name, value, out[name], dtype=dtype)


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


def test_the_kernels_serve_every_stage() -> None:
    problem = Problem(
        1, 64, 2, 4, 128, 128, gate="softplus", beta_mode="sigmoid", l2norm=True, needs_grad=True
    )
    plan = dispatch.plan(problem, devices.of(torch.device("cuda")))
    assert plan.backend == "sm90"


@pytest.mark.parametrize("T", [1, 15, 16, 63, 64, 65, 130, 1000])
@pytest.mark.parametrize("regime", ["softplus_random", "init_slow", "bounded", "precomputed", "spikes"])
def test_agrees_with_float64(regime: str, T: int) -> None:
    assert_right(*both(regime=regime, T=T, B=1 + T % 2, **MANY, **(STATES if T % 2 == 0 else {})))


@pytest.mark.parametrize("regime", ["softplus_random", "init_slow", "bounded"])
def test_long_sequences_agree_with_float64(regime: str) -> None:
    assert_right(*both(regime=regime, T=8192, V=256, **MANY))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("V", [64, 128, 192, 256, 320])
@pytest.mark.parametrize("K", [64, 128])
def test_sizes(K: int, V: int, dtype: torch.dtype) -> None:
    assert_right(*both(regime="init_slow", T=200, K=K, V=V, dtype=dtype, **STATES), dtype)


@pytest.mark.parametrize("g", [BF16, F32], ids=str)
@pytest.mark.parametrize("beta", ["raw", "sigmoid", "sigmoid2"])
@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("regime", ["softplus_random", "bounded", "precomputed"])
def test_forms(regime: str, l2norm: bool, beta: str, g: torch.dtype) -> None:
    """Every form of gate, beta and norm; float32 gates and betas; HV = H."""
    assert_right(*both(regime=regime, T=150, HV=2, l2norm=l2norm, beta=beta, g_dtype=g, beta_dtype=g))


@pytest.mark.parametrize("absent", [("A_log",), ("dt_bias",), ("A_log", "dt_bias")])
def test_bounded_gate_without_parameters(absent: tuple[str, ...]) -> None:
    assert_right(*both(regime="bounded", T=100, **dict.fromkeys(absent, False)))


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("HV", [2, 4, 8])
@pytest.mark.parametrize("seqlens", [LENGTHS, (300,), (0, 0, 5), (129, 64, 128)], ids=str)
def test_packed_sequences(seqlens: tuple[int, ...], HV: int, v_first: bool) -> None:
    """Partial and empty sequences; rows of no sequence give exact zeros everywhere."""
    ref, out = both(
        regime="softplus_random", seqlens=seqlens, tail=9, HV=HV, V=192, state_v_first=v_first, **STATES
    )
    assert_right(ref, out)
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert not out[name][:, sum(seqlens) :].any(), name


@pytest.mark.parametrize("which", ["o", "ht"])
def test_gradient_of_one_output_alone(which: str) -> None:
    x = make_inputs("bounded", T=130, **HEADS, **STATES)
    up = make_upstream(x)
    up = {"do": up["do"]} if which == "o" else {"dht": up["dht"]}
    assert_right(run(chunked, x, **up, double=True), run(chunk_kda, x, **up))


def test_first_token_has_no_gate_gradient() -> None:
    x = make_inputs("softplus_random", seqlens=(70, 3, 64), **HEADS)
    out = run(chunk_kda, x, **make_upstream(x))
    assert not out["dg"][:, [0, 70, 73]].any()


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("V", [64, 256])
def test_two_runs_are_equal_to_the_bit(V: int, dtype: torch.dtype) -> None:
    x = make_inputs("softplus_random", seqlens=LENGTHS, **{**HEADS, "V": V, "dtype": dtype}, **STATES)
    up = make_upstream(x)
    first = run(chunk_kda, x, **up)
    for _ in range(3):
        assert_same(first, run(chunk_kda, x, **up))


def part(x: dict[str, Any], n: int, rows: slice) -> dict[str, Any]:
    """Sequence n of a packed call as a dense call."""
    tokens = ("q", "k", "v", "g", "beta")
    own = {name: value[:, rows] if name in tokens else value for name, value in x.items()}
    own.pop("cu_seqlens")
    return {**own, "initial_state": x["initial_state"][n : n + 1]}


@pytest.mark.parametrize("regime", ["softplus_random", "spikes"])
def test_packed_equals_separate_to_the_bit(regime: str) -> None:
    lengths = (65, 1, 128, 300, 17)
    x = make_inputs(regime, seqlens=lengths, **HEADS, **STATES)
    up = make_upstream(x)
    whole = run(chunk_kda, x, **up)
    ends = list(itertools.accumulate((0, *lengths)))
    for n, (first, last) in enumerate(itertools.pairwise(ends)):
        rows = slice(first, last)
        alone = run(chunk_kda, part(x, n, rows), do=up["do"][:, rows], dht=up["dht"][n : n + 1])
        for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
            assert torch.equal(alone[name], whole[name][:, rows]), (name, n)
        for name in ("ht", "dh0"):
            assert torch.equal(alone[name], whole[name][n : n + 1]), (name, n)


def test_a_batch_does_not_change_its_sequences() -> None:
    """Also where so many sequences are walked in wider tiles of V."""
    x = make_inputs("softplus_random", T=130, B=48, **{**HEADS, "V": 256}, **STATES)
    up = make_upstream(x)
    whole = run(chunk_kda, x, **up)
    rows = ("q", "k", "v", "g", "beta", "initial_state")
    for b in (0, 47):
        own = {n: v[b : b + 1] if n in rows else v for n, v in x.items()}
        alone = run(chunk_kda, own, **{n: v[b : b + 1] for n, v in up.items()})
        for name in ("o", "ht", "dq", "dk", "dv", "dg", "dbeta", "dh0"):
            assert torch.equal(alone[name], whole[name][b : b + 1]), name


def test_a_prefix_does_not_read_later_tokens() -> None:
    x = make_inputs("bounded", T=200, **HEADS)
    o = chunk_kda(**x)[0]
    for t in (1, 63, 64, 100):
        later = {n: v.clone() if isinstance(v, Tensor) else v for n, v in x.items()}
        for name in ("q", "k", "v", "g", "beta"):
            later[name][:, t:] = torch.randn_like(later[name][:, t:])
        assert torch.equal(chunk_kda(**later)[0][:, :t], o[:, :t]), t


def test_nan_stays_in_its_sequence() -> None:
    x = make_inputs("softplus_random", seqlens=(70, 30, 100), **HEADS)
    up = make_upstream(x)
    clean = run(chunk_kda, x, **up)
    for name in ("q", "k", "v", "g", "beta"):
        x[name][:, 75] = float("nan")
    spoiled = run(chunk_kda, x, **up)
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        for rows in (slice(0, 70), slice(100, 200)):
            assert torch.equal(spoiled[name][:, rows], clean[name][:, rows]), name


@pytest.mark.parametrize("regime", ["softplus_random", "bounded"])
@pytest.mark.parametrize("name", ["A_log", "dt_bias"])
def test_nan_of_a_parameter_is_seen(name: str, regime: str) -> None:
    """It spoils its own head, all of it: no clamp takes it for a number."""
    x = make_inputs(regime, T=100, **HEADS)
    x[name].view(HEADS["HV"], -1)[3] = float("nan")
    out = run(chunk_kda, x, **make_upstream(x))
    assert out["o"][:, 1:, 3].isnan().all()
    assert out["dg"][:, 1:, 3].isnan().all()
    assert out[f"d{name}"].view(HEADS["HV"], -1)[3].isnan().all()
    for grad in ("o", "dv", "dg", "dbeta"):
        assert out[grad][:, :, :3].isfinite().all(), grad


@pytest.mark.parametrize("seqlens", [None, LENGTHS], ids=["dense", "packed"])
def test_strides_do_not_matter(seqlens: tuple[int, ...] | None) -> None:
    """Slices of a wider projection, a transposed layout, and rows that no 16-byte load can address."""
    x = make_inputs("bounded", T=100, seqlens=seqlens, **HEADS)
    up = make_upstream(x)
    want = run(chunk_kda, x, **up)

    def wider(t: Tensor) -> Tensor:
        return torch.cat([t, t], -1)[..., : t.shape[-1]] if t.dim() == 4 else t

    def head_major(t: Tensor) -> Tensor:
        return t.transpose(1, 2).contiguous().transpose(1, 2)

    def odd(t: Tensor) -> Tensor:
        room = t.new_empty((*t.shape[:-1], t.shape[-1] + 1))
        room[..., 1:] = t
        return room[..., 1:]

    for laid in (wider, head_major, odd):
        moved = {n: laid(v) if n in ("q", "k", "v", "g", "beta") else v for n, v in x.items()}
        assert_same(want, run(chunk_kda, moved, do=laid(up["do"])))


def test_states_kept_or_rebuilt_give_the_same_bits() -> None:
    x = make_inputs("softplus_random", T=200, **HEADS, **STATES)
    up = make_upstream(x)
    assert_same(run(chunk_kda, x, **up), run(chunk_kda, {**x, "disable_recompute": True}, **up))


@pytest.mark.parametrize("v_first", [False, True])
def test_intermediate_states(v_first: bool) -> None:
    x = make_inputs("bounded", seqlens=(70, 64, 130), **HEADS, state_v_first=v_first)
    wide = {n: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in x.items()}
    with torch.inference_mode():
        h = chunk_kda(**x, return_intermediate_states=True)[2]
        monkey = dict(wide, return_intermediate_states=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KERNEL_FUN_KDA_BACKEND", "eager")
            want = chunk_kda(**monkey)[2]
    assert_close("h", want, h, tolerance=TOLERANCE["kda", "h", BF16])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_gives_the_same_bits(reentrant: bool) -> None:
    x = make_inputs("softplus_random", T=130, **HEADS)
    up = make_upstream(x)
    want = run(chunk_kda, x, **up)
    leaves = {n: v.detach().requires_grad_() for n, v in x.items() if isinstance(v, Tensor)}

    def op(*tensors: Tensor) -> Tensor:
        return chunk_kda(**{**x, **dict(zip(leaves, tensors))})[0]

    o = checkpoint(op, *leaves.values(), use_reentrant=reentrant)
    o.backward(up["do"])
    assert torch.equal(o, want["o"])
    for name, leaf in leaves.items():
        assert torch.equal(leaf.grad, want[{"dt_bias": "ddt_bias"}.get(name, f"d{name}")]), name


def test_backward_twice_and_under_autocast() -> None:
    x = make_inputs("bounded", T=130, **HEADS)
    up = make_upstream(x)
    want = run(chunk_kda, x, **up)
    leaves = {n: v.detach().requires_grad_() for n, v in x.items() if isinstance(v, Tensor)}
    with torch.autocast("cuda", torch.float16):
        o = chunk_kda(**{**x, **leaves})[0]
        for _ in range(2):
            (dk,) = torch.autograd.grad(o, leaves["k"], up["do"], retain_graph=True)
            assert torch.equal(dk, want["dk"])
    assert torch.equal(o, want["o"])


def test_two_streams() -> None:
    """Interleaved on two streams, each after its own inputs: the bits of one stream."""
    cases = [make_inputs("softplus_random", T=500, seed=s, **HEADS) for s in range(2)]
    ups = [make_upstream(x, seed=s) for s, x in enumerate(cases)]
    want = [run(chunk_kda, x, **up) for x, up in zip(cases, ups)]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for _ in range(5):
        found = []
        for stream, x, up in zip(streams, cases, ups):
            with torch.cuda.stream(stream):
                found.append(run(chunk_kda, x, **up))
        torch.cuda.synchronize()
        for a, b in zip(want, found):
            assert_same(a, b)


def test_no_wait_for_the_device() -> None:
    x = make_inputs("softplus_random", seqlens=LENGTHS, **HEADS)
    up = make_upstream(x)
    leaves = {
        n: v.detach().requires_grad_()
        for n, v in x.items()
        if isinstance(v, Tensor) and v.is_floating_point()
    }
    chunk_kda(**{**x, **leaves})[0].backward(up["do"])
    torch.cuda.set_sync_debug_mode("error")
    try:
        chunk_kda(**{**x, **leaves})[0].backward(up["do"])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("seqlens", [None, (100, 30, 0, 70)], ids=["dense", "packed"])
def test_graph_replay_gives_the_bits_of_a_call(seqlens: tuple[int, ...] | None) -> None:
    """Captured forward and backward, replayed on other values and, packed, on other boundaries."""
    B = 1 if seqlens else 2
    cases = [make_inputs("bounded", T=200, B=B, seqlens=seqlens, seed=s, **HEADS) for s in range(2)]
    if seqlens:
        cases[1]["cu_seqlens"] = torch.tensor([0, 7, 7, 150, 200], device="cuda")
        for x in cases:
            x.update(use_graph=True, max_num_seqs=4)
    up = make_upstream(cases[0])
    want = [run(chunk_kda, x, **up) for x in cases]
    static = {n: v.clone() if isinstance(v, Tensor) else v for n, v in cases[0].items()}
    leaves = {
        n: v.requires_grad_() for n, v in static.items() if isinstance(v, Tensor) and v.is_floating_point()
    }

    def step() -> dict[str, Tensor]:
        o = chunk_kda(**static)[0]
        grads = torch.autograd.grad(o, tuple(leaves.values()), up["do"])
        return {"o": o, **dict(zip(leaves, grads))}

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    names = {
        "q": "dq",
        "k": "dk",
        "v": "dv",
        "g": "dg",
        "beta": "dbeta",
        "A_log": "dA_log",
        "dt_bias": "ddt_bias",
    }
    for x, expected in zip(cases, want):
        with torch.no_grad():
            for name, value in x.items():
                if isinstance(value, Tensor):
                    static[name].copy_(value)
        graph.replay()
        for name, value in found.items():
            assert torch.equal(value, expected[names.get(name, name)]), name


def test_more_sequences_than_a_grid_dimension_holds() -> None:
    N = 70_000
    x = make_inputs("precomputed", seqlens=(1,) * N, **{**HEADS, "H": 1, "HV": 1, "K": 64, "V": 64})
    o = chunk_kda(**x)[0]
    few = {n: v[:, -64:] for n, v in x.items() if n in ("q", "k", "v", "g", "beta")}
    cu = torch.arange(65, device="cuda")
    assert torch.equal(o[:, -64:], chunk_kda(**{**x, **few, "cu_seqlens": cu})[0])


def test_offsets_beyond_32_bits() -> None:
    """More than 2^31 elements a tensor: the last sequence and head are those of a small call."""
    T, H = (1 << 18) + 200, 64
    x: dict[str, Any] = {
        n: torch.zeros(1, T, H, 128, dtype=BF16, device="cuda") for n in ("q", "k", "v", "g")
    }
    x["beta"] = torch.full((1, T, H), 0.5, dtype=BF16, device="cuda")
    few = {n: (torch.randn(1, 200, 1, 128, device="cuda") / 128**0.5).to(BF16) for n in ("q", "k", "v")}
    few["g"] = -torch.rand(1, 200, 1, 128, device="cuda").to(BF16)
    for name, value in few.items():
        x[name][:, -200:, -1:] = value
    few["beta"] = x["beta"][:, -200:, -1:]
    few["do"] = torch.randn(1, 200, 1, 128, device="cuda").to(BF16)
    do = torch.zeros(1, T, H, 128, dtype=BF16, device="cuda")
    do[:, -200:, -1:] = few["do"]
    small = run(chunk_kda, {n: v for n, v in few.items() if n != "do"}, do=few["do"])
    leaves = {n: v.requires_grad_() for n, v in x.items()}
    cu = torch.tensor([0, T - 200, T], device="cuda")
    o = chunk_kda(**leaves, cu_seqlens=cu)[0]
    assert torch.equal(o[:, -200:, -1:], small["o"])
    o.backward(do)
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert torch.equal(leaf.grad[:, -200:, -1:], small[f"d{name}"]), name
        assert not leaf.grad[:, :-200].any(), name


def test_many_packings_keep_no_memory() -> None:
    x = make_inputs("bounded", T=512, **HEADS)
    sizes = []
    for n in range(60):
        cut = torch.randint(1, 511, (3 + n % 5,)).sort().values
        cu = torch.cat([torch.tensor([0]), cut, torch.tensor([512])]).cuda()
        chunk_kda(**x, cu_seqlens=cu)
        torch.cuda.synchronize()
        sizes.append(torch.cuda.memory_allocated())
    assert max(sizes[20:]) - min(sizes[20:]) <= 1 << 16


def test_close_means_close() -> None:
    """The limits above are those of the tables, and a wrong operand is far outside them."""
    ref, out = both(regime="bounded", T=64)
    wrong = {**out, "dk": out["dk"] * 1.02}
    with pytest.raises(AssertionError, match="dk"):
        assert_right(ref, wrong)
    assert isinstance(TOLERANCE["kda", "dk", BF16], Tolerance)
    assert Case().dtype == F32
