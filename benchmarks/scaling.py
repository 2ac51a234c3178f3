"""Step time of one KDA layer under context parallel, from times measured on one GPU (docs/scaling.md).

    python -m benchmarks.scaling --HV 32 --measured-tokens 16384 --forward-ms ... --backward-ms ... \\
        --forward-summary-ms ... --backward-summary-ms ... --hop-us ... --link-GBps ... [--alone-ms ...]

Every time is an input: nothing here was measured. Compute is taken as linear in the tokens of a rank, which
it is once they fill the GPU; a gather as a ring; nothing as overlapped, but what one rank alone overlaps.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from kernel_fun._common.exchange import HEADER

TOKENS = (131_072, 262_144, 524_288, 1_048_576)
RANKS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Layer:
    """Sizes of a layer, its times on one GPU and those of the links. Times in seconds."""

    HV: int
    K: int
    V: int
    pieces: int
    """1 contiguous, 2 zigzag."""
    measured_tokens: int
    """Tokens of the one rank that the four times below were measured on."""
    forward: float
    backward: float
    forward_summary: float
    """fwd_state without outputs, of V columns and of K."""
    backward_summary: float
    """bwd_state with V columns, without a rescan."""
    hop: float
    """Latency of a step of the ring."""
    link: float
    """Bytes a second that a rank receives."""
    alone: float | None = None
    """Forward and backward of one rank that has the sequence to itself, whose scans run beside other kernels;
    None: ``forward + backward``."""

    def message(self, ranks: int) -> int:
        """Bytes that a rank gives to an all-gather; there is one in the forward and one in the backward.
        No state passes through one of two slots, so that these give no transitions."""
        columns = self.V + self.K * (ranks * self.pieces > 2)
        return HEADER + 4 * self.pieces * self.HV * self.K * columns

    def gather(self, ranks: int) -> float:
        return (ranks - 1) * (self.hop + self.message(ranks) / self.link)

    def compute(self, tokens: int, ranks: int) -> float:
        """Of a rank in the middle of the sequence."""
        share = tokens / ranks / self.measured_tokens
        if ranks == 1 and self.alone is not None:
            return share * self.alone
        summaries = self.forward_summary + self.backward_summary if ranks > 1 else 0.0
        return share * (self.forward + self.backward + summaries)

    def step(self, tokens: int, ranks: int) -> float:
        """Forward and backward of one sequence of so many tokens over so many ranks."""
        return self.compute(tokens, ranks) + 2 * self.gather(ranks)

    def efficiency(self, tokens: int, ranks: int) -> float:
        """Share of the ranks' time that one rank would have needed as well."""
        return self.step(tokens, 1) / (ranks * self.step(tokens, ranks))


def table(layer: Layer) -> list[str]:
    """A row for each number of ranks: bytes received, and for each length ms and efficiency."""
    head = "ranks  MiB received  " + "  ".join(f"{f'T = {T // 1024}k':>17}" for T in TOKENS)
    rows = [head]
    for ranks in RANKS:
        received = 2 * (ranks - 1) * layer.message(ranks) / 2**20
        cells = (
            f"{1e3 * layer.step(T, ranks):9.3f} ms {100 * layer.efficiency(T, ranks):3.0f} %" for T in TOKENS
        )
        rows.append(f"{ranks:5d}  {received:12.0f}  " + "  ".join(f"{cell:>17}" for cell in cells))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, default in (("HV", 32), ("K", 128), ("V", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--zigzag", action="store_true")
    parser.add_argument("--measured-tokens", type=int, required=True)
    for name in ("forward", "backward", "forward-summary", "backward-summary"):
        parser.add_argument(f"--{name}-ms", type=float, required=True)
    parser.add_argument("--alone-ms", type=float, help="of one rank (default: forward + backward)")
    parser.add_argument("--hop-us", type=float, required=True)
    parser.add_argument("--link-GBps", type=float, required=True, help="10^9 bytes a second")
    a = parser.parse_args(arguments)
    layer = Layer(
        a.HV,
        a.K,
        a.V,
        2 if a.zigzag else 1,
        a.measured_tokens,
        *(1e-3 * ms for ms in (a.forward_ms, a.backward_ms, a.forward_summary_ms, a.backward_summary_ms)),
        hop=1e-6 * a.hop_us,
        link=1e9 * a.link_GBps,
        alone=None if a.alone_ms is None else 1e-3 * a.alone_ms,
    )
    sys.stdout.write("\n".join(table(layer)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
