"""Train a small KDA language model with its packed batches cut over several processes.

    torchrun --nproc-per-node 2 examples/train_cp.py                     # two CPU processes, gloo
    torchrun --nproc-per-node 8 examples/train_cp.py --cp 4 --tokens 65536 --dim 1024 --heads 8
    python examples/train_cp.py                                          # one process: the same losses

The processes form a mesh of dp x cp. Along cp they hold parts of the same packed batches: every KDA layer
exchanges states, every short convolution a few inputs, and nothing else of the model knows. Along dp they
hold different batches. FSDP2 shards the parameters over cp, replicates them over dp, and averages the
gradients over all, so contexts here do not reduce any. On GPUs the groups are NCCL's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from kernel_fun.cconv import causal_conv1d
from kernel_fun.kda import ContextParallel, build_cp_context, chunk_kda

VOCABULARY = 32


class Layer(nn.Module):
    """Norm, projections, short convolution, KDA, gated norm; added to what came in."""

    def __init__(self, dim: int, heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.K, self.dtype = heads, dim // heads, dtype
        self.norm = nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.taps = nn.Parameter(torch.randn(3 * dim, 4) / 2)
        self.gates = nn.Linear(dim, 2 * dim + heads, bias=False)
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.dt_bias = nn.Parameter(torch.full((dim,), -3.0))
        self.head_norm = nn.RMSNorm(self.K)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, context: ContextParallel) -> Tensor:
        y = self.norm(x)
        mixed, _ = causal_conv1d(self.qkv(y), self.taps, activation="silu", cp_context=context)
        dim = self.heads * self.K
        g, gate, beta = self.gates(y).split([dim, dim, self.heads], -1)
        q, k, v = mixed.to(self.dtype).unflatten(-1, (3, self.heads, self.K)).unbind(2)
        o, _ = chunk_kda(
            q,
            k,
            v,
            g.to(self.dtype).unflatten(-1, (self.heads, self.K)),
            beta.to(self.dtype),
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            cp_context=context,
        )
        return x + self.out(self.head_norm(o.to(x.dtype)).flatten(-2) * gate.sigmoid())


class Model(nn.Module):
    def __init__(self, dim: int, heads: int, layers: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleList(Layer(dim, heads, dtype) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, context: ContextParallel) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, context)
        return self.head(self.norm(x))


def packed_batch(T: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, the token after each, and the boundaries of three sequences. The same on every process.

    A sequence walks along one of four permutations of the vocabulary: the token and what came before it, in
    however many parts the sequence was cut, say which token follows.
    """
    fixed = torch.Generator().manual_seed(0)
    walks = [torch.randperm(VOCABULARY, generator=fixed).tolist() for _ in range(4)]
    make = torch.Generator().manual_seed(1 + seed)
    cuts = torch.randint(1, T, (2,), generator=make).sort().values.tolist()
    tokens: list[int] = []
    targets: list[int] = []
    for first, last in itertools.pairwise((0, *cuts, T)):
        walk = walks[int(torch.randint(4, (1,), generator=make))]
        token = int(torch.randint(VOCABULARY, (1,), generator=make))
        for _ in range(first, last):
            tokens.append(token)
            token = walk[token]
            targets.append(token)
    return torch.tensor([tokens]), torch.tensor([targets]), torch.tensor([0, *cuts, T])


@dataclass(frozen=True)
class Settings:
    """What is trained; how many processes share the work is not part of it."""

    steps: int = 30
    batches: int = 2
    """Packed batches of a step; dp must divide them."""
    tokens: int = 512
    """Of a packed batch; cp (zigzag: twice cp) must divide them."""
    dim: int = 32
    heads: int = 2
    layers: int = 2
    lr: float = 0.02
    layout: str = "contiguous"


def complaint(s: Settings, world: int, cp: int) -> str | None:
    """What cannot be trained so, in a sentence; None if it can."""
    for name, value in vars(s).items():
        if isinstance(value, (int, float)) and not (0 < value < math.inf):
            return f"--{name} must be positive, got {value}"
    if s.layout not in ("contiguous", "zigzag"):
        return f"--layout must be contiguous or zigzag, got {s.layout}"
    if s.dim % s.heads or s.dim // s.heads > 256:
        return f"--heads must divide --dim = {s.dim} into heads of at most 256, got {s.heads}"
    if cp < 1 or world % cp:
        return f"--cp must divide the number of processes, {world}, got {cp}"
    if s.batches % (world // cp):
        return f"--batches must be a multiple of dp = processes / cp = {world // cp}, got {s.batches}"
    parts = cp * (2 if s.layout == "zigzag" else 1)
    if s.tokens < 2 or s.tokens % parts:
        return (
            f"--tokens must be at least 2 and a multiple of {parts} ({s.layout}, cp = {cp}), got {s.tokens}"
        )
    return None


def train(settings: Settings, mesh: DeviceMesh, dtype: torch.dtype) -> list[float]:
    """The mean loss of every step, in nats a token, the same on every process."""
    s, device = settings, torch.device(mesh.device_type)
    torch.manual_seed(0)
    model = Model(s.dim, s.heads, s.layers, dtype).to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=s.lr, weight_decay=0.0)
    cp, dp, world = mesh["cp"].get_group(), mesh["dp"].get_local_rank(), mesh.size()
    count = s.batches * s.tokens
    losses: list[float] = []
    for step in range(s.steps):
        total = torch.zeros((), device=device)
        for batch in range(dp, s.batches, mesh["dp"].size()):
            tokens, targets, cu = packed_batch(s.tokens, seed=step * s.batches + batch)
            context = build_cp_context(cu.to(device), cp, cu_seqlens_cpu=cu, layout=s.layout)
            tokens, targets = (context.shard(x).to(device) for x in (tokens, targets))
            logits = model(tokens, context)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            # FSDP divides the sum over the processes by their number
            (loss * world / count).backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / count)
    return losses


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cp", type=int, help="processes a packed batch is cut over (default: all)")
    for name, value in vars(Settings()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--json", action="store_true", help="print the losses as JSON and nothing else")
    given = vars(parser.parse_args(arguments))
    cp, as_json = given.pop("cp"), given.pop("json")
    settings = Settings(**given)
    world = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    cp = world if cp is None else cp
    mistake = complaint(settings, world, cp)
    if mistake is not None:
        parser.error(mistake)

    cuda = torch.cuda.is_available()
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if cuda else "gloo")
    else:
        dist.init_process_group(
            store=dist.HashStore(), rank=0, world_size=1, backend="nccl" if cuda else "gloo"
        )
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    mesh = init_device_mesh("cuda" if cuda else "cpu", (world // cp, cp), mesh_dim_names=("dp", "cp"))
    losses = train(settings, mesh, torch.bfloat16 if cuda else torch.float32)
    if dist.get_rank() == 0:
        lines = [json.dumps(losses)] if as_json else report(losses, mesh)
        sys.stdout.write("\n".join(lines) + "\n")
    dist.destroy_process_group()
    return 0


def report(losses: list[float], mesh: DeviceMesh) -> list[str]:
    every = max(1, len(losses) // 10)
    shown = [f"step {i:4d}  {loss:.4f} nats a token" for i, loss in enumerate(losses) if i % every == 0]
    sizes = f"dp {mesh['dp'].size()} x cp {mesh['cp'].size()}"
    return [f"{sizes}; guessing costs {math.log(VOCABULARY):.4f}", *shown, f"last       {losses[-1]:.4f}"]


if __name__ == "__main__":
    sys.exit(main())
