"""A call of chunk_kda from nothing but its problem: to make kernels ready before the first training step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from kernel_fun._common import device as devices
from kernel_fun.kda.call import BT, Problem
from kernel_fun.kda.ops import chunk_kda
from kernel_fun.kda.sequence_split import Cut, cut_of, forced

if TYPE_CHECKING:
    from torch import Tensor

TOKENS = 2 * BT + 2
"""Three chunks, the last partial."""
LONG_TOKENS = 64 * BT
"""Tokens of a sequence that give the forward of few chains forms of its own; T decides nothing else."""
LONG_WORK = 1 << 16
"""And tokens of all value heads together."""
FEW_CHAINS = 6
"""Chains that have them, where fewer do not."""
WIDE_COLUMNS, WIDEST_COLUMNS = 132 * 64, 192 * 64
"""Columns of V of all chains beyond which those forms take wide tiles, and up to which there are such."""
CHAINS = (66, 100, 132, 200, 264, 600)
"""Sequences times value heads, half to four times a GPU's SMs: state scans have forms for few and many."""


def small(problem: Problem, sequences: int = 1, tokens: int | None = None) -> Problem:
    """The problem with few tokens, TOKENS by default, and so many sequences."""
    T = TOKENS if tokens is None else tokens
    if problem.N is None:
        return replace(problem, B=sequences, T=T)
    return replace(problem, B=1, T=T, N=sequences)


ALONE = 40 * 128
"""Columns of V of all chains, where one scan fits the GPU at once and a second one beside it does not."""


def batches(problem: Problem) -> list[int]:
    """Numbers of sequences that among them meet every kernel of a head shape."""
    chains = (-(-ALONE // problem.V), *CHAINS)
    return sorted({1, *(-(-n // problem.HV) for n in chains)})


def arguments(problem: Problem, device: torch.device) -> dict[str, Any]:
    """Arguments of chunk_kda that make this problem, with random values."""
    generator = torch.Generator(device=device).manual_seed(0)

    def draw(*shape: int, dtype: str = "float32") -> Tensor:
        values = torch.randn(shape, generator=generator, device=device).to(getattr(torch, dtype))
        return values.requires_grad_(problem.needs_grad)

    p = problem
    shapes = ((p.H, p.K), (p.H, p.K), (p.HV, p.V), (p.HV, p.K), (p.HV,))
    names = ("q", "k", "v", "g", "beta")
    made: dict[str, Any] = {n: draw(p.B, p.T, *s, dtype=d) for n, s, d in zip(names, shapes, p.dtypes)}
    if p.gate == "log":
        made["g"] = torch.nn.functional.logsigmoid(made["g"].detach().float()).to(made["g"].dtype)
        made["g"].requires_grad_(p.needs_grad)
    else:
        made |= {"use_gate_in_kernel": True, "A_log": draw(p.HV), "dt_bias": draw(p.HV * p.K)}
        bound = -5.0 if p.lower_bound is None else p.lower_bound
        made["lower_bound"] = bound if p.gate == "bounded" else None
    if not p.l2norm:
        made["k"] = torch.nn.functional.normalize(made["k"].detach(), dim=-1).requires_grad_(p.needs_grad)
    if p.N is not None:
        made["cu_seqlens"] = torch.linspace(0, p.T, p.N + 1, device=device).long()
    if p.has_h0:
        state = (p.V, p.K) if p.state_v_first else (p.K, p.V)
        wide = "float64" if "float64" in p.dtypes else "float32"
        made["initial_state"] = draw(p.B if p.N is None else p.N, p.HV, *state, dtype=wide)
    return {
        **made,
        "output_final_state": p.wants_ht,
        "use_qk_l2norm_in_kernel": p.l2norm,
        "use_beta_sigmoid_in_kernel": p.beta_mode != "raw",
        "allow_neg_eigval": p.beta_mode == "sigmoid2",
        "state_v_first": p.state_v_first,
        "disable_recompute": p.keep,
        "chunk_size": p.chunk_size,
    }


def _many(problem: Problem, sequences: int) -> int:
    """The fewest tokens of so many sequences that make a long forward."""
    return max(LONG_TOKENS, -(-LONG_WORK // (sequences * problem.HV)))


def _long(problem: Problem, sequences: list[int]) -> list[int]:
    """Of these numbers of sequences, what stands for all whose long forwards have forms of their own."""
    fewest = max(min(sequences), -(-FEW_CHAINS // problem.HV))
    if problem.N is not None or fewest * problem.HV > CHAINS[0]:
        return []
    columns = problem.HV * problem.V
    wide = max(fewest, WIDE_COLUMNS // columns + 1)
    return sorted({fewest, wide} if wide <= max(sequences) and wide * columns <= WIDEST_COLUMNS else {fewest})


def tokens_like(problem: Problem, sequences: int) -> int:
    """The fewest tokens that meet the kernels of the problem's T."""
    many = _many(problem, sequences)
    return many if problem.N is None and many <= problem.T else TOKENS


def run(
    problem: Problem,
    device: torch.device,
    sequences: Iterable[int] = (1,),
    *,
    long: bool = False,
    tokens: int | None = None,
) -> Tensor:
    """The call with so many sequences of so many tokens, forward and where a gradient is needed backward,
    packed with bounds of either dtype; with ``long``, before it forwards of few of them with many
    tokens, and after it calls whose sequences are cut into segments, where heads are so few. Returns o of the
    first with few."""
    outputs: list[Tensor] = []
    sequences = list(sequences)
    for n in _long(problem, sequences) if long else ():
        made = arguments(small(problem, n, _many(problem, n)), device)
        with forced(None):  # more sequences have that form where each is too short to be cut
            _run(made, problem.needs_grad, backward=False)
    for n in sequences:
        made = arguments(small(problem, n, tokens), device)
        outputs.append(_run(made, problem.needs_grad))
        if problem.N is not None:
            outputs.append(_run({**made, "cu_seqlens": made["cu_seqlens"].int()}, problem.needs_grad))
    if long and cut_of(problem.HV, problem.K, problem.V, devices.of(device).sms) is not None:
        with forced(ANY_CUT):
            for n in batches(problem):  # a packing may have as many segments more as fit its tokens
                run(problem, device, [n], tokens=None if problem.N is None else BT * max(2, n))
    return outputs[0]


ANY_CUT = Cut(BT, 1 + BT)
"""Of sequences of TOKENS tokens; the length of a segment decides no kernel."""


def run_cut(problem: Problem, device: torch.device) -> Tensor | None:
    """The call with as many segments as the problem's own has, of one chunk each; None where none is cut."""
    cut = cut_of(problem.HV, problem.K, problem.V, devices.of(device).sms)
    if cut is None or cut.least > problem.T:
        return None
    own = problem.B if problem.N is None else problem.N
    segments = -(-problem.T // cut.tokens) if problem.N is None else problem.T // cut.tokens
    with forced(ANY_CUT):
        return run(problem, device, [own], tokens=BT * segments)


def _run(made: dict[str, Any], grad: bool, *, backward: bool = True) -> Tensor:
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        o, ht = chunk_kda(**made)
        if grad and backward:
            (o.float().sum() + (0.0 if ht is None else ht.sum())).backward()
    return o.detach()
