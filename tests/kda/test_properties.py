"""What must hold whatever the numbers are: causality, independence of sequences, repeatability.

"To the bit" means ``torch.equal``. Where a property is claimed to the bit it is asserted to the bit.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_fun.kda import chunk_kda
from kernel_fun.kda.reference import recurrent
from kernel_fun.testing import (
    REGIMES,
    assert_close,
    make_inputs,
    make_upstream,
    poisoned_empty,
    relative_error,
    run,
)

INF, NAN = math.inf, math.nan
TOKENS = ("q", "k", "v", "g", "beta")
ROWS = ("o", "dq", "dk", "dv", "dg", "dbeta")


def rows(x: dict[str, Any], part: slice) -> dict[str, Any]:
    """The call on some of its tokens."""
    return x | {name: x[name][:, part] for name in TOKENS}


def inputs_for(target: Any, regime: str, **fields: Any) -> dict[str, Any]:
    fields = {"T": 130, "HV": 4, "K": 8, "V": 12} | fields
    return make_inputs(regime, dtype=target.dtype, device=target.device, **fields)


def assert_same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


def check(target: Any, x: dict[str, Any]) -> dict[str, Tensor]:
    """Compare everything with the recurrence."""
    up = make_upstream(x)
    ref, out = run(recurrent, x, **up, double=True), run(target.op, x, **up)
    for name in ref:
        assert_close(name, ref[name], out[name], dtype=target.dtype)
    return out


# Causality


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("P", [1, 15, 17, 32, 63, 64, 65, 100])
def test_a_prefix_depends_on_nothing_after_it(target: Any, regime: str, P: int) -> None:
    """Outputs and gradients of the first P tokens, to the bit: later values, and how many there are."""
    x = inputs_for(target, regime, initial_state=True)
    do = make_upstream(x)["do"]
    do[:, P:] = 0  # the loss looks at the prefix only
    whole = run(target.op, x, do=do)

    other = inputs_for(target, regime, seed=9)
    changed = x | {n: torch.cat((x[n][:, :P], other[n][:, P:]), 1) for n in TOKENS}
    shorter = rows(x, slice(0, min(130, P + 7)))
    alone = rows(x, slice(0, P))
    for y in (changed, shorter, alone):
        out = run(target.op, y, do=do[:, : y["q"].shape[1]])
        for name in ROWS:
            assert torch.equal(whole[name][:, :P], out[name][:, :P]), name
            assert not out[name][:, P:].any() or name == "o", f"{name} after the last token used"
        assert torch.equal(whole["dh0"], out["dh0"])


def test_one_future_gate_moves_nothing_before_it(target: Any) -> None:
    """The anchor of a part-filled block must not be the last token (saturated bound, beta 1)."""
    x = make_inputs(T=22, H=4, K=32, dtype=target.dtype, beta="raw", l2norm=False)
    x["g"], x["beta"] = torch.full_like(x["g"], -5.0), torch.ones_like(x["beta"])
    do = make_upstream(x)["do"]
    do[:, 21] = 0
    before = run(target.op, x, do=do)
    for gate in (-0.01, -1000.0, -INF):
        x["g"] = x["g"].clone()
        x["g"][:, 21] = gate
        after = run(target.op, x, do=do)
        for name in ROWS:
            assert torch.equal(before[name][:, :21], after[name][:, :21]), name


# Sequences


@pytest.mark.parametrize("regime", REGIMES)
def test_packed_equals_separate_to_the_bit(target: Any, regime: str) -> None:
    lengths = (0, 37, 64, 1, 0, 65, 130, 2)
    x = inputs_for(target, regime, seqlens=lengths, tail=3, initial_state=True, output_final_state=True)
    up = make_upstream(x)
    packed = run(target.op, x, **up)
    partial: dict[str, list[Tensor]] = {"dA_log": [], "ddt_bias": []}
    first = 0
    for n, length in enumerate(lengths):
        part, n = slice(first, first + length), slice(n, n + 1)
        first += length
        y = rows(x, part) | {"cu_seqlens": None, "initial_state": x["initial_state"][n]}
        alone = run(target.op, y, do=up["do"][:, part], dht=up["dht"][n])
        for name in ROWS:
            assert torch.equal(packed[name][:, part], alone[name]), name
        for name in ("ht", "dh0"):
            assert torch.equal(packed[name][n], alone[name]), name
        for name, parts in partial.items():
            if name in alone:
                parts.append(alone[name].double())
    for name, parts in partial.items():
        if parts:
            assert_close(name, torch.stack(parts).sum(0), packed[name], dtype=target.dtype)


@pytest.mark.parametrize("regime", ["bounded", "precomputed"])
def test_a_row_does_not_depend_on_the_rest_of_the_batch(target: Any, regime: str) -> None:
    x = inputs_for(target, regime, B=5, T=70, initial_state=True, output_final_state=True)
    up = make_upstream(x)
    batch = run(target.op, x, **up)
    for b in (0, 3, 4):
        row = slice(b, b + 1)
        y = x | {name: x[name][row] for name in (*TOKENS, "initial_state")}
        alone = run(target.op, y, do=up["do"][row], dht=up["dht"][row])
        for name in (*ROWS, "ht", "dh0"):
            assert torch.equal(batch[name][row], alone[name]), name


def test_dense_equals_packed_to_the_bit(target: Any) -> None:
    x = inputs_for(target, "bounded", B=3, T=70, initial_state=True, output_final_state=True)
    up = make_upstream(x)
    dense = run(target.op, x, **up)
    flat = x | {name: x[name].flatten(0, 1)[None] for name in TOKENS}
    for dtype in (torch.int32, torch.int64):
        for host in (None, torch.tensor([0, 70, 140, 210])):
            flat["cu_seqlens"] = torch.tensor([0, 70, 140, 210], dtype=dtype, device=target.device)
            flat["cu_seqlens_cpu"] = host
            packed = run(target.op, flat, do=up["do"].flatten(0, 1)[None], dht=up["dht"])
            for name in dense:
                assert torch.equal(dense[name].reshape(packed[name].shape), packed[name]), name


@pytest.mark.parametrize("where", ["initial_state", "v", "k", "g", "beta", "do"])
def test_a_nan_stays_in_its_sequence(target: Any, where: str) -> None:
    lengths = (70, 5, 0, 66)
    x = inputs_for(target, "precomputed", seqlens=lengths, initial_state=True, output_final_state=True)
    up = make_upstream(x)
    clean = run(target.op, x, **up)
    victim = slice(70, 75)
    if where == "do":
        up["do"][:, victim] = NAN
    elif where == "initial_state":
        x["initial_state"][1] = NAN
    else:
        x[where][:, victim] = NAN
    dirty = run(target.op, x, **up)
    seen = dirty["dv"] if where == "do" else dirty["o"]
    assert seen[:, victim].isnan().any(), "the NaN was swallowed"
    for name in ROWS:
        for part in (slice(0, 70), slice(75, 141)):
            assert torch.equal(clean[name][:, part], dirty[name][:, part]), name
    for name in ("ht", "dh0"):
        for n in (0, 2, 3):
            assert torch.equal(clean[name][n], dirty[name][n]), name


def test_chunks_restart_at_each_sequence(target: Any) -> None:
    check(target, inputs_for(target, "softplus_random", seqlens=(37, 64)))


@pytest.mark.parametrize("seqlens", [(64,), (128, 64), (0, 64, 0), ()], ids=str)
@pytest.mark.parametrize("tail", [1, 64, 65])
def test_whole_chunks_before_rows_of_no_sequence(target: Any, seqlens: tuple[int, ...], tail: int) -> None:
    states = {"initial_state": True, "output_final_state": True}
    out = check(target, inputs_for(target, "bounded", seqlens=seqlens, tail=tail, **states))
    for name in ROWS:
        assert not out[name][:, sum(seqlens) :].any(), name


@pytest.mark.parametrize("T", [*range(1, 20), 31, 32, 33, 47, 48, 49, 62, 63, 64, 65, 66, 127, 128, 129])
def test_every_length(backend: str, T: int) -> None:
    x = make_inputs("bounded", T=T, K=8, V=4, initial_state=True, output_final_state=True)
    up = make_upstream(x)
    ref, out = run(recurrent, x, **up, double=True), run(chunk_kda, x, **up)
    for name in ref:
        assert_close(name, ref[name], out[name])


# States


@pytest.mark.parametrize("regime", ["softplus_random", "precomputed"])
def test_no_state_is_a_state_of_zeros(target: Any, regime: str) -> None:
    """P1: and asking for the final state changes nothing else."""
    x = inputs_for(target, regime, output_final_state=True)
    do = make_upstream(x)["do"]
    none = run(target.op, x, do=do)
    zeros = torch.zeros(1, 4, 8, 12, dtype=target.wide, device=target.device)
    zero = run(target.op, x | {"initial_state": zeros}, do=do)
    quiet = run(target.op, x | {"output_final_state": False}, do=do)
    assert zero.pop("dh0").any()
    assert_same_bits(none, zero)
    none.pop("ht")
    assert_same_bits(none, quiet)


@pytest.mark.parametrize("alias", [False, True])
def test_the_two_state_layouts_are_the_same_numbers(target: Any, alias: bool) -> None:
    x = inputs_for(target, "bounded", initial_state=True, output_final_state=True)
    up = make_upstream(x)
    k_first = run(target.op, x, **up)
    y = x | {"initial_state": x["initial_state"].mT.contiguous()}
    if alias:
        y.pop("state_v_first")
        with pytest.warns(DeprecationWarning, match="state_v_first"):
            v_first = run(target.op, y | {"transpose_state_layout": True}, do=up["do"], dht=up["dht"].mT)
    else:
        v_first = run(target.op, y | {"state_v_first": True}, do=up["do"], dht=up["dht"].mT)
    for name in ("ht", "dh0"):
        assert v_first[name].is_contiguous()
        v_first[name] = v_first[name].mT
    assert_same_bits(k_first, v_first)


def test_the_final_state_is_its_own_memory_and_the_initial_one_is_untouched(target: Any) -> None:
    x = inputs_for(target, "bounded", T=3, initial_state=True, output_final_state=True)
    before = x["initial_state"].clone()
    _, ht = target.op(**x)
    ht.fill_(7.0)
    assert torch.equal(x["initial_state"], before)
    assert ht.untyped_storage().nbytes() == ht.nbytes, "the state keeps a larger buffer alive"

    x = inputs_for(target, "bounded", T=0, initial_state=True, output_final_state=True)
    before = x["initial_state"].clone()
    _, ht = target.op(**x)
    ht.fill_(7.0)
    assert torch.equal(x["initial_state"], before), "the state of no token must be a copy"


@pytest.mark.parametrize("chunk_size", [32, 64])
@pytest.mark.parametrize("fields", [{"B": 2}, {"seqlens": (70, 0, 64, 1)}], ids=["dense", "packed"])
@pytest.mark.parametrize("v_first", [False, True])
def test_intermediate_states(target: Any, chunk_size: int, fields: Any, v_first: bool) -> None:
    x = inputs_for(
        target, "bounded", initial_state=True, output_final_state=True, state_v_first=v_first, **fields
    )
    extra = {"return_intermediate_states": True, "chunk_size": chunk_size}
    with torch.inference_mode():
        o, ht, h = target.op(**x, **extra)
    ref_o, ref_ht, ref_h = recurrent(**x, **extra)
    assert h.dtype == x["k"].dtype
    assert h.is_contiguous()
    for name, ref, out in (("o", ref_o, o), ("ht", ref_ht, ht), ("h", ref_h, h)):
        assert_close(name, ref, out, dtype=target.dtype)


def test_chunk_size_changes_nothing(target: Any) -> None:
    x = inputs_for(target, "bounded")
    do = make_upstream(x)["do"]
    assert_same_bits(run(target.op, x | {"chunk_size": 32}, do=do), run(target.op, x, do=do))


# Switches that choose kernels, not mathematics


@pytest.mark.parametrize(
    "idle",
    [{"safe_gate": True}, {"disable_recompute": True}, {"use_graph": True}, {"max_num_seqs": 2}],
    ids=lambda idle: next(iter(idle)),
)
def test_a_switch_without_meaning_changes_no_bit(target: Any, idle: dict[str, Any]) -> None:
    x = inputs_for(target, "bounded", seqlens=(70, 60))
    do = make_upstream(x)["do"]
    assert_same_bits(run(target.op, x, do=do), run(target.op, x | idle, do=do))


def test_activations_inside_and_outside_agree(target: Any) -> None:
    """In-kernel gate, sigmoid and norm against the same computed by the caller in float32."""
    x = inputs_for(target, "softplus_random")
    outside = x | {"use_gate_in_kernel": False, "use_beta_sigmoid_in_kernel": False}
    A, bias = outside.pop("A_log").exp(), outside.pop("dt_bias")
    wide = target.wide
    raw = x["g"].to(wide) + bias.reshape(4, 8)
    outside["g"] = -A[:, None] * torch.nn.functional.softplus(raw)
    outside["beta"] = x["beta"].to(wide).sigmoid()
    inside, given = target.op(**x)[0], target.op(**outside)[0]
    assert_close("o", given.double(), inside, dtype=target.dtype)
    if target.dtype in (torch.bfloat16, torch.float16):
        differing = (inside != given).double().mean()
        assert differing < 0.01, "the same numbers were rounded differently"


def test_the_norm_flag_is_neither_ignored_nor_implied(target: Any) -> None:
    x = inputs_for(target, "precomputed", T=70)
    check(target, x | {"q": 3 * x["q"], "k": 2 * x["k"]})
    o = check(target, x)["o"]
    scaled = target.op(**x | {"q": 3 * x["q"], "k": 2 * x["k"]})[0]
    assert relative_error(o, scaled) < 5e-3, "the flag was ignored"

    x = inputs_for(target, "precomputed", T=70, l2norm=False)
    o = check(target, x | {"k": 0.5 * x["k"]})["o"]
    doubled = target.op(**x | {"q": 2 * x["q"], "k": 0.5 * x["k"]})[0]
    assert relative_error(2 * o, doubled) < 5e-3, "q was normalised without being asked"


# Decays and norms at their edges


@pytest.mark.parametrize(
    "gates",
    [
        {":": -27.6},  # exp(-cumsum) overflows
        {":": -6.0},  # 16 tokens span more than float32 can hold
        {":": -90.0, "1:": 0.0},  # total decay underflows, the rest does not decay
        {":": 0.0},
        {":": 0.0, "::3": -INF},
        {":": -1000.0},
        {":": -INF},
        {":": -1e-12},  # 0 in float16
    ],
    ids=str,
)
def test_extreme_given_gates(target: Any, gates: dict[str, float]) -> None:
    x = inputs_for(target, "precomputed", T=70, initial_state=True, output_final_state=True)
    for part, gate in gates.items():
        first, _, step = part.partition(":")
        x["g"][:, int(first or 0) :: int(step.lstrip(":") or 1)] = gate
    check(target, x)


def test_channels_of_one_token_may_decay_apart(target: Any) -> None:
    x = inputs_for(target, "precomputed", T=70, initial_state=True, output_final_state=True)
    x["g"][..., 0], x["g"][..., 1] = -20.0, -0.001
    check(target, x)


def test_no_decay_is_deltanet(target: Any) -> None:
    """g = 0 against the delta rule written without a gate."""
    x = inputs_for(target, "precomputed", T=70, HV=2, l2norm=False, beta="raw")
    x["g"] = torch.zeros_like(x["g"])
    q, k, v, beta = (x[name].double() for name in ("q", "k", "v", "beta"))
    S, o = torch.zeros(1, 2, 8, 12, dtype=torch.float64), []
    for t in range(70):
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S))
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], u)
        o.append(8**-0.5 * torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    assert_close("o", torch.stack(o, 1), target.op(**x)[0], dtype=target.dtype)


@pytest.mark.parametrize(
    ("raw", "A_log", "lower_bound"),
    [
        (-200.0, 100.0, None),  # exp(A_log) overflows, softplus underflows: the product is -3.7e-44
        (-18.0, math.log(1e6), None),  # softplus(-18) must not be 0
        (30.0, 3.0, None),
        (3.0, 100.0, -5.0),  # saturated at the bound
        (-3.0, 100.0, -5.0),  # saturated at no decay
        (0.0, 80.0, -5.0),  # the steepest slope float32 can hold
        (50.0, 0.0, -5.0),
        (-50.0, 0.0, -5.0),
    ],
)
def test_extreme_gates_in_the_kernel(
    backend: str, raw: float, A_log: float, lower_bound: float | None
) -> None:
    x = make_inputs("softplus_random", T=70, K=12, initial_state=True, output_final_state=True)
    x |= {"lower_bound": lower_bound, "A_log": torch.full_like(x["A_log"], A_log)}
    x["dt_bias"] = torch.zeros_like(x["dt_bias"])
    x["g"] = torch.full_like(x["g"], raw)
    up = make_upstream(x)
    ref, out = run(recurrent, x, **up, double=True), run(chunk_kda, x, **up)
    for name in ref:
        assert_close(name, ref[name], out[name])


@pytest.mark.parametrize("raw", [100.0, -100.0])
def test_a_large_A_log_in_float16(backend: str, raw: float) -> None:
    """exp(12) overflows float16: gates are computed in float32 whatever the parameter's dtype."""
    x = make_inputs("softplus_random", T=20, dtype=torch.float16, param_dtype=torch.float16)
    x["A_log"] = torch.full_like(x["A_log"], 12.0)
    x["g"] = torch.full_like(x["g"], raw)
    up = make_upstream(x)
    ref, out = run(recurrent, x, **up, double=True), run(chunk_kda, x, **up)
    for name in ref:
        assert_close(name, ref[name], out[name], dtype=torch.float16)


