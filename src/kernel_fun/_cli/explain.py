"""`kernel-fun explain`: which implementation runs each stage of a call, and why no other does."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from kernel_fun._cli.screen import Screen
from kernel_fun._common import config, device
from kernel_fun._common.plan import Plan

if TYPE_CHECKING:
    from kernel_fun.kda.call import Problem

HELP = (
    "show the plan for a chunk_kda call, for this machine or any architecture; exit status 1 if "
    "KERNEL_FUN_KERNELS lacks a kernel of it"
)

FAILED = 1
"""Exit status where the plan stands and its kernels do not."""
DTYPES = ("bfloat16", "float16", "float32", "float64")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arch", choices=device.ARCHS, help="plan for this architecture (default: this machine)"
    )
    problem_arguments(parser)


def problem_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that describe a chunk_kda call."""
    add = parser.add_argument
    add("--B", type=_size, default=1, metavar="N", help="batch (default: 1)")
    add("--T", type=_size, default=8192, metavar="N", help="tokens (default: 8192)")
    add("--H", type=_size, default=16, metavar="N", help="query/key heads (default: 16)")
    add("--HV", type=_size, metavar="N", help="value heads (default: H)")
    add("--K", type=_size, default=128, metavar="N", help="key head dim (default: 128)")
    add("--V", type=_size, metavar="N", help="value head dim (default: K)")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of every input (default: bfloat16)")
    add(
        "--gate",
        choices=("softplus", "bounded", "log"),
        default="softplus",
        help="in-kernel softplus or bounded gate, or a given log decay (default: softplus)",
    )
    add(
        "--lower-bound",
        type=float,
        metavar="X",
        help="of the bounded gate, as --lower-bound=-5 (default: -5)",
    )
    add(
        "--beta",
        choices=("sigmoid", "sigmoid2", "raw"),
        default="sigmoid",
        help="write strength: sigmoid or its double in the kernel, or given (default: sigmoid)",
    )
    add("--packed", type=_count, metavar="N", help="N packed sequences (cu_seqlens) of T tokens in all")
    add("--chunk-size", type=int, choices=(32, 64), default=64)
    for flag, default, what in (
        ("l2norm", True, "q and k normalised in the kernel"),
        ("grad", True, "a gradient is needed"),
        ("initial-state", False, "a state comes in"),
        ("final-state", False, "a state goes out"),
        ("v-first", False, "states are [V, K]"),
        ("keep", False, "disable_recompute: keep the states for the backward"),
        ("context-parallel", False, "a cp_context: the batch lies on several ranks"),
    ):  # fmt: skip
        add(f"--{flag}", action=argparse.BooleanOptionalAction, default=default, help=what)


