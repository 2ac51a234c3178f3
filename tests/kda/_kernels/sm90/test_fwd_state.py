"""fwd_state for Hopper: what it refuses, what it compiles to, and, on the device, what it computes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from chunk_decays import around
from products import waits

pytest.importorskip("cutlass")

from kernel_fun._common import device as devices
from kernel_fun._cute import inspect, pipe
from kernel_fun._cute.tile import SMEM_BYTES
from kernel_fun._cute.varlen import sequence_chunks
from kernel_fun.kda._kernels.eager import fwd_state as eager
from kernel_fun.kda._kernels.eager.fwd_intra import fwd_intra
from kernel_fun.kda._kernels.sm90 import fwd_state as kernel
from kernel_fun.kda._kernels.sm90.fwd_state import Config
from kernel_fun.kda._kernels.sm90.scan_config import BT
from kernel_fun.kda.call import Call


def config(**changes: Any) -> Config:
    given = dict(
        io="bfloat16", g="bfloat16", beta="bfloat16", K=128, BV=128, gate="softplus", beta_mode="sigmoid",
        l2norm=True, has_h0=True, want_ht=True,
    )  # fmt: skip
    return Config(**{**given, **changes})


RESCAN = dict(want_o=False, want_ht=False, want_h=True, want_v_new=True)


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERNEL_FUN_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        yield


# what is compiled

BOX = [
    config(
        io=io, g=g, beta=io, K=K, BV=BV, want_o=o, want_h=keep, want_v_new=keep, l2norm=l2norm, index=index
    )
    for io in ("bfloat16", "float16")
    for g in (io, "float32")
    for K in (64, 128)
    for BV in (64, 128)
    for o, keep in ((True, False), (True, True), (False, True))
    if not (o and keep and g == "float32" and BV == 128 and K == 128)
    for l2norm in (False, True)
    for index in ("", "int64")
]


def test_every_config_fits_an_sm():
    for c in BOX:
        assert c.smem_bytes <= SMEM_BYTES
        assert c.raw_stages >= 2
        assert pipe.register_budget(c.threads, (c.build, c.state)) >= 0


COMPILED = [
    config(),
    config(g="float32", gate="log", has_A_log=False, has_dt_bias=False, index="int32"),
    config(
        K=64, BV=64, io="float16", g="float16", beta="float16", gate="bounded", want_h=True, want_v_new=True,
        state_v_first=True,
    ),
    config(**RESCAN),
    config(want_o=False),
]  # fmt: skip


@pytest.mark.parametrize(
    "c", COMPILED, ids=lambda c: f"{c.io}-{c.g}-{c.K}-{c.BV}-{c.gate}-{c.index}-{c.want_o}"
)
def test_compiles_within_its_resources(c: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    sizes = []
    storage = kernel.KdaFwdStateSm90.storage

    def measured(self: Any) -> Any:
        struct = storage(self)
        sizes.append(struct.size_in_bytes())
        return struct

    monkeypatch.setattr(kernel.KdaFwdStateSm90, "storage", measured)
    content = kernel._compile.object(c)
    (found,) = inspect.resources(content)
    assert "kda_fwd_state_sm90" in found.name
    assert found.stack_bytes == 0
    assert found.registers <= min(255, 65536 // c.threads)
    assert sizes == [c.smem_bytes]
    # with fewer registers than a STATE thread wants, ptxas waits after every product
    assert len(waits(content, tmp_path)) <= 4


# the launcher


def tensors(B: int = 1, T: int = 65, H: int = 1, HV: int = 2, K: int = 64, V: int = 64) -> dict[str, Any]:
    io = torch.bfloat16

    def new(*shape: int, dtype: torch.dtype = io) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    return dict(
        q=new(B, T, H, K), k=new(B, T, H, K), v=new(B, T, HV, V), g=new(B, T, HV, K), beta=new(B, T, HV),
        A=new(B, T, HV, BT), Aqk=new(B, T, HV, BT), q_rstd=new(B, T, H, dtype=torch.float32),
        k_rstd=new(B, T, H, dtype=torch.float32), total=new(B * -(-T // BT), HV, 9 * K, dtype=torch.float32), h0=None,
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
    (dict(total=torch.zeros(2, 2, 64)), ValueError, r"`total` must have shape \[2, 2, 576\]"),
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
    with pytest.raises(ValueError, match="V must be a multiple of 64, got 32"):
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


def test_v_tile_ends_first_by_counts_alone():
    assert kernel._v_tile(256, 256, 132, wide=False) == 128
    assert kernel._v_tile(256, 256, 132, wide=True) == 64
    assert kernel._v_tile(256, 192, 132, wide=False) == 64
    # 64 while its CTAs fit the device at once, 128 where that needs fewer waves
    assert [kernel._v_tile(n, 128, 132, wide=False) for n in (32, 66, 67, 96, 132)] == [64, 64, 128, 128, 128]
    assert [kernel._v_tile(n, 128, 78, wide=False) for n in (32, 39, 40)] == [64, 64, 128]


def test_a_rescan_reads_neither_q_nor_Aqk(monkeypatch: pytest.MonkeyPatch):
    calls = []
    monkeypatch.setattr(kernel, "_compile", lambda config: lambda *args: calls.append((config, args)))
    flags = {**FLAGS, **RESCAN}
    o, ht, h, v_new = kernel.fwd_state(**tensors(T=70), **flags)
    ((found, args),) = calls
    assert o is ht is None
    assert h is not None
    assert v_new is not None
    assert h.shape == (2, 2, 64, 64)
    assert v_new.shape == (1, 70, 2, 64)
    assert (found.want_o, found.want_h, found.want_v_new) == (False, True, True)
    assert args[0] is args[6] is args[15] is None
    with pytest.raises(ValueError, match="one of `want_o`, `want_ht`, `want_h` and `want_v_new`"):
        kernel.fwd_state(**tensors(), **{**flags, "want_h": False, "want_v_new": False})


def test_a_summary_is_the_final_state_alone(monkeypatch: pytest.MonkeyPatch):
    calls = []
    monkeypatch.setattr(kernel, "_compile", lambda config: lambda *args: calls.append((config, args)))
    o, ht, h, v_new = kernel.fwd_state(**tensors(T=70), **{**FLAGS, "want_o": False})
    ((found, args),) = calls
    assert o is h is v_new is None
    assert ht is not None
    assert ht.shape == (1, 2, 64, 64)
    assert (found.want_o, found.want_ht, found.want_h, found.want_v_new) == (False, True, False, False)
    assert args[0] is args[6] is None


def test_an_address_tma_cannot_take_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernel, "_compile", lambda config: lambda *args: None)
    x = tensors()
    x["v"] = torch.zeros(x["v"].numel() + 1, dtype=torch.bfloat16)[1:].view(x["v"].shape)
    with pytest.raises(ValueError, match="`v` must begin at a multiple of 16 bytes"):
        kernel.fwd_state(**x, **FLAGS)


# on the device


def on_hopper(test: Any) -> Any:
    """Marks of a test that needs the device."""
    absent = not torch.cuda.is_available() or devices.of(torch.device("cuda")).arch != "sm90"
    for mark in (pytest.mark.gpu, pytest.mark.sm90, pytest.mark.skipif(absent, reason="needs a Hopper GPU")):
        test = mark(test)
    return test


def case(
    kind: str, T: int, *, B=1, H=2, HV=4, K=128, V=128, io=torch.bfloat16, wide=False, ends=None
) -> Call:
    """A random call with an initial state; ``ends``: of its sequences, tokens after the last are NaN."""

    def r(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda")

    g, A_log, dt_bias = r(B, T, HV, K), r(HV), r(HV, K)
    if kind == "slow":
        A_log = torch.empty(HV, device="cuda").uniform_(1, 16).log()
        dt = torch.empty(HV, K, device="cuda").uniform_(math.log(1e-3), math.log(1e-1)).exp()
        g, dt_bias = 0.2 * g, dt + torch.log(-torch.expm1(-dt))
    spikes = kind.startswith("-")
    if spikes:
        hit = (torch.rand_like(g) < 0.03) | (torch.rand_like(g[..., :1]) < 0.03)
        g = torch.where(hit, float(kind), torch.nn.functional.logsigmoid(g))
    q, k, v = (x.to(io) for x in (r(B, T, H, K), r(B, T, H, K), r(B, T, HV, V)))
    g, beta = (x if wide else x.to(io) for x in (g, r(B, T, HV)))
    if ends is not None:
        for x in (q, k, v, g, beta):
            x[:, ends[-1] :] = math.nan
    N = B if ends is None else len(ends)
    return Call(
        q, k, v, g, beta, None if spikes else A_log, None if spikes else dt_bias, 0.3 * r(N, HV, K, V),
        None if ends is None else torch.tensor([0, *ends], device="cuda"), None, scale=K**-0.5,
        gate={"bounded": "bounded"}.get(kind, "log" if spikes else "softplus"), lower_bound=-5.0,
        beta_mode="sigmoid", l2norm=True, state_v_first=False, output_final_state=True,
        return_intermediate_states=False, disable_recompute=False, chunk_size=64, use_graph=False, max_num_seqs=None,
        context_parallel=False, unknown=(), verbatim={},
    )  # fmt: skip


@contextmanager
def tile_of(BV: int | None) -> Generator[None]:
    """Within the block the V tile is BV; None: the launcher's choice."""
    with pytest.MonkeyPatch.context() as patch:
        if BV is not None:
            patch.setattr(kernel, "_v_tile", lambda *_, **__: BV)
        kernel.prepare.cache_clear()
        yield
        kernel.prepare.cache_clear()