@pytest.mark.parametrize("who", ["q", "k"])
@pytest.mark.parametrize("norm", [0.0, 1e-3])
def test_padding_rows_of_zeros_and_rows_near_eps(target: Any, who: str, norm: float) -> None:
    """x / sqrt(sum x^2 + 1e-6): a zero row stays zero and its gradient is at most 1000 upstream."""
    x = inputs_for(target, "precomputed", T=70)
    row = x[who][:, :5].double()
    row = norm * row / torch.linalg.vector_norm(row, dim=-1, keepdim=True)
    x[who][:, :5] = row.to(target.dtype)
    out = check(target, x)
    assert out[f"d{who}"].isfinite().all()
    if norm == 0.0 and who == "q":
        assert not out["o"][:, :5].any()


@pytest.mark.parametrize("K", [1, 3, 60, 100, 256])
@pytest.mark.parametrize("V", [1, 5, 100])
def test_head_dims_of_any_size(backend: str, K: int, V: int) -> None:
    """K = 1 is given normalised: the norm of one channel leaves a gradient of rounding errors."""
    fields = {"initial_state": True, "output_final_state": True, "l2norm": K > 1}
    x = make_inputs("bounded", T=66, H=1, HV=2, K=K, V=V, **fields)
    up = make_upstream(x)
    ref, out = run(recurrent, x, **up, double=True), run(chunk_kda, x, **up)
    for name in ref:
        assert_close(name, ref[name], out[name])