def _size(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {value}")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def problem(args: argparse.Namespace) -> Problem:
    """The problem the flags describe; ValueError names the flag that contradicts another."""
    from kernel_fun.kda.call import Problem, check_bound

    HV = args.H if args.HV is None else args.HV
    if args.H < 1:
        raise ValueError(f"`--H` must be at least 1, got {args.H}")
    if HV < 1 or HV % args.H:
        raise ValueError(f"`--HV` must be a positive multiple of --H = {args.H}, got {HV}")
    if not 1 <= args.K <= 256:
        raise ValueError(f"`--K` must be between 1 and 256, got {args.K}")
    if args.packed is not None and args.B != 1:
        raise ValueError(f"`--B` must be 1 with --packed, got {args.B}")
    check_bound("--lower-bound", args.lower_bound, args.gate)
    return Problem(
        B=args.B,
        T=args.T,
        H=args.H,
        HV=HV,
        K=args.K,
        V=args.K if args.V is None else args.V,
        N=args.packed,
        dtypes=(args.dtype,) * 5,
        gate=args.gate,
        lower_bound=args.lower_bound,
        beta_mode=args.beta,
        l2norm=args.l2norm,
        state_v_first=args.v_first,
        has_h0=args.initial_state,
        wants_ht=args.final_state,
        needs_grad=args.grad,
        keep=args.keep,
        chunk_size=args.chunk_size,
        context_parallel=args.context_parallel,
    )


def run(args: argparse.Namespace, screen: Screen) -> tuple[int, dict[str, Any]]:
    from kernel_fun.kda.dispatch import plan

    decided = plan(problem(args), this_device() if args.arch is None else device.named(args.arch))
    held = prebuilt(decided)
    lacking = held is not None and held["lacking"] > 0
    if held is not None:
        _show_prebuilt(held, screen)
    show(decided, screen)
    if lacking:
        screen.line(f"but kernels of it are missing from {config.KERNELS.name}: the call would raise", "red")
    return FAILED if lacking else 0, {**as_json(decided), "prebuilt": held}


def prebuilt(plan: Plan) -> dict[str, Any] | None:
    """Whether ``KERNEL_FUN_KERNELS`` holds what a plan of Hopper's kernels launches; None where it is not
    set, or other backends serve the call."""
    place = config.KERNELS.read()
    if plan.backend != "sm90" or not place:
        return None
    from kernel_fun import warming
    from kernel_fun._cute import objects

    found = [
        {
            "kernel": f"{jit.module.rpartition('.')[2]} {kernel_config}",
            "reason": objects.refusal(jit.module, kernel_config, jit.options),
        }
        for jit, kernel_config in warming.kernels([plan.problem], plan.backend, exactly=True, of_length=True)
    ]
    lacking = sum(k["reason"] is not None for k in found)
    held = (
        f"{config.KERNELS.name}={place} holds {len(found) - lacking} of the {len(found)} kernels of this call"
    )
    return {
        "summary": f"kernels are missing: {held}" if lacking else held,
        "lacking": lacking,
        "kernels": found,
    }


def _show_prebuilt(held: dict[str, Any], screen: Screen) -> None:
    """The summary, and each reason once, after the kernels that lack for it."""
    lacking = [k for k in held["kernels"] if k["reason"] is not None]
    screen.line(held["summary"], "red" if lacking else None)
    for reason in dict.fromkeys(k["reason"] for k in lacking):
        names = dict.fromkeys(k["kernel"].partition(" ")[0] for k in lacking if k["reason"] == reason)
        screen.line(f"  {', '.join(names)}: {reason}")


def this_device() -> device.Device:
    """The device a call on this machine would use by default: the first GPU, else the CPU."""
    import torch

    return device.of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def show(plan: Plan, screen: Screen) -> None:
    """Draws a plan: a row per stage, and one per candidate that does not run it."""
    rows: list[tuple[str, str, str]] = []
    for choice in plan.choices:
        runs = "nothing" if choice.impl is None else choice.impl.target
        rows.append((choice.stage, runs, "" if choice.impl is None else choice.impl.backend))
        rows.extend(("", f"  not {backend}", reason) for backend, reason in choice.rejected)
    screen.line(f"{plan.family}: {plan.problem}", "bold")
    screen.table(
        f"on {plan.device.arch} ({plan.device.name})", ("stage", "runs", "backend, or why not"), rows
    )
    screen.line(served_by(plan), "bold")


def served_by(plan: Plan) -> str:
    """One sentence: what serves the call, and why it is not a GPU backend of ours."""
    if plan.backend == "fla":
        return f"served by fla, verbatim, because {plan.reason}"
    if plan.reason is None:
        return f"served by {plan.backend}"
    return f"served by {plan.backend}, because {plan.reason}"


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain data."""
    from dataclasses import asdict

    return {
        "family": plan.family,
        "problem": asdict(plan.problem),
        "device": asdict(plan.device),
        "backend": plan.backend,
        "reason": plan.reason,
        "fallback": plan.fallback,
        "stages": [
            {
                "stage": choice.stage,
                "backend": None if choice.impl is None else choice.impl.backend,
                "implementation": None if choice.impl is None else choice.impl.target,
                "rejected": [{"backend": b, "reason": why} for b, why in choice.rejected],
            }
            for choice in plan.choices
        ],
    }
