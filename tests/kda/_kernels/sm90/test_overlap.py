"""fwd_state beside fwd_intra: when it is chosen and, on the device, that nothing of it shows but the time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")

from kernel_fun._common import config, known, support
from kernel_fun._common import device as devices
from kernel_fun._common.device import named
from kernel_fun._cute import inspect
from kernel_fun._cute.tile import SMEM_BYTES
from kernel_fun._cute.varlen import chunk_table, sequence_chunks
from kernel_fun.kda import chunk_kda, exercise
from kernel_fun.kda._kernels.sm90 import (
    bwd_grads,
    bwd_grads_reduce,
    bwd_state,
    fwd_intra,
    fwd_state,
    overlap,
    stages,
)
from kernel_fun.kda._kernels.sm90.chunk_inputs import v_tile
from kernel_fun.testing import make_inputs, run

SMS = 132
LONG = overlap.TOKENS
HEADS = overlap.WORK // LONG


@pytest.mark.parametrize(
    "chains, V, T, ctas",
    [
        (32, 128, 8192, 64),
        (32, 128, LONG, 64),
        (32, 128, LONG - 1, 0),
        (36, 128, 8192, 72),
        (40, 128, 8192, 0),  # fwd_intra alone would take longer on 52 SMs than both do now
        (16, 256, 8192, 64),
        (48, 64, 8192, 48),
        (66, 64, 8192, 0),
        (8, 128, 8192, 16),
        (8, 128, 8191, 0),
        (6, 192, 65536, 18),
        (5, 128, 65536, 0),
        (256, 128, 8192, 0),
    ],
)
def test_the_scan_runs_beside_where_that_is_predicted_to_win(chains: int, V: int, T: int, ctas: int):
    assert overlap.scan_ctas(chains, V, T, SMS) == ctas


def test_the_exercises_know_what_is_long():
    assert (exercise.LONG_TOKENS, exercise.LONG_WORK) == (overlap.TOKENS, overlap.WORK)


def test_a_gpu_of_unknown_size_has_no_room_beside():
    assert overlap.scan_ctas(32, 128, 8192, 0) == 0


# what is compiled

INTRA = fwd_intra.Config(
    io="bfloat16", g="bfloat16", beta="bfloat16", K=128, gate="softplus", beta_mode="sigmoid", l2norm=True,
    has_A_log=True, has_dt_bias=True, packed=False, overlapped=True,
)  # fmt: skip
WIDE = dict(g="float32", beta="float32", gate="log", l2norm=False, has_A_log=False, has_dt_bias=False)


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERNEL_FUN_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        yield


@pytest.mark.parametrize("changes", [{}, WIDE], ids=["16-bit", "wide"])
def test_two_teams_fill_an_sm(changes: dict[str, Any], own_cache: None):
    c = dataclasses.replace(INTRA, **changes)
    want = c.resources()
    (kernel,) = inspect.resources(fwd_intra._compile.object(c))
    assert kernel.registers <= want.registers
    assert kernel.stack_bytes == 0
    assert (want.threads, want.ctas_per_sm) == (512, 1)
    assert want.smem_bytes <= SMEM_BYTES
    assert c.team_bytes % 1024 == 0


def test_the_scan_costs_no_registers_to_follow(own_cache: None):
    c = fwd_state.Config(
        io="bfloat16", g="bfloat16", beta="bfloat16", K=128, BV=64, gate="softplus", beta_mode="sigmoid", l2norm=True,
        overlapped=True,
    )  # fmt: skip
    (kernel,) = inspect.resources(fwd_state._compile.object(c))
    assert kernel.stack_bytes == 0
    assert kernel.registers <= 65536 // c.threads


# what is launched


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any, tuple[Any, ...]]]:
    """CPU tensors count as an H200's; a launch is recorded instead of made: name, config, arguments."""
    seen: list[tuple[str, Any, tuple[Any, ...]]] = []

    def compiler(name: str) -> Callable[..., Any]:
        return lambda config, *rest: lambda *given: seen.append((name, config, given))

    for module in (fwd_intra, fwd_state, bwd_state, bwd_grads, bwd_grads_reduce):
        monkeypatch.setattr(module, "_compile", compiler(module.__name__.rpartition(".")[2]))
    monkeypatch.setattr(stages, "chunk_tables", lambda cu, T: (sequence_chunks(cu), chunk_table(cu, T)))
    for module in (devices, fwd_intra, fwd_state):
        monkeypatch.setattr(module, "of", lambda device: named("sm90"))
    monkeypatch.setattr(support, "missing", lambda need: None)
    monkeypatch.setenv(config.KDA_BACKEND.name, "sm90")
    known.forget()
    return seen