# Memory and repeatability


@pytest.mark.parametrize("regime", ["softplus_random", "spikes"])
def test_poisoned_allocations_change_no_bit(target: Any, regime: str) -> None:
    x = inputs_for(target, regime, seqlens=(70, 0, 3), tail=5, initial_state=True, output_final_state=True)
    up = make_upstream(x)
    clean = run(target.op, x, **up)
    with poisoned_empty():
        poisoned = run(target.op, x, **up)
        with torch.inference_mode():
            o, ht, h = target.op(**x, return_intermediate_states=True)
    assert_same_bits(clean, poisoned)
    assert torch.equal(o, clean["o"])
    assert torch.equal(ht, clean["ht"])
    assert not h.isnan().any()


def test_inputs_are_never_modified(target: Any) -> None:
    x = inputs_for(target, "bounded", seqlens=(70, 0, 3), tail=5, initial_state=True, output_final_state=True)
    up = make_upstream(x)
    tensors = {n: a for n, a in (x | up).items() if isinstance(a, Tensor)}
    before = {name: a.clone() for name, a in tensors.items()}
    versions = {name: a._version for name, a in tensors.items()}
    run(target.op, x, **up)
    for name, a in tensors.items():
        assert torch.equal(a, before[name]), name
        assert a._version == versions[name], name


