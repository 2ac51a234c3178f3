"""The short convolution as it is benchmarked: inputs, candidates, oracle and floors.

    python -m benchmarks.cconv [--shape NAME ...] [--seconds S] [--results DIR]

checks every candidate on the tensors it is then timed on, times them interleaved in this process, and
writes one record. `cconv.fwd` is the op without a graph; `cconv.bwd` is its backward alone: dx and dw
from a saved forward.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernel_fun import testing
from kernel_fun._common import config, support
from kernel_fun.bench.suite import Candidate, Case, Outputs, Work
from kernel_fun.cconv import causal_conv1d, reference

NAME = "cconv"
PASSES = ("fwd", "bwd")
GATES = ("silu",)
"""What a KDA layer applies after the convolution."""

#: Relative error above which a candidate is not timed: a few roundings to the output's dtype for y and dx;
#: for the float32 dw, what a peer that rounds its pre-activation to bfloat16 needs.
_LIMITS = {
    torch.bfloat16: {"y": 4e-3, "dx": 6e-3, "dw": 1e-2},
    torch.float16: {"y": 5e-4, "dx": 1e-3, "dw": 2e-3},
    torch.float32: {"y": 1e-5, "dx": 1e-5, "dw": 1e-4},
}


@dataclass(frozen=True)
class Shape:
    """Sizes of one call: x [B, T, D], weight [D, W]; with ``lengths``, packed sequences of T tokens."""

    name: str
    B: int
    T: int
    D: int
    W: int = 4
    lengths: tuple[int, ...] | None = None

    @property
    def elements(self) -> int:
        return self.B * self.T * self.D

    def __str__(self) -> str:
        packed = f" {len(self.lengths)} sequences" if self.lengths else ""
        return f"{self.name} (B{self.B} T{self.T} D{self.D} W{self.W}{packed})"


_ALL = (
    Shape("b16_8k_d2048", 16, 8192, 2048),
    Shape("b16_8k_d4096", 16, 8192, 4096),
    Shape("packed_128k_d2048", 1, 131072, 2048, lengths=(*(1111,) * 117, 1085)),
    Shape("cpu_2k_d256", 1, 2048, 256),
)
SHAPES = {shape.name: shape for shape in _ALL}
DEFAULT = {"cpu": ("cpu_2k_d256",), "cuda": ("b16_8k_d2048", "b16_8k_d4096")}


def case(shape: Shape, gate: str, dtype: torch.dtype, device: torch.device) -> Case:
    """Seeded inputs, drawn on the device: x in the dtype asked for, a float32 weight of a layer's scale."""
    if gate not in GATES:
        raise ValueError(f"`gate` must be one of {', '.join(GATES)}, got {gate!r}")
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device, dtype=dtype)

    arguments: dict[str, Any] = {
        "x": normal(shape.B, shape.T, shape.D),
        "weight": torch.randn(shape.D, shape.W, generator=generator, device=device) * shape.W**-0.5,
        "activation": gate,
    }
    if shape.lengths is not None:
        bounds = torch.tensor([0, *shape.lengths]).cumsum(0)
        arguments.update(cu_seqlens=bounds.to(device), cu_seqlens_cpu=bounds)
    return Case(shape, gate, arguments, {"dy": normal(shape.B, shape.T, shape.D)}, _LIMITS[dtype])


def candidates(device: torch.device) -> list[Candidate]:
    """Our backends, then fla as it comes and fla with its Gluon kernels switched on."""
    no_gpu = None if device.type == "cuda" else f"tensor on {device.type}"
    return [
        Candidate("triton", no_gpu or support.missing("triton")),
        Candidate("eager"),
        Candidate("fla", no_gpu or support.missing("fla")),
        Candidate("fla-gluon", no_gpu or support.missing("fla")),
    ]


def caller(candidate: str, case: Case, what: str) -> Callable[[], Outputs]:
    """One pass of one candidate on the tensors of the case."""
    function, context = _function(candidate)
    if what == "fwd":

        def forward() -> Outputs:
            with context(), torch.no_grad():
                return {"y": function(**case.arguments)[0]}

        return forward

    leaves = {n: case.arguments[n].detach().requires_grad_() for n in ("x", "weight")}
    with context():
        y = function(**{**case.arguments, **leaves})[0]

    def backward() -> Outputs:
        with context():
            dx, dw = torch.autograd.grad(y, tuple(leaves.values()), case.upstream["dy"], retain_graph=True)
        return {"dx": dx, "dw": dw}

    return backward