def check(
    call: Call,
    *,
    v_first: bool = False,
    has_h0: bool = True,
    tiles: tuple[int | None, ...] = (None,),
    **wants: bool,
) -> None:
    """Against the eager stage in fp64, on the same rounded A and Aqk; twice a V tile, over poisoned outputs."""
    from kernel_fun.testing import poisoned_empty

    q, v, cu = call.q, call.v, call.cu_seqlens
    (B, T, _, K), HV = q.shape, v.shape[2]
    if not has_h0:
        call = dataclasses.replace(call, initial_state=None)
    h0 = call.initial_state
    exact = call.with_tensors(
        tuple(None if x is None else x.double() for x in call.tensors()), call.cu_seqlens
    )
    intra = fwd_intra(exact)
    A, Aqk = (torch.zeros_like(x, dtype=q.dtype).copy_(x) for x in (intra.A, intra.Aqk))
    rounded = intra._replace(A=A.double(), Aqk=Aqk.double())
    want = eager.scan(exact, rounded, output=True, keep=True)
    inside = torch.ones(T, dtype=torch.bool, device="cuda")
    if cu is not None:
        inside[int(cu[-1]) :] = False
        for x in (A, Aqk):
            x[:, ~inside] = math.nan
    N = B if cu is None else cu.numel() - 1
    chunks = eager.layout(exact)
    total = torch.full(
        (B * -(-T // 64) if cu is None else -(-T // 64) + N, HV, 9 * K), math.nan, device="cuda"
    )
    for tile in chunks.tiles(HV):
        a = eager.operands.decays(chunks, exact, tile, torch.float64)
        total[tile] = around(a).unflatten(0, (-1, HV)).float()

    def state(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(-1, -2).contiguous() if v_first else x

    def run() -> tuple[torch.Tensor | None, ...]:
        return kernel.fwd_state(
            q, call.k, v, call.g, call.beta, A, Aqk, intra.q_rstd.float(), intra.k_rstd.float(), total,
            None if h0 is None else state(h0), call.A_log, call.dt_bias,
            None if cu is None else (cu, sequence_chunks(cu)), scale=call.scale, gate=call.gate,
            lower_bound=call.lower_bound, beta_mode=call.beta_mode, l2norm=True, state_v_first=v_first,
            **{"want_ht": True, "want_h": False, "want_v_new": False, **wants},
        )  # fmt: skip

    runs: list[tuple[torch.Tensor | None, ...]] = []
    for BV in tiles:
        with tile_of(BV), poisoned_empty():
            runs += [run(), run()]
    found, *others = runs
    NT = chunks.NT
    bound = 6e-3 if q.dtype == torch.bfloat16 else 1e-3
    for n, (name, x, true) in enumerate(zip(("o", "ht", "h", "v_new"), found, want, strict=True)):
        if x is None:
            continue
        assert true is not None
        rows = slice(NT) if name == "h" else (slice(None), inside)
        if name == "ht":
            rows = slice(None)
        elif name != "h":
            if cu is not None:
                assert not x[:, ~inside].any(), f"{name} was written outside the sequences"
            true = true[:, inside]
        x = x[rows]
        for other in others:
            y = other[n]
            assert y is not None
            assert torch.equal(x, y[rows]), f"{name} differs between two runs"
        x = state(x) if name == "ht" else x
        error = ((x.double() - true).norm() / (true.norm() + 1e-30)).item()
        assert error < bound, f"{name}: {error:.1e}"


@pytest.mark.parametrize("T", [1, 15, 16, 63, 64, 65, 130, 1000])
@pytest.mark.parametrize("kind", ["softplus", "slow", "bounded", "-1000", "-inf"])
@on_hopper
def test_dense(kind: str, T: int):
    check(case(kind, T, B=2))


@pytest.mark.parametrize("kind", ["slow", "-inf"])
@pytest.mark.parametrize("lengths", [[1, 0, 63, 64, 65, 0, 15, 92], [0, 0, 5], [300]], ids=str)
@pytest.mark.parametrize("wants", [{}, RESCAN], ids=["o", "rescan"])
@on_hopper
def test_packed(kind: str, lengths: list[int], wants: dict[str, bool]):
    ends = list(itertools.accumulate(lengths))
    check(case(kind, ends[-1] + 9, ends=ends), **wants)


@pytest.mark.parametrize("io", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("K", "V"), [(64, 64), (64, 128), (128, 192), (128, 256)])
@on_hopper
def test_dtypes_and_sizes(io: torch.dtype, wide: bool, K: int, V: int):
    check(case("slow", 130, io=io, wide=wide, K=K, V=V), want_h=True, want_v_new=True)


@pytest.mark.parametrize(
    "changes", [RESCAN, dict(want_o=False), dict(has_h0=False), dict(v_first=True)], ids=str
)
@on_hopper
def test_forms(changes: dict[str, bool]):
    check(case("slow", 200), **changes)


@pytest.mark.parametrize("kind", ["softplus", "bounded", "-inf"])
@pytest.mark.parametrize("wants", [{}, RESCAN], ids=["o", "rescan"])
@pytest.mark.parametrize("packed", [False, True])
@on_hopper
def test_the_bits_do_not_depend_on_the_tile(kind: str, packed: bool, wants: dict[str, bool]):
    ends = list(itertools.accumulate([1, 0, 63, 64, 65, 0, 15, 92]))
    call = case(kind, ends[-1] + 9, V=256, ends=ends) if packed else case(kind, 200, B=2)
    check(call, tiles=(128, 64), **wants)


@pytest.mark.parametrize("io", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("K", [64, 128])
@on_hopper
def test_the_wide_tile(io: torch.dtype, wide: bool, K: int):
    check(case("slow", 130, io=io, wide=wide, K=K), tiles=(128, 64))
