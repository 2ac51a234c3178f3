"""chunk_kda under torch.compile on a GPU: graphs, breaks and recompiles counted, bits beside eager mode's.

    python -m benchmarks.compiled [--compiler inductor] [--backend sm90] [--out benchmarks/runs]

Three cases, each compiled with fullgraph=True and called with one length after another: chunk_kda itself,
with states; the same with packed sequences; and a model of two layers, each a projection, the short
convolution, chunk_kda and a projection back. The model has no other arithmetic than matrix products and
sums of two, which a compiler that fuses rounds as eager mode does. Outputs and all gradients of every
length are compared.

A case counts if nothing broke, there were two graphs at most (one for the first length, one for all others)
and no bit differed. The exit status says whether every case of every compiler did.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kernel_fun import testing
from kernel_fun._common import config
from kernel_fun.bench import machine
from kernel_fun.cconv import causal_conv1d
from kernel_fun.kda import chunk_kda

from . import runs
from .examples import logged

COMPILERS = ("aot_eager", "inductor")
LENGTHS = (1024, 1000, 8192, 4104)
"""Tokens of a call, multiples of 8, for which no matrix product is padded; of the longer ones the scan runs
beside what comes before it."""
SIZES = {"H": 8, "K": 128, "V": 128}
WIDTH = 512
FLAGS = dict.fromkeys(("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel"), True)
Results = dict[str, Tensor]


class Layer(nn.Module):
    """Residual; q, k and v go through a short convolution."""

    def __init__(self, width: int, H: int, K: int, V: int) -> None:
        super().__init__()
        self.H, self.K, self.V = H, K, V
        self.convolved = H * (2 * K + V)
        self.project = nn.Linear(width, self.convolved + H * (K + 1), bias=False)
        self.taps = nn.Parameter(torch.randn(self.convolved, 4) * 0.5)
        self.A_log = nn.Parameter(torch.rand(H))
        self.dt_bias = nn.Parameter(torch.randn(H * K) - 3.0)
        self.back = nn.Linear(H * V, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        H, K, V = self.H, self.K, self.V
        qkv, g, beta = self.project(x).split([self.convolved, H * K, H], -1)
        mixed, _ = causal_conv1d(qkv, self.taps, activation="silu")
        q, k, v = mixed.split([H * K, H * K, H * V], -1)
        o, _ = chunk_kda(
            q.unflatten(-1, (H, K)),
            k.unflatten(-1, (H, K)),
            v.unflatten(-1, (H, V)),
            g.unflatten(-1, (H, K)),
            beta,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            **FLAGS,
        )
        return x + self.back(o.flatten(-2))


class Model(nn.Sequential):
    """Two layers with bf16 weights; the decay's parameters stay in float32."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        super().__init__(*(Layer(WIDTH, **SIZES) for _ in range(2)))
        self.to(device)
        for layer in self:
            for linear in (layer.project, layer.back):
                linear.to(torch.bfloat16)

    def results(self, function: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> Results:
        """The output, and the gradients of the input and of every parameter."""
        x = x.detach().requires_grad_()
        y = function(x)
        named = dict(self.named_parameters())
        grads = torch.autograd.grad(y, [x, *named.values()], dy)
        return {"y": y.detach(), **dict(zip(("dx", *(f"d{n}" for n in named)), grads, strict=True))}


def operator(compile_it: Callable[[Any], Any], packed: bool, device: torch.device) -> Iterator[Any]:
    """(tokens, results of eager mode, results of the compiled function) of each length."""
    compiled = compile_it(lambda **arguments: chunk_kda(**arguments))
    for T in LENGTHS:
        f: dict[str, Any] = {"T": T} if not packed else {"seqlens": (1, T // 2, T - 1 - T // 2)}
        x = testing.make_inputs(
            "init_slow",
            **SIZES,
            **f,
            dtype=torch.bfloat16,
            initial_state=True,
            output_final_state=True,
            device=device,
        )
        upstream: dict[str, Any] = {**testing.make_upstream(x)}
        yield T, testing.run(chunk_kda, x, **upstream), testing.run(compiled, x, **upstream)


def model(compile_it: Callable[[Any], Any], device: torch.device) -> Iterator[Any]:
    """As :func:`operator`, of the model."""
    net = Model(device)
    compiled = compile_it(net)
    for T in LENGTHS:
        generator = torch.Generator().manual_seed(T)
        x, dy = (torch.randn(1, T, WIDTH, generator=generator).to(device, torch.bfloat16) for _ in range(2))
        yield T, net.results(net, x, dy), net.results(compiled, x, dy)


CASES: dict[str, Callable[[Callable[[Any], Any], torch.device], Iterator[Any]]] = {
    "chunk_kda": lambda compile_it, device: operator(compile_it, False, device),
    "chunk_kda, packed": lambda compile_it, device: operator(compile_it, True, device),
    "model of two layers": model,
}


def run(case: str, compiler: str, device: torch.device) -> dict[str, Any]:
    """One case under one compiler: graphs, breaks and bits; ``failure`` is None, or why it does not count."""
    import torch._dynamo as dynamo
    from torch._dynamo.testing import CompileCounterWithBackend
    from torch._dynamo.utils import counters

    dynamo.reset()
    counters.clear()
    graphs = CompileCounterWithBackend(compiler)
    found: dict[str, Any] = {"case": case, "compiler": compiler, "lengths": [], "differ": []}
    start, failure = time.perf_counter(), None
    try:
        for T, eager, compiled in CASES[case](
            lambda f: torch.compile(f, backend=graphs, fullgraph=True), device
        ):
            found["lengths"].append({"T": T, "tensors": len(eager), "graphs_so_far": graphs.frame_count})
            if eager.keys() != compiled.keys():
                raise ValueError(f"{list(eager)} in eager mode, {list(compiled)} compiled")
            found["differ"] += [
                {"T": T, "tensor": n, "relative": testing.relative_error(x, compiled[n])}
                for n, x in eager.items()
                if not (x.dtype == compiled[n].dtype and torch.equal(x, compiled[n]))
            ]
    except Exception as error:  # recorded: a compiler may lack what it needs here
        failure = f"{type(error).__name__}: {str(error).strip()[:500]}"
    breaks = sum(counters["graph_break"].values())
    found.update(graphs=graphs.frame_count, breaks=breaks, seconds=time.perf_counter() - start)
    if failure is None:
        failure = _why_not(found)
    return {**found, "failure": failure}


def _why_not(found: dict[str, Any]) -> str | None:
    if found["breaks"]:
        return f"{found['breaks']} graph breaks"
    if found["graphs"] > 2:
        return f"{found['graphs']} graphs, more than one recompile"
    if found["differ"]:
        names = dict.fromkeys(d["tensor"] for d in found["differ"])
        return f"other bits than in eager mode: {', '.join(names)}"
    return None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compiler", action="append", choices=COMPILERS, help="default: both")
    parser.add_argument("--case", action="append", choices=CASES, help="repeatable (default: all)")
    parser.add_argument("--backend", default="sm90", help="what must serve chunk_kda")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", help="commit of a clean copy that has no git")
    parser.add_argument("--out", type=Path, help="folder of runs, or a .json file (default: none)")
    args = parser.parse_args(argv)
    try:
        device = machine.usable("--device", args.device)
    except ValueError as error:
        parser.error(str(error))
    done: list[dict[str, Any]] = []
    with config.KDA_BACKEND.set(args.backend), logged() as said:
        for compiler in args.compiler or COMPILERS:
            for case in args.case or CASES:
                done.append(run(case, compiler, device))
                r = done[-1]
                sizes = ", ".join(str(x["T"]) for x in r["lengths"])
                print(
                    f"{case} under {compiler}: T {sizes}: {r['graphs']} graphs, {r['breaks']} breaks,",
                    r["failure"] or "the bits of eager mode",
                    f"({r['seconds']:.1f} s)",
                    flush=True,
                )
    served = [line for line in dict.fromkeys(said) if "engaged" in line]
    print(*served, sep="\n")
    if args.out is not None:
        about = {
            **runs.made(device, args.commit),
            "sizes": SIZES,
            "width": WIDTH,
            "cases": done,
            "log": served,
        }
        print(f"wrote {runs.write(args.out, about, 'compiled')}")
    return int(any(r["failure"] for r in done) or not served)


if __name__ == "__main__":
    raise SystemExit(main())
