"""bwd_state for Hopper: what it refuses, what it compiles to, and, on the device, what it computes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from chunk_decays import around
from products import disassembled, waits

pytest.importorskip("cutlass")

from kernel_fun._common import device as devices
from kernel_fun._cute import inspect, pipe
from kernel_fun._cute.tile import SMEM_BYTES
from kernel_fun._cute.varlen import sequence_chunks
from kernel_fun.kda._kernels.eager import bwd_state as eager
from kernel_fun.kda._kernels.eager.fwd_intra import fwd_intra
from kernel_fun.kda._kernels.sm90 import bwd_state as module
from kernel_fun.kda._kernels.sm90.bwd_state import Config, bwd_state
from kernel_fun.kda.call import Call

FULL = Config(
    io="bfloat16", g="bfloat16", beta="bfloat16", K=128, BV=128, gate="softplus", beta_mode="sigmoid",
    l2norm=True, has_dht=True, want_dh0=True,
)  # fmt: skip
SUMMARY = dataclasses.replace(FULL, want_dh=False)
WIDE = dataclasses.replace(
    FULL, g="float32", beta="float32", gate="log", has_A_log=False, has_dt_bias=False, index="int64"
)


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERNEL_FUN_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        yield


@pytest.mark.parametrize("config", [FULL, WIDE, SUMMARY], ids=["full", "wide-packed", "summary"])
def test_compiles_within_its_resources(config: Config, monkeypatch, tmp_path):
    sizes = []
    storage = module.KdaBwdStateSm90.storage

    def measured(self: Any) -> Any:
        struct = storage(self)
        sizes.append(struct.size_in_bytes())
        return struct

    monkeypatch.setattr(module.KdaBwdStateSm90, "storage", measured)
    content = module._compile.object(config)
    (kernel,) = inspect.resources(content)
    assert "kda_bwd_state_sm90" in kernel.name
    assert kernel.registers <= pipe.registers_at_entry(config.threads)
    assert kernel.stack_bytes <= (8 if config.is_packed else 0)  # at most an address, read outside the loop
    assert sizes == [config.smem_bytes]
    # dv2 may be waited for twice, once a group; y leaves the product of do in flight; the last drains
    assert waits(content, tmp_path) == [0, 0, 1, 0]


def test_a_summary_stores_and_stages_nothing_but_its_result(tmp_path):
    """Bulk stores are of dh and dv2."""
    assert SUMMARY.bytes_with(2) == FULL.bytes_with(2) - 2 * FULL.BV * module.BLOCK
    stores = [disassembled(module._compile.object(c), tmp_path).count("UTMASTG") for c in (FULL, SUMMARY)]
    assert stores[0] > 0
    assert stores[1] == 0


def test_every_config_fits_an_sm():
    seen = 0
    for io, wide, K, BV, l2norm in itertools.product(
        ("bfloat16", "float16"), (False, True), (64, 128), (64, 128), (False, True)
    ):
        config = dataclasses.replace(
            FULL, io=io, g="float32" if wide else io, beta=io, K=K, BV=BV, l2norm=l2norm
        )
        assert config.smem_bytes <= SMEM_BYTES
        assert config.raw_stages >= 2
        assert pipe.register_budget(config.threads, (config.build, config.state)) >= 0
        seen += config.raw_stages
    assert seen > 2 * 32


@pytest.mark.parametrize(
    "changes",
    [dict(io="float32"), dict(g="float16"), dict(K=96), dict(BV=32), dict(gate="exp"), dict(index="int16")],
)
def test_a_config_outside_the_box_is_refused(changes: dict[str, Any]):
    with pytest.raises(ValueError, match=f"`{next(iter(changes))}`"):
        dataclasses.replace(FULL, **changes)


def test_a_config_that_wants_nothing_is_refused():
    with pytest.raises(ValueError, match="`want_dh` and `want_dh0`"):
        dataclasses.replace(SUMMARY, want_dh0=False)


def arguments(B=1, T=70, H=1, HV=2, K=64, V=64, device="cpu", **changes: Any) -> dict[str, Any]:
    """Finite arguments with zero A and Aqk: what the launcher looks at."""

    def z(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    f32 = torch.float32
    NT = B * -(-T // 64)
    x = dict(
        q=z(B, T, H, K), k=z(B, T, H, K), g=z(B, T, HV, K), beta=z(B, T, HV), A=z(B, T, HV, 64), Aqk=z(B, T, HV, 64),
        q_rstd=z(B, T, H, dtype=f32), k_rstd=z(B, T, H, dtype=f32), total=z(NT, HV, 9 * K, dtype=f32), do=z(B, T, HV, V),
        dht=z(B, HV, K, V, dtype=f32), A_log=z(HV, dtype=f32), dt_bias=z(HV, K, dtype=f32), table=None,
        scale=0.1, gate="softplus", lower_bound=None, beta_mode="raw", l2norm=True, state_v_first=False, want_dh0=True,
    )  # fmt: skip
    return x | changes


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("q", torch.zeros(1, 70, 1, 64), TypeError),
        ("k", torch.zeros(1, 70, 1, 128, dtype=torch.bfloat16), ValueError),
        ("g", torch.zeros(1, 70, 2, 64, dtype=torch.float16), TypeError),
        ("g", torch.zeros(1, 70, 64, 2, dtype=torch.bfloat16).transpose(2, 3), ValueError),
        ("beta", torch.zeros(1, 70, 1, dtype=torch.bfloat16), ValueError),
        ("A", torch.zeros(1, 70, 2, 68, dtype=torch.bfloat16)[..., :64], ValueError),
        ("Aqk", torch.zeros(1, 70, 2, 64), TypeError),
        ("q_rstd", None, ValueError),
        ("k_rstd", torch.zeros(1, 1, 70).transpose(1, 2).expand(1, 70, 1).contiguous()[:, :69], ValueError),
        ("total", torch.zeros(1, 2, 64), ValueError),
        ("do", torch.zeros(1, 70, 2, 64), TypeError),
        ("dht", torch.zeros(1, 2, 64, 128), ValueError),
        ("dht", torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16), TypeError),
        ("A_log", torch.zeros(1), ValueError),
        ("dt_bias", torch.zeros(128), ValueError),
        ("lower_bound", None, ValueError),
        ("table", (torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)), (TypeError, ValueError)),
    ],
)  # fmt: skip
def test_an_argument_that_does_not_fit_is_named(name: str, value: Any, error: Any):
    x = arguments(**{name: value}, **(dict(gate="bounded") if name == "lower_bound" else {}))
    with pytest.raises(error, match="`total`|`table" if name == "table" else f"`{name}`"):
        bwd_state(**x)


def test_without_any_gradient_there_is_nothing_to_do():
    with pytest.raises(ValueError, match="`do` or `dht`"):
        bwd_state(**arguments(do=None, dht=None))


def test_heads_and_columns_must_divide():
    with pytest.raises(ValueError, match="multiple of those of `q`"):
        bwd_state(**arguments(H=2, HV=3))
    with pytest.raises(ValueError, match="V must be a multiple of 64"):
        bwd_state(**arguments(V=96))


@pytest.mark.parametrize("given", [True, False])
def test_no_tokens_pass_the_gradient_of_the_state_on(given: bool):
    dht = torch.randn(2, 2, 64, 64)
    x = arguments(B=2, T=0, dht=dht if given else None)
    dh, dv2, dh0 = bwd_state(**x)
    assert dh.shape == (0, 2, 64, 64)
    assert dv2.shape == (2, 0, 2, 64)
    assert torch.equal(dh0, dht if given else torch.zeros_like(dht))


@pytest.mark.parametrize("v_first", [False, True])
def test_the_launcher_describes_the_call(v_first: bool, monkeypatch):
    calls = []
    monkeypatch.setattr(module, "_compile", lambda config: lambda *args: calls.append((config, args)))
    first = torch.tensor([0, 1, 2], dtype=torch.int32)
    table = torch.tensor([0, 30, 70], dtype=torch.int32), first
    x = arguments(K=128, V=192, table=table, state_v_first=v_first, want_dh0=False, dht=None, gate="log")
    x["total"] = torch.zeros(4, 2, 9 * 128)
    dh, dv2, dh0 = bwd_state(**x)
    ((config, args),) = calls
    assert config == Config(
        io="bfloat16", g="bfloat16", beta="bfloat16", K=128, BV=64, gate="log", beta_mode="raw", l2norm=True,
        has_A_log=False, has_dt_bias=False, state_v_first=v_first, index="int32", has_do=True, has_dht=False,
        want_dh0=False,
    )  # fmt: skip
    want = [
        *(x[n] for n in ("q", "k", "g", "beta", "A", "Aqk", "q_rstd", "k_rstd", "total", "do")),
        None,
        None,
        None,
    ]
    assert all(a is b for a, b in zip(args, [*want, *table, dh, dv2, None]))
    assert args[18:] == (0.1, 0.0)
    assert dh.shape == (4, 2, 128, 192)
    assert not dv2.any()
    assert dh0 is None


@pytest.mark.parametrize("v_first", [False, True])
def test_a_summary_allocates_nothing_but_its_result(v_first: bool, monkeypatch):
    calls = []
    monkeypatch.setattr(module, "_compile", lambda config: lambda *args: calls.append((config, args)))
    dht = torch.zeros((1, 2, 192, 64) if v_first else (1, 2, 64, 192))
    found = bwd_state(**arguments(V=192, state_v_first=v_first, want_dh=False, dht=dht))
    ((config, args),) = calls
    assert not config.want_dh
    assert args[15:18] == found == (None, None, found[2])
    assert found[2].shape == dht.shape
    with pytest.raises(ValueError, match="`want_dh` and `want_dh0`"):
        bwd_state(**arguments(want_dh=False, want_dh0=False))


def on_hopper(test: Any) -> Any:
    """Marks of a test that needs the device."""
    absent = not torch.cuda.is_available() or devices.of(torch.device("cuda")).arch != "sm90"
    for mark in (pytest.mark.gpu, pytest.mark.sm90, pytest.mark.skipif(absent, reason="needs a Hopper GPU")):
        test = mark(test)
    return test


def case(
    kind: str, T: int, *, B=1, H=2, HV=4, K=128, V=128, io=torch.bfloat16, wide=False, ends=None
) -> Call:
    """A random call; ``ends``: of its sequences, tokens after the last are NaN."""

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
    return Call(
        q, k, v, g, beta, None if spikes else A_log, None if spikes else dt_bias, None,
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
            patch.setattr(module, "v_tile", lambda *_: BV)
        module.prepare.cache_clear()
        yield
        module.prepare.cache_clear()


def check(
    call: Call, *, has_do: bool = True, has_dht: bool = True, v_first: bool = False,
    tiles: tuple[int | None, ...] = (None,), alone: bool = False,
) -> None:  # fmt: skip
    """Against the eager stage in fp64, on the same rounded A and Aqk; twice a V tile, over poisoned outputs.

    ``alone``: dh0 of the form that gives nothing else has the same bits."""
    from kernel_fun.testing import poisoned_empty

    q, v = call.q, call.v
    (B, T, _, K), (HV, V), cu = q.shape, v.shape[2:], call.cu_seqlens
    N = B if cu is None else cu.numel() - 1
    exact = call.with_tensors(
        tuple(None if x is None else x.double() for x in call.tensors()), call.cu_seqlens
    )
    intra = fwd_intra(exact)
    A, Aqk = (torch.zeros_like(x, dtype=q.dtype).copy_(x) for x in (intra.A, intra.Aqk))
    rounded = intra._replace(A=A.double(), Aqk=Aqk.double())
    do = torch.randn(B, T, HV, V, device="cuda").to(q.dtype) if has_do else None
    dht = torch.randn(N, HV, K, V, device="cuda") if has_dht else None
    inside = torch.ones(T, dtype=torch.bool, device="cuda")
    if cu is not None:
        inside[int(cu[-1]) :] = False
        for x in (A, Aqk, do):
            if x is not None:
                x[:, ~inside] = math.nan
    exact = dataclasses.replace(
        exact, initial_state=torch.zeros(N, HV, K, V, device="cuda", dtype=torch.float64)
    )
    dO, dS = (None if x is None else x.double() for x in (do, dht))
    want = eager.bwd_state(exact, rounded, dO, dS, None, None)
    table = None if cu is None else (cu, sequence_chunks(cu))
    chunks = eager.layout(exact)
    total = torch.full(
        (B * -(-T // 64) if cu is None else -(-T // 64) + N, HV, 9 * K), math.nan, device="cuda"
    )
    for tile in chunks.tiles(HV):
        a = eager.operands.decays(chunks, exact, tile, torch.float64)
        total[tile] = around(a).unflatten(0, (-1, HV)).float()

    def state(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(-1, -2).contiguous() if v_first else x

    arguments = (
        q, call.k, call.g, call.beta, A, Aqk, intra.q_rstd.float(), intra.k_rstd.float(), total, do,
        None if dht is None else state(dht), call.A_log, call.dt_bias, table,
    )  # fmt: skip
    forms = dict(
        scale=call.scale, gate=call.gate, lower_bound=call.lower_bound, beta_mode=call.beta_mode, l2norm=True,
        state_v_first=v_first, want_dh0=True,
    )  # fmt: skip
    runs = []
    for BV in tiles:
        with tile_of(BV), poisoned_empty():
            runs += [bwd_state(*arguments, **forms) for _ in range(2)]
            if alone:
                assert torch.equal(bwd_state(*arguments, **forms, want_dh=False)[2], runs[-1][2])
    (dh, dv2, dh0), *others = runs
    NT = want.dh.shape[0]
    for again in others:
        assert torch.equal(dh[:NT], again[0][:NT])
        assert torch.equal(dv2, again[1])
        assert torch.equal(dh0, again[2])
    if cu is not None:
        assert dh[NT:].isnan().all()
        assert not dv2[:, ~inside].any()
    bound = 6e-3 if q.dtype == torch.bfloat16 else 1e-3
    pairs = (dh[:NT], want.dh), (dv2[:, inside], want.dv2[:, inside]), (state(dh0), want.dh0)
    for name, (x, true) in zip(("dh", "dv2", "dh0"), pairs):
        error = ((x.double() - true).norm() / (true.norm() + 1e-30)).item()
        assert error < bound, f"{name}: {error:.1e}"


@pytest.mark.parametrize("T", [1, 15, 16, 63, 64, 65, 130, 1000])
@pytest.mark.parametrize("kind", ["softplus", "slow", "bounded", "-1000", "-inf"])
@on_hopper
def test_dense(kind: str, T: int):
    check(case(kind, T, B=2))


@pytest.mark.parametrize("kind", ["slow", "-inf"])
@pytest.mark.parametrize("lengths", [[1, 0, 63, 64, 65, 0, 15, 92], [0, 0, 5], [300]], ids=str)
@on_hopper
def test_packed(kind: str, lengths: list[int]):
    ends = list(itertools.accumulate(lengths))
    check(case(kind, ends[-1] + 9, ends=ends))


@pytest.mark.parametrize("io", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("K", "V"), [(64, 64), (64, 128), (128, 192), (128, 256)])
@on_hopper
def test_dtypes_and_sizes(io: torch.dtype, wide: bool, K: int, V: int):
    check(case("slow", 130, io=io, wide=wide, K=K, V=V))


@pytest.mark.parametrize("changes", [dict(has_do=False), dict(has_dht=False), dict(v_first=True)], ids=str)
@on_hopper
def test_forms(changes: dict[str, bool]):
    check(case("slow", 200), **changes)


@pytest.mark.parametrize(
    "changes",
    [{}, dict(has_do=False), dict(has_dht=False), dict(v_first=True), dict(tiles=(128, 64))],
    ids=str,
)
@on_hopper
def test_dh0_alone_has_the_same_bits(changes: dict[str, Any]):
    check(case("slow", 200, B=2), alone=True, **changes)


@pytest.mark.parametrize("K", [64, 128])
@on_hopper
def test_dh0_alone_of_a_packing_has_the_same_bits(K: int):
    ends = list(itertools.accumulate([1, 0, 63, 64, 65, 0, 15, 92]))
    check(case("-inf", ends[-1] + 9, K=K, wide=True, ends=ends), alone=True)


@pytest.mark.parametrize("kind", ["softplus", "bounded", "-inf"])
@pytest.mark.parametrize("packed", [False, True])
@on_hopper
def test_the_bits_do_not_depend_on_the_tile(kind: str, packed: bool):
    ends = list(itertools.accumulate([1, 0, 63, 64, 65, 0, 15, 92]))
    call = case(kind, ends[-1] + 9, V=256, ends=ends) if packed else case(kind, 200, B=2)
    check(call, tiles=(128, 64))


@pytest.mark.parametrize("io", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("K", [64, 128])
@on_hopper
def test_the_wide_tile(io: torch.dtype, wide: bool, K: int):
    check(case("slow", 130, io=io, wide=wide, K=K), tiles=(128, 64))
