"""One long sequence on many SMs: cut into segments a call is the uncut one, on the CPU in float64 with the eager
stages, on a Hopper GPU with the kernels, and its cost is where it pays alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_fun._common import config
from kernel_fun._common import device as devices
from kernel_fun.kda import chunk_kda, sequence_split
from kernel_fun.kda._kernels.eager import bwd_state as eager_bwd_state
from kernel_fun.kda._kernels.eager import fwd_state as eager_fwd_state
from kernel_fun.kda._kernels.eager.fwd_intra import fwd_intra
from kernel_fun.kda.call import Call, bind
from kernel_fun.kda.reference import chunked
from kernel_fun.kda.sequence_split import Backend, Cut, cut_of, fold, forced, segment_tables
from kernel_fun.kda.stages import Intra, ReverseScan, Scan
from kernel_fun.testing import assert_close, make_inputs, make_upstream, poisoned_empty, run

F64, BF16 = torch.float64, torch.bfloat16
STATES: dict[str, Any] = dict(initial_state=True, output_final_state=True)
SHORT = Cut(128, 130)
"""Two chunks a segment, so that 1000 tokens are many."""


# where


@pytest.mark.parametrize(
    ("HV", "K", "V", "cut"),
    [
        (1, 128, 128, (1024, 32768)),
        (2, 128, 128, (2048, 32768)),
        (4, 128, 128, (4096, 32768)),
        (8, 128, 128, (8192, 65536)),
        (9, 128, 128, None),
        (4, 128, 256, (8192, 65536)),
        (5, 128, 256, None),
        (16, 64, 64, (8192, 65536)),
        (17, 64, 64, None),
        (1, 64, 64, (512, 32768)),
    ],
)
def test_few_heads_are_cut(HV: int, K: int, V: int, cut: tuple[int, int] | None) -> None:
    assert cut_of(HV, K, V, 132) == (None if cut is None else Cut(*cut))


def test_a_gpu_of_unknown_size_cuts_nothing() -> None:
    assert cut_of(1, 128, 128, 0) is None


@pytest.mark.parametrize("cut", [Cut(100, 200), Cut(0, 1), Cut(64, 64)])
def test_a_segment_is_whole_chunks(cut: Cut) -> None:
    with pytest.raises(ValueError, match="`cut` must have a positive multiple of 64"), forced(cut):
        pass


# tables

LENGTHS = [
    [1000],
    [128],
    [129],
    [130],
    [256, 384],
    [0, 300, 0],
    [5, 130, 64, 700, 1, 0],
    [0],
]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("spare", [0, 3])
def test_segments_are_a_packing_of_the_same_chunks(lengths: list[int], spare: int) -> None:
    ends = list(itertools.accumulate((0, *lengths)))
    pieces: list[tuple[int, int, int]] = []  # sequence, begin, end
    for n, (lo, hi) in enumerate(itertools.pairwise(ends)):
        step = SHORT.tokens if hi - lo >= SHORT.least else max(1, hi - lo)
        pieces += [(n, at, min(at + step, hi)) for at in range(lo, max(hi, lo + 1), step)]
    S = len(pieces) + spare
    tables = segment_tables(torch.tensor(ends, dtype=torch.int32), S, SHORT)
    N, used = len(lengths), len(pieces)
    D = S - N
    assert (tables.size, tables.summarised, tables.entries) == (S, D, 2 * D - 1)
    assert all(t.dtype == torch.int32 for t in tables)
    assert tables.bounds.tolist() == [begin for _, begin, _ in pieces] + [ends[-1]] * (spare + 1)
    chunks = [0, *itertools.accumulate(-(-(end - begin) // 64) for _, begin, end in pieces)]
    assert tables.chunks.tolist() == chunks + [chunks[-1]] * spare
    first = [next((s for s, p in enumerate(pieces) if p[0] == n), used) for n in range(N + 1)]
    assert tables.first.tolist() == first
    assert tables.last.tolist() == [x - 1 for x in first[1:]]
    for table, numbers, skipped in (
        (tables.ahead, tables.ahead_chunks, tables.last),
        (tables.back, tables.back_chunks, tables.first),
    ):
        spans = list(itertools.pairwise(table.tolist()))
        assert all(lo >= hi for lo, hi in spans[1::2])  # gaps
        own = [s for s in range(used) if s not in skipped.tolist()]
        want = [pieces[s][1:] for s in own] + [(ends[-1], ends[-1])] * (D - len(own))
        assert spans[::2] == want[::-1]
        assert numbers.tolist() == [
            c for c in ([chunks[s] for s in own] + [chunks[-1]] * (D - len(own)))[::-1] for _ in "12"
        ]
        if skipped is tables.first:
            last = [n for n in range(N) if first[n + 1] - first[n] > 1]
            places = [
                2 * D - 1 if n not in last else 2 * (D - 1 - own.index(first[n + 1] - 1)) for n in range(N)
            ]
            assert tables.end.tolist() == places


# on the CPU


@pytest.fixture
def cutting(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """The eager stages cut long sequences; how many segments each scan was given."""
    monkeypatch.setenv(config.KDA_BACKEND.name, "eager")
    plain, plain_reverse = eager_fwd_state.fwd_state, eager_bwd_state.bwd_state
    seen: list[int] = []

    def scan(call: Call, intra: Intra, *, keep: bool, output: bool = True) -> Scan:
        seen.append(len(call.cu_seqlens) - 1 if call.cu_seqlens is not None else 0)
        return plain(call, intra, keep=keep, output=output)

    def reverse(call: Call, intra: Intra, *given: Tensor | None, only_dh0: bool = False) -> ReverseScan:
        assert [x is None for x in given[2:]] == [only_dh0] * 2
        seen.append(len(call.cu_seqlens) - 1 if call.cu_seqlens is not None else 0)
        return plain_reverse(call, intra, *given, only_dh0=only_dh0)

    by = Backend(scan, reverse, segment_tables, fold)

    def fwd_state(call: Call, intra: Intra, *, keep: bool, output: bool = True) -> Scan:
        cut = sequence_split.cut_for(call, 132)
        if cut is None or not sequence_split.has_long(call, cut):
            return plain(call, intra, keep=keep, output=output)
        return sequence_split.scan(call, intra, cut, by, keep=keep, output=output)

    def bwd_state(call: Call, intra: Intra, *given: Tensor | None, only_dh0: bool = False) -> ReverseScan:
        cut = sequence_split.cut_for(call, 132)
        if cut is None or not sequence_split.has_long(call, cut):
            return plain_reverse(call, intra, *given, only_dh0=only_dh0)
        return sequence_split.reverse(call, intra, cut, by, *given, only_dh0=only_dh0)

    monkeypatch.setattr(eager_fwd_state, "fwd_state", fwd_state)
    monkeypatch.setattr(eager_bwd_state, "bwd_state", bwd_state)

    def taken() -> list[int]:
        found = seen[:]
        seen.clear()
        return found

    return taken


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor], limit: float = 1e-10) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert (value - b[name]).abs().max() <= limit * max(1.0, float(value.abs().max())), name


SMALL: dict[str, Any] = dict(H=1, HV=2, K=8, V=8, dtype=F64)


@pytest.mark.parametrize(
    "fields",
    [
        dict(T=1000),
        dict(T=512),
        dict(T=513, **STATES),
        dict(T=300, B=2, **STATES),
        dict(T=384, B=2),
        dict(seqlens=(5, 300, 0, 64, 513, 129), tail=9, **STATES),
        dict(seqlens=(5, 300, 0, 64, 513, 129), tail=9, **STATES, state_v_first=True),
        dict(seqlens=(700,), V=12, **STATES, state_v_first=True),
        dict(seqlens=(300, 300), output_final_state=True),
        dict(T=400, regime="softplus_random", initial_state=True),
        dict(T=400, regime="bounded", HV=4, H=2),
        dict(T=400, regime="spikes", beta="raw", l2norm=False, **STATES),
    ],
    ids=str,
)
@pytest.mark.parametrize("keep", [False, True])
def test_cut_is_uncut(fields: dict[str, Any], keep: bool, cutting: Callable[[], list[int]]) -> None:
    x = make_inputs(**{**SMALL, **fields}) | {"disable_recompute": keep}
    up = make_upstream(x)
    with forced(None):
        want = run(chunk_kda, x, **up)
        assert cutting() == []
    with forced(SHORT):
        assert_equal(want, run(chunk_kda, x, **up))
        seen = cutting()
        S = seen[1]
        N = x["q"].shape[0] if x.get("cu_seqlens") is None else len(x["cu_seqlens"]) - 1
        entries = 2 * (S - N) - 1
        assert seen == ([entries, S, entries, entries, S] if keep else [entries, S, entries, S, entries, S])
        for name in up:
            some = {name: up[name]}
            with forced(None):
                want_some = run(chunk_kda, x, **some)
            assert_equal(want_some, run(chunk_kda, x, **some))


@pytest.mark.parametrize(
    "fields", [dict(T=300, B=2), dict(seqlens=(5, 300, 0, 129), state_v_first=True)], ids=str
)
def test_a_reverse_summary_is_cut(fields: dict[str, Any], cutting: Callable[[], list[int]]) -> None:
    x = make_inputs(**SMALL, **STATES, **fields)
    bound = signature(chunk_kda).bind(**x)
    bound.apply_defaults()
    call = bind(bound.arguments)
    intra, up = fwd_intra(call), make_upstream(x)
    with forced(None):
        want = eager_bwd_state.bwd_state(call, intra, up["do"], up["dht"], None, None).dh0
    assert want is not None
    assert cutting() == []
    with forced(SHORT):
        for some in (call, call.like(notes=call.notes.of(None), initial_state=None)):
            found = eager_bwd_state.bwd_state(some, intra, up["do"], up["dht"], None, None, only_dh0=True)
            assert found[:2] == found[3:] == (None, None)
            assert found.dh0 is not None
            assert (found.dh0 - want).abs().max() < 1e-12
            assert len(cutting()) == 3  # M, dS_loc, all segments


def test_a_dense_batch_of_spaced_rows_is_cut(cutting: Callable[[], list[int]]) -> None:
    """Rows that are no view of one row of tokens."""
    x = make_inputs(T=400, B=2, **SMALL)
    x["q"] = torch.cat((x["q"], x["q"]), 1)[:, :400]
    x["beta"] = x["beta"].transpose(0, 1).contiguous().transpose(0, 1)
    up = make_upstream(x)
    with forced(None):
        want = run(chunk_kda, x, **up)
    with forced(SHORT):
        assert_equal(want, run(chunk_kda, x, **up))
    assert cutting()


def test_intermediate_states_are_those_of_the_call(cutting: Callable[[], list[int]]) -> None:
    x = make_inputs(seqlens=(5, 300, 0, 513), **SMALL, **STATES) | {"return_intermediate_states": True}
    with torch.inference_mode():
        with forced(None):
            want = chunk_kda(**x)
        with forced(SHORT):
            found = chunk_kda(**x)
    assert cutting()
    for a, b in zip(want, found):
        assert (a - b).abs().max() < 1e-12


def test_known_lengths_that_are_short_are_not_cut(cutting: Callable[[], list[int]]) -> None:
    x = make_inputs(seqlens=(100, 129, 71), **SMALL)
    x["cu_seqlens_cpu"] = x["cu_seqlens"].clone()
    with forced(SHORT):
        chunk_kda(**x)
        assert cutting() == []
        chunk_kda(**x, use_graph=True, max_num_seqs=3)  # it is replayed with others
        assert cutting()
        chunk_kda(**x | {"cu_seqlens": (cu := torch.tensor([0, 100, 300])), "cu_seqlens_cpu": cu.clone()})
        assert cutting()


def test_a_sequence_does_not_know_its_batch(cutting: Callable[[], list[int]]) -> None:
    """Alone, dense, and packed among others that are cut elsewhere: near enough, and the fold to the bit."""
    lengths = (70, 400, 300, 64)
    x = make_inputs(seqlens=lengths, **SMALL, **STATES)
    ends = list(itertools.accumulate((0, *lengths)))
    with forced(SHORT):
        whole = run(chunk_kda, x)
        for n, (lo, hi) in enumerate(itertools.pairwise(ends)):
            own = {k: v[:, lo:hi] if k in ("q", "k", "v", "g", "beta") else v for k, v in x.items()}
            own.pop("cu_seqlens")
            own["initial_state"] = x["initial_state"][n : n + 1]
            alone = run(chunk_kda, own)
            assert (alone["o"] - whole["o"][:, lo:hi]).abs().max() < 1e-12
            assert (alone["ht"] - whole["ht"][n : n + 1]).abs().max() < 1e-12
    assert cutting()


def test_the_fold_runs_one_way_and_the_other() -> None:
    """Three segments, written out, the second of two sequences."""
    tables = segment_tables(torch.tensor([0, 100, 400], dtype=torch.int32), 4, SHORT)
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=F64)  # noqa: E731
    HV, K, V = 2, 64, 128
    x, given, local = draw(3, HV, K, V + K), draw(2, HV, K, V), draw(3, HV, K, V)
    L, M = x[..., :V], x[..., V:]
    one = L[2] + M[2] @ given[1]  # entries go from the last one to the first, every other one a gap
    two = L[0] + M[0] @ one
    found = fold(x, tables, given, None, False)
    assert (found - torch.stack((given[0], given[1], one, two))).abs().max() < 1e-12
    later = local[2] + M[0].mT @ local[0]
    found = fold(x, tables, given.mT, local.mT, True)
    assert (found.mT - torch.stack((given[0], later, local[0], given[1]))).abs().max() < 1e-12
    assert not fold(x, tables, None, None, False)[:2].any()


# what is compiled and launched


def test_a_fold_takes_the_heads_of_the_scans() -> None:
    pytest.importorskip("cutlass")
    from kernel_fun.kda._kernels.sm90 import segment_states, segment_tables

    with pytest.raises(ValueError, match="`K` must be 64 or 128, got 96"):
        segment_states.Config(K=96, reverse=False, given=False, state_v_first=False)
    with pytest.raises(ValueError, match="`index`"):
        segment_tables.Config("float32")


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("v_first", [False, True])
def test_compiles_without_a_stack(reverse: bool, v_first: bool, cache_dir: object) -> None:
    pytest.importorskip("cutlass")
    from kernel_fun._cute import inspect
    from kernel_fun.kda._kernels.sm90 import segment_states, segment_tables

    c = segment_states.Config(K=128, reverse=reverse, given=True, state_v_first=v_first)
    (kernel,) = inspect.resources(segment_states._compile.object(c))
    assert kernel.stack_bytes == 0
    assert kernel.registers <= 65536 // segment_states.THREADS
    tables = inspect.resources(segment_tables._compile.object(segment_tables.Config("int64")))
    assert all(k.stack_bytes == 0 and k.registers <= 64 for k in tables)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Any, tuple[Any, ...]]]]:
    """CPU tensors count as an H200's; a launch is recorded instead of made: name, config, arguments."""
    pytest.importorskip("cutlass")
    from kernel_fun._cute.compile import Jit

    seen: list[tuple[str, Any, tuple[Any, ...]]] = []

    def asked(self: Any, made: Any) -> Callable[..., None]:
        return lambda *given: seen.append((self.module.rpartition(".")[2], made, given))

    monkeypatch.setattr(Jit, "__call__", asked)
    monkeypatch.setattr("kernel_fun._common.support.missing", lambda need: None)
    monkeypatch.setenv(config.KDA_BACKEND.name, "sm90")
    with devices.pretend("sm90"):
        yield seen