@contextlib.contextmanager
def step(candidate: str, case: Case, what: str) -> Generator[Callable[[], object]]:
    """One pass of one candidate and nothing else."""
    function, context = _function(candidate)
    if what != "fwd":
        call = caller(candidate, case, what)
        with context():
            yield call
        return

    def forward() -> object:
        return function(**case.arguments)

    with context(), torch.no_grad():
        yield forward


def _function(
    candidate: str,
) -> tuple[Callable[..., Any], Callable[[], contextlib.AbstractContextManager[None]]]:
    """The function a candidate calls and the context it is called in."""
    if candidate.startswith("fla"):
        from fla.modules.convolution import causal_conv1d as peer  # pyright: ignore

        gluon = "1" if candidate == "fla-gluon" else "0"
        return peer, lambda: _GLUON.set(gluon)  # pyright: ignore
    return causal_conv1d, lambda: config.CCONV_BACKEND.set(candidate)


#: fla's own switch for its Gluon kernels, which are off unless asked for.
_GLUON = config.Switch("FLA_GLUON", "0", "1: fla uses its Gluon kernels")


def errors(case: Case, what: str, found: Mapping[str, Outputs]) -> dict[str, dict[str, float]]:
    """Relative error of every tensor of every candidate against the float64 oracle.

    Channels are independent, so 64 of them, from both ends, stand for all; every token is compared.
    """
    shape: Any = case.shape
    few = min(32, shape.D // 2)
    channels = torch.cat((torch.arange(few), torch.arange(shape.D - few, shape.D))).to(
        case.arguments["x"].device
    )

    def slice_of(name: str, t: Tensor) -> Tensor:
        return (t[channels] if name in ("weight", "dw") else t[..., channels]).double()

    arguments = {n: slice_of(n, a) if n in ("x", "weight") else a for n, a in case.arguments.items()}
    arguments.pop("cu_seqlens_cpu", None)
    if what == "fwd":
        truth = {"y": reference.causal_conv1d(**arguments)[0]}
    else:
        leaves = {n: arguments[n].requires_grad_() for n in ("x", "weight")}
        y = reference.causal_conv1d(**arguments)[0]
        dx, dw = torch.autograd.grad(y, tuple(leaves.values()), slice_of("dy", case.upstream["dy"]))
        truth = {"dx": dx, "dw": dw}
    return {
        name: {n: testing.relative_error(truth[n], slice_of(n, t)) for n, t in outputs.items()}
        for name, outputs in found.items()
    }


def work(shape: Shape, what: str, dtype: torch.dtype) -> Work:
    """Floors of one pass: multiply-adds of the taps, and every input read and output written once."""
    n, W = shape.elements, shape.W
    weight = 4 * shape.D * W
    if what == "fwd":
        return Work(2 * W * n, 2 * dtype.itemsize * n + weight)
    return Work(3 * 2 * W * n, 3 * dtype.itemsize * n + 2 * weight)


def main() -> None:
    """Measure, shape by shape, and write one record."""
    from kernel_fun.bench import runner
    from kernel_fun.bench.record import Record

    names = ("triton", "eager", "fla", "fla-gluon")
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--shape", action="append", choices=SHAPES)
    parser.add_argument("--candidate", action="append", choices=names)
    parser.add_argument("--seconds", type=float, default=1.0, help="timing budget of one pass at one shape")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--commit", metavar="ID", help="commit of a clean copy that has no git")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    taken: Record | None = None
    for shape in args.shape or DEFAULT[device.type]:
        request = runner.Request(
            family=NAME,
            shapes=(shape,),
            gates=GATES,
            passes=PASSES,
            dtype=torch.bfloat16 if on_gpu else torch.float32,
            device=device,
            candidates=args.candidate or (["triton", "fla", "fla-gluon"] if on_gpu else ["eager"]),
            seconds=args.seconds,
            cold=False,
        )
        part = runner.measure(request, print)
        _print(part)
        if taken is None:
            taken = part
        else:
            taken.rows.extend(part.rows)
            taken.skipped.extend(part.skipped)
    assert taken is not None
    taken.made_at(args.commit)
    path = taken.default_path(args.results)
    taken.write(path)
    print(f"wrote {path}")


def _print(part: Any) -> None:
    for row in part.rows:
        floor = row.bytes / part.ceilings["copy_TBps"] / 1e9
        host = "-" if row.host_us is None else f"{row.host_us:.0f} us"
        print(
            f"{row.bench}@{row.shape} {row.candidate}: {row.ms.p50:.3f} ms ({row.ms.p20:.3f} - "
            f"{row.ms.p80:.3f}), {row.ms.p50 / floor:.2f}x the byte floor, host {host}, error {row.error}"
        )
    for skipped in part.skipped:
        print(f"{skipped.bench}@{skipped.shape} {skipped.candidate} not timed: {skipped.reason}")


if __name__ == "__main__":
    main()