def small(
    T: int = LONG, H: int = HEADS // 2, HV: int = HEADS, K: int = 64, V: int = 64, **more: Any
) -> dict[str, Any]:
    return make_inputs("softplus_random", T=T, H=H, HV=HV, K=K, V=V, dtype=torch.bfloat16, **more)


def forward_forms(launched: list[Any]) -> list[bool]:
    return [c.overlapped for name, c, _ in launched if name in ("fwd_intra", "fwd_state")]


def test_a_long_pass_of_few_chains_is_overlapped(launched: list[Any]):
    x = small()
    for _ in range(2):  # the second pass takes the plans of the first over
        launched.clear()
        o, _ = chunk_kda(**{n: t.requires_grad_() if n == "q" else t for n, t in x.items()})
        o.sum().backward()
        names = [name for name, *_ in launched]
        assert names[:4] == ["fwd_intra", "fwd_state", "fwd_state", "bwd_state"]
        assert forward_forms(launched) == [True, True, False]
        assert pair_of_scans(launched) == [True, True]
        intra, scan = launched[0][2], launched[1][2]
        ready = intra[-5]
        assert (ready.shape, ready.dtype) == ((HEADS, LONG // 64), torch.int32)
        assert any(given is ready for given in scan)
        assert intra[-1] == SMS - HEADS


def pair_of_scans(launched: list[Any]) -> list[bool]:
    """Of the rescan, whether it leads, and of bwd_state, whether it is beside it."""
    (rescan,) = [c.leads for name, c, _ in launched if name == "fwd_state" and not c.want_o]
    return [rescan, *(c.overlapped for name, c, _ in launched if name == "bwd_state")]


@pytest.mark.parametrize(
    ("fields", "fit"),
    [
        (dict(T=1, H=1, HV=1), True),
        (dict(H=66, HV=66, T=65), True),
        (dict(H=67, HV=67, T=65), False),
        (dict(H=33, HV=33, T=65, V=128), True),
        (dict(H=34, HV=34, T=65, V=128), False),
        (dict(seqlens=(65,)), False),
    ],
)
def test_two_scans_are_beside_each_other_where_both_fit(
    fields: dict[str, Any], fit: bool, launched: list[Any]
):
    x = small(**fields)
    o, _ = chunk_kda(**{n: t.requires_grad_() if n == "q" else t for n, t in x.items()})
    o.sum().backward()
    assert pair_of_scans(launched) == [fit, fit]


def test_kept_states_leave_nothing_to_be_beside(launched: list[Any]):
    x = {**small(T=65), "disable_recompute": True}
    o, _ = chunk_kda(**{n: t.requires_grad_() if n == "q" else t for n, t in x.items()})
    o.sum().backward()
    assert [c.overlapped for name, c, _ in launched if name == "bwd_state"] == [False]


@pytest.mark.parametrize(
    "fields",
    [
        dict(T=LONG - 1),
        dict(HV=66, H=66),
        dict(seqlens=(LONG,)),
    ],
    ids=["short", "many chains", "packed"],
)
def test_other_forwards_are_not(fields: dict[str, Any], launched: list[Any]):
    with torch.no_grad():
        chunk_kda(**small(**fields))
    assert forward_forms(launched) == [False, False]


def test_nothing_may_be_launched_between_the_two(launched: list[Any]):
    x = small(initial_state=True, output_final_state=True)
    x["q"].requires_grad_()

    def both() -> list[list[bool]]:
        launched.clear()
        o, _ = chunk_kda(**x)
        o.sum().backward()
        return [forward_forms(launched)[:2], pair_of_scans(launched)]

    assert both() == [[True, True], [True, True]]
    torch.use_deterministic_algorithms(True)
    try:
        assert both() == [[False, False], [False, False]]
    finally:
        torch.use_deterministic_algorithms(False)
    x["initial_state"] = x["initial_state"].mT.contiguous().mT
    assert both() == [[False, False], [False, False]]


def test_rows_that_have_to_be_copied_are_not_overlapped():
    q = torch.zeros(3, 2 * LONG, 1, 64, dtype=torch.bfloat16)[:, :LONG]
    x = fwd_intra.facts_of(q, q, q, q[..., 0].contiguous(), None, None, None)
    forms = dict(scale=1.0, gate="log", lower_bound=None, beta_mode="raw", l2norm=False)
    plan = fwd_intra.prepare(x, torch.device("cpu"), beside=8, **forms)
    assert not plan.config.overlapped
    x = fwd_intra.facts_of(*(t[:1] for t in (q, q, q)), q[:1, ..., 0].contiguous(), None, None, None)
    assert fwd_intra.prepare(x, torch.device("cpu"), beside=8, **forms).config.overlapped


# on the device

absent = not torch.cuda.is_available() or devices.of(torch.device("cuda")).arch != "sm90"
hopper = pytest.mark.skipif(absent, reason="needs a Hopper GPU")


@contextmanager
def forms(overlapped: bool) -> Iterator[list[bool]]:
    """Every dense call overlapped, or none; which forms of the scan were launched."""
    seen: list[bool] = []
    launch = fwd_state.launch

    def scan_ctas(chains: int, V: int, T: int, sms: int) -> int:
        return chains * (V // v_tile(chains, V, sms)) if overlapped else 0

    def spied(plan: Any, *given: Any) -> Any:
        seen.append(plan.config.overlapped)
        return launch(plan, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(config.KDA_BACKEND.name, "sm90")
        patch.setattr(fwd_state, "launch", spied)
        patch.setattr(overlap, "scan_ctas", scan_ctas)
        patch.setattr(overlap, "scans_fit", lambda *_: overlapped)
        known.forget()
        yield seen
    known.forget()


def outputs(
    x: dict[str, Any], overlapped: bool, upstream: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    with forms(overlapped) as seen:
        found = run(chunk_kda, x, **(upstream or {}))
    assert seen[0] is overlapped
    return found


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


BF16, FP16, F32 = torch.bfloat16, torch.float16, torch.float32


def on_device(
    B: int = 1, T: int = 1000, H: int = 4, HV: int = 4, K: int = 128, V: int = 128, io: torch.dtype = BF16,
    g: torch.dtype | None = None, gate: str = "bounded", states: bool = False, seed: int = 0, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """Arguments of chunk_kda, drawn on the device."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(*shape: int, dtype: torch.dtype = io) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    x: dict[str, Any] = dict(q=draw(B, T, H, K), k=draw(B, T, H, K), v=draw(B, T, HV, V))
    x |= dict(g=draw(B, T, HV, K, dtype=g or io), beta=draw(B, T, HV, dtype=g or io))
    x |= dict(use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)
    if not more.get("use_qk_l2norm_in_kernel", True):
        x |= {n: torch.nn.functional.normalize(x[n], dim=-1) for n in ("q", "k")}
    if gate == "log":
        x["g"] = torch.nn.functional.logsigmoid(x["g"])
    else:
        x |= dict(use_gate_in_kernel=True, A_log=draw(HV, dtype=F32), dt_bias=draw(HV * K, dtype=F32))
    if gate == "bounded":
        x |= dict(lower_bound=-5.0, safe_gate=True)
    if states:
        x |= dict(initial_state=draw(B, HV, K, V, dtype=F32), output_final_state=True)
    return x | more


def gradients(x: dict[str, Any]) -> dict[str, Tensor]:
    """Random gradients of the results."""
    found = {"do": torch.randn_like(x["v"])}
    if "initial_state" in x:
        found["dht"] = torch.randn_like(x["initial_state"])
    return found


CASES: list[dict[str, Any]] = [
    dict(T=8192, H=32, HV=32),
    dict(),
    dict(T=64),
    dict(T=129),
    dict(H=2, HV=8),
    dict(V=256),
    dict(B=3, T=333),
    dict(g=F32),
    dict(states=True),
    dict(gate="softplus", K=64, V=64, io=FP16),
    dict(gate="log", use_qk_l2norm_in_kernel=False, states=True),
    dict(gate="softplus", T=4096, H=8, HV=16, V=256),
]


@hopper
@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("fields", CASES, ids=lambda f: "-".join(f"{k}={v}" for k, v in f.items()) or "plain")
def test_the_bits_are_those_of_one_after_the_other(fields: dict[str, Any]):
    x = on_device(**fields)
    up = gradients(x)
    assert_same(outputs(x, True, up), outputs(x, False, up))


@hopper
@pytest.mark.gpu
@pytest.mark.sm90
def test_kept_states_are_the_same():
    x = {**on_device(), "disable_recompute": True}
    up = gradients(x)
    assert_same(outputs(x, True, up), outputs(x, False, up))


@hopper
@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize(
    "fields", [dict(), dict(H=1, HV=8), dict(T=4096, H=32, HV=32)], ids=["few", "grouped", "many"]
)
def test_no_call_sees_what_another_left(fields: dict[str, Any]):
    """Two problems in turn, in memory that the other one has just used."""
    problems = [on_device(seed=n, **fields) for n in range(2)]
    right = [outputs(x, False) for x in problems]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    with forms(True) as seen, torch.no_grad():
        for n in range(200):
            o, _ = chunk_kda(**problems[n % 2])
            wrong += (o != right[n % 2]["o"]).sum()
            del o
    assert seen == [True] * 200
    assert wrong.item() == 0


@hopper
@pytest.mark.gpu
@pytest.mark.sm90
def test_streams_and_other_kernels_at_once():
    """Two streams of overlapped calls, and a third that keeps the SMs busy."""
    x, y = on_device(T=4096, H=32, HV=32, seed=0), on_device(T=2048, H=16, HV=32, seed=1)
    right = outputs(x, False), outputs(y, False)
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    streams = [torch.cuda.Stream() for _ in range(3)]
    found: list[list[Tensor]] = [[], []]
    torch.cuda.synchronize()
    with forms(True) as seen, torch.no_grad():
        for n in range(40):
            for i, problem in enumerate((x, y)):
                with torch.cuda.stream(streams[i]):
                    o, _ = chunk_kda(**problem)
                    found[i].append((o != right[i]["o"]).sum())
            if n % 4 == 0:
                with torch.cuda.stream(streams[2]):
                    for _ in range(4):
                        a @ a
        torch.cuda.synchronize()
    assert all(seen)
    assert [int(sum(wrong)) for wrong in found] == [0, 0]


@hopper
@pytest.mark.gpu
@pytest.mark.sm90
def test_whole_steps_in_turn_and_at_once():
    """Training steps of two problems on two streams, whose scans are beside each other in pairs."""
    problems = [on_device(T=1000, seed=0), on_device(T=700, H=16, HV=16, seed=1)]
    upstream = [gradients(x) for x in problems]
    right = [outputs(x, False, up) for x, up in zip(problems, upstream)]
    streams = [torch.cuda.Stream() for _ in problems]
    found: list[Tensor] = []
    torch.cuda.synchronize()
    with forms(True) as seen:
        for _ in range(40):
            for x, up, true, stream in zip(problems, upstream, right, streams):
                with torch.cuda.stream(stream):
                    out = run(chunk_kda, x, **up)
                    found += [(value != true[name]).sum() for name, value in out.items()]
        torch.cuda.synchronize()
    assert seen == [True, False] * 80
    assert int(sum(n.cpu() for n in found)) == 0


@hopper
@pytest.mark.gpu
@pytest.mark.sm90
def test_a_graph_replays_both():
    static, other = on_device(seed=0), on_device(seed=1)
    right = [outputs(x, False) for x in (static, other)]
    tensors = [n for n, t in static.items() if isinstance(t, Tensor)]
    with forms(True) as seen, torch.no_grad():
        for _ in range(2):
            chunk_kda(**static)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o, _ = chunk_kda(**static)
        kept = {n: static[n].clone() for n in tensors}
        for turn in range(40):
            for n in tensors:
                static[n].copy_((other if turn % 2 else kept)[n])
            graph.replay()
            assert torch.equal(o, right[turn % 2]["o"]), turn
    assert all(seen)