FORWARD = ["segment_tables", "fwd_state", "segment_states", "fwd_state"]
BACKWARD = [
    "fwd_state",
    "segment_states",
    "fwd_state",
    "bwd_state",
    "segment_states",
    "bwd_state",
    "bwd_grads",
]


@pytest.mark.parametrize("fields", [dict(T=32768), dict(seqlens=(32768,)), dict(T=32768, B=2)], ids=str)
def test_a_long_call_of_few_heads_is_cut(fields: dict[str, Any], launched: list[Any]) -> None:
    heads: dict[str, Any] = dict(H=4, HV=4, K=128, V=128, dtype=BF16)
    x = {n: torch.empty(t.shape, dtype=t.dtype) if isinstance(t, Tensor) and t.dtype == BF16 else t
         for n, t in make_inputs("softplus_random", **{**heads, **fields}).items()}  # fmt: skip
    x["q"].requires_grad_()
    for _ in range(2):  # the second pass takes the plans of the first over
        launched.clear()
        o, _ = chunk_kda(**x)
        packed = "seqlens" in fields
        first = ["chunk_tables", "fwd_intra"] if packed else ["fwd_intra"]
        names = ["chunk_tables" if name == "packing" else name for name, *_ in launched]
        assert names == first + FORWARD
        start = next(given for name, c, given in launched if name == "fwd_state" and not c.want_o)[10]
        assert (start.stride()[:2], start.shape[1:]) == ((0, 0), (4, 128, 256))  # one for all: no copy
        before = len(launched)
        o.backward(o)
        assert [name for name, *_ in launched[before:]] == BACKWARD
        assert [c.want_dh for name, c, _ in launched if name == "bwd_state"] == [False, True]
        assert not any(getattr(c, f, False) for _, c, _ in launched for f in ("overlapped", "leads"))
        B = fields.get("B", 1)
        rows = {
            t.shape[0]
            for name, _, given in launched
            for t in given
            if isinstance(t, Tensor) and t.dim() == 4 and t.dtype == BF16 and t.shape[2:] == (128, 128)
            and name in ("fwd_state", "bwd_state", "bwd_grads") and t.shape[1] == 4 and t.shape[0] > 100
        }  # fmt: skip
        assert rows == {32768 // 64 * B + packed}  # h and dh of the call, whatever its segments


@pytest.mark.parametrize("fields", [dict(T=32767), dict(seqlens=(32767,)), dict(T=32768, H=9, HV=9)], ids=str)
def test_other_calls_are_not(fields: dict[str, Any], launched: list[Any]) -> None:
    heads: dict[str, Any] = dict(H=4, HV=4, K=128, V=128, dtype=BF16)
    with torch.no_grad():
        chunk_kda(**make_inputs("bounded", **{**heads, **fields}))
    assert [name for name, *_ in launched if name != "packing"] == ["fwd_intra", "fwd_state"]


def test_many_short_sequences_have_few_summaries(launched: list[Any]) -> None:
    """As far as a host knows that has not been told their lengths, there may be as many as fit the tokens."""
    x = make_inputs("bounded", seqlens=(64,) * 512, H=4, K=128, V=128, dtype=BF16)
    with torch.no_grad():
        chunk_kda(**x)
    (states,) = [given for name, _, given in launched if name == "segment_states"]
    assert states[0].shape[0] == 2 * (32768 // 4096) - 1
    assert states[-1].shape[0] == 512 + 32768 // 4096


# on the device

absent = not torch.cuda.is_available() or devices.of(torch.device("cuda")).arch != "sm90"


def on_hopper(test: Any) -> Any:
    for mark in (pytest.mark.skipif(absent, reason="needs a Hopper GPU"), pytest.mark.gpu, pytest.mark.sm90):
        test = mark(test)
    return test


HEADS: dict[str, Any] = dict(H=2, HV=4, K=128, V=128, dtype=BF16, device="cuda")
MANY = dict(H=8, HV=16)
"""dA_log is one number a head, a sum that nearly cancels in some: its norm means something over many."""
PACKED = (5, 300, 0, 64, 513, 129, 0)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Calls are forced onto the kernels and cut into segments of two chunks; which folds were launched."""
    from kernel_fun.kda._kernels.sm90 import segment_states, stages

    monkeypatch.setenv(config.KDA_BACKEND.name, "sm90")
    seen: list[str] = []

    def spied(summaries: Tensor, segments: Any, given: Any, local: Any, v_first: bool) -> Tensor:
        seen.append("forward" if local is None else "reverse")
        return segment_states.segment_states(summaries, segments, given, local, v_first)

    monkeypatch.setattr(stages, "SPLIT", stages.SPLIT._replace(fold=spied))
    with forced(SHORT):
        yield seen


def gpu_run(x: dict[str, Any], up: dict[str, Tensor]) -> dict[str, Tensor]:
    with poisoned_empty():
        return run(chunk_kda, x, **up)


def assert_right(ref: dict[str, Tensor], out: dict[str, Tensor], dtype: torch.dtype = BF16) -> None:
    assert ref.keys() == out.keys()
    for name, value in ref.items():
        assert_close(name, value, out[name], dtype=dtype)


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


@on_hopper
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    "lengths", [*LENGTHS, [3] * 1025, [0, 1, 300, 0] * 700, [200_000]], ids=lambda x: f"{len(x)}, {sum(x)}"
)
def test_tables_are_those_of_torch(lengths: list[int], dtype: torch.dtype) -> None:
    from kernel_fun.kda._kernels.sm90.segment_tables import segment_tables as on_device

    cu = torch.tensor([0, *lengths], dtype=dtype).cumsum(0).to("cuda", dtype)
    S = len(lengths) + sum(lengths) // SHORT.tokens
    for name, want, found in zip(
        sequence_split.Segments._fields, segment_tables(cu, S, SHORT), on_device(cu, S, SHORT)
    ):
        assert torch.equal(want, found), name


@on_hopper
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("K", "V"), [(128, 128), (64, 192)])
def test_the_fold_is_that_of_float64(K: int, V: int, reverse: bool, given: bool, v_first: bool) -> None:
    from kernel_fun.kda._kernels.sm90.segment_states import segment_states

    lengths = [5, 0, 1000, 300, 64, 2000, 0]
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    S = len(lengths) + int(ends[-1]) // SHORT.tokens
    tables = segment_tables(ends.cuda(), S, SHORT)
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator).cuda()  # noqa: E731
    E = 2 * (S - len(lengths)) - 1
    summaries = draw(E, 3, K, V + K)
    summaries[..., V:] /= 2 * K**0.5
    state = (V, K) if v_first else (K, V)
    more = (
        draw(len(lengths), 3, *state) if given else None,
        draw(E, 3, *state) if reverse else None,
        v_first,
    )
    with poisoned_empty():
        found = segment_states(summaries, tables, *more)
    h0, dh = (None if x is None else x.double() for x in more[:2])
    want = fold(summaries.double(), tables, h0, dh, v_first)
    assert (found - want).norm() <= 1e-6 * want.norm()
    used = int(tables.first[-1])
    assert used < S
    assert not found[used:].any()
    assert found[:used].isfinite().all()


DENSE: dict[str, Any] = dict(T=1000)
IN_PACK: dict[str, Any] = dict(seqlens=PACKED, tail=9, **STATES)


@on_hopper
@pytest.mark.parametrize(
    ("regime", "fields"),
    [
        *((regime, DENSE) for regime in ("softplus_random", "init_slow", "bounded", "spikes")),
        *((regime, IN_PACK) for regime in ("softplus_random", "init_slow", "spikes")),
        ("init_slow", dict(T=1024)),
        ("init_slow", dict(T=513, B=2)),
        ("softplus_random", dict(T=513, B=2, **STATES, state_v_first=True)),
        ("softplus_random", dict(T=700, K=64, V=192, **STATES)),
    ],
    ids=str,
)
def test_cut_calls_agree_with_float64(regime: str, fields: dict[str, Any], kernels: list[str]) -> None:
    x = make_inputs(**{**HEADS, **MANY, **fields, "regime": regime})
    up = make_upstream(x)
    out = gpu_run(x, up)
    assert kernels == ["forward", "forward", "reverse"]
    assert_right(run(chunked, x, **up, double=True), out)
    if regime == "softplus_random" and fields in (DENSE, IN_PACK):
        with forced(None):
            assert_right(gpu_run(x, up), out)
        assert len(kernels) == 3
    if x.get("cu_seqlens") is not None:
        for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
            assert not out[name][:, sum(PACKED) :].any(), name


@on_hopper
@pytest.mark.parametrize(("dtype", "g"), [(BF16, torch.float32), (torch.float16, None)], ids=str)
def test_cut_calls_of_other_forms(dtype: torch.dtype, g: torch.dtype | None, kernels: list[str]) -> None:
    x = make_inputs(
        "precomputed", T=600, **{**HEADS, **MANY, "dtype": dtype}, g_dtype=g, beta="raw", l2norm=False
    )
    up = make_upstream(x)
    assert_right(run(chunked, x, **up, double=True), gpu_run(x, up), dtype)
    assert kernels


@on_hopper
def test_what_is_cut_by_itself_agrees_with_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.KDA_BACKEND.name, "sm90")
    x = make_inputs("init_slow", T=33_000, H=8, HV=8, K=64, V=64, dtype=BF16, device="cuda")
    cut = cut_of(8, 64, 64, devices.of(torch.device("cuda")).sms)
    assert cut is not None
    assert cut.least <= 33_000
    up = make_upstream(x)
    out = gpu_run(x, up)
    with forced(None):
        uncut = gpu_run(x, up)
    assert_right({name: value.double() for name, value in uncut.items()}, out)
    assert not torch.equal(uncut["o"], out["o"])  # it was cut


@on_hopper
def test_gradients_of_one_output_alone(kernels: list[str]) -> None:
    x = make_inputs("softplus_random", T=700, **HEADS, **STATES)
    up = make_upstream(x)
    for name in up:
        assert_right(run(chunked, x, **{name: up[name]}, double=True), gpu_run(x, {name: up[name]}))
    assert kernels == ["forward", "forward", "reverse"] * 2


@on_hopper
def test_bits_of_cut_sequences(kernels: list[str]) -> None:
    """Two runs, states kept or rebuilt, alone or among others, a prefix: the same to the bit."""
    lengths = (65, 700, 128, 513, 17)
    x = make_inputs("softplus_random", seqlens=lengths, **HEADS, **STATES)
    up = make_upstream(x)
    whole = gpu_run(x, up)
    assert_same(whole, gpu_run(x, up))
    assert_same(whole, gpu_run({**x, "disable_recompute": True}, up))
    ends = list(itertools.accumulate((0, *lengths)))
    tokens = ("q", "k", "v", "g", "beta")
    for n, (lo, hi) in enumerate(itertools.pairwise(ends)):
        own = {k: v[:, lo:hi] if k in tokens else v for k, v in x.items() if k != "cu_seqlens"}
        own["initial_state"] = x["initial_state"][n : n + 1]
        alone = gpu_run(own, {"do": up["do"][:, lo:hi], "dht": up["dht"][n : n + 1]})
        for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
            assert torch.equal(alone[name], whole[name][:, lo:hi]), (name, n)
        for name in ("ht", "dh0"):
            assert torch.equal(alone[name], whole[name][n : n + 1]), (name, n)
        if hi - lo > 500:
            part = {k: v[:, :450] if k in tokens else v for k, v in own.items()}
            assert torch.equal(chunk_kda(**part)[0], alone["o"][:, :450])
    torch.use_deterministic_algorithms(True)
    try:
        assert_same(whole, run(chunk_kda, x, **up))
    finally:
        torch.use_deterministic_algorithms(False)
    assert kernels


@on_hopper
def test_nan_stays_in_its_sequence(kernels: list[str]) -> None:
    x = make_inputs("softplus_random", seqlens=(300, 400, 300), **HEADS)
    up = make_upstream(x)
    clean = run(chunk_kda, x, **up)
    for name in ("q", "k", "v", "g", "beta"):
        x[name][:, 500] = float("nan")
    spoiled = run(chunk_kda, x, **up)
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        for rows in (slice(0, 300), slice(700, 1000)):
            assert torch.equal(spoiled[name][:, rows], clean[name][:, rows]), name
    assert kernels


@on_hopper
@pytest.mark.parametrize("seqlens", [None, (700, 30, 0, 270)], ids=["dense", "packed"])
def test_a_graph_replays_a_cut_step(seqlens: tuple[int, ...] | None, kernels: list[str]) -> None:
    """Forward and backward, without a wait for the device, on other values and other boundaries."""
    cases = [make_inputs("softplus_random", T=1000, seqlens=seqlens, seed=s, **HEADS) for s in range(2)]
    if seqlens:
        cases[1]["cu_seqlens"] = torch.tensor([0, 7, 7, 450, 1000], device="cuda")
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
        return {"o": o, **dict(zip(leaves, torch.autograd.grad(o, tuple(leaves.values()), up["do"])))}

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for x, expected in zip(cases, want):
        with torch.no_grad():
            for name, value in x.items():
                if isinstance(value, Tensor):
                    static[name].copy_(value)
        graph.replay()
        for name, value in found.items():
            assert torch.equal(
                value, expected["ddt_bias" if name == "dt_bias" else name if name == "o" else f"d{name}"]
            ), name
    assert kernels