def test_two_runs_give_the_same_bits_on_two_threads(target: Any) -> None:
    x = inputs_for(target, "precomputed", T=260, H=4, K=16, V=16, beta="raw")
    x["g"] = torch.zeros_like(x["g"])
    do = make_upstream(x)["do"]
    torch.set_num_threads(2)
    assert_same_bits(run(target.op, x, do=do), run(target.op, x, do=do))


def test_calls_from_two_threads_do_not_meet(backend: str) -> None:
    """Same shapes, other data, interleaved: each call gets its own answer to the bit."""
    problems = [make_inputs("bounded", T=70, seed=seed, initial_state=True) for seed in (1, 2)]
    ups = [make_upstream(x) for x in problems]
    alone = [run(chunk_kda, x, **up) for x, up in zip(problems, ups, strict=True)]
    failures: list[str] = []

    def work(i: int) -> None:
        for _ in range(20):
            out = run(chunk_kda, problems[i], **ups[i])
            failures.extend(name for name in out if not torch.equal(out[name], alone[i][name]))

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_prefill_then_decode_is_the_whole(backend: str, dtype: torch.dtype) -> None:
    """The rule serving systems ask for: prefill of T tokens against prefill of T - 8 and 8 steps."""
    x = make_inputs("bounded", T=80, dtype=dtype, output_final_state=True)
    o, ht = chunk_kda(**x)
    part, state = chunk_kda(**rows(x, slice(0, 72)))
    steps = [part]
    for t in range(72, 80):
        part, state = chunk_kda(**rows(x, slice(t, t + 1)), initial_state=state)
        steps.append(part)
    limit = 1e-5 if dtype == torch.float32 else 4e-3
    assert (torch.cat(steps, 1) - o).abs().max() <= limit * o.abs().max()
    assert (state - ht).abs().max() <= limit * ht.abs().max()
