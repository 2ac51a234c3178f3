"""Wrappers of training: DDP, FSDP2, activation checkpointing, deterministic mode, parameters in bfloat16."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from kernel_fun.demo.model import ByteModel, ModelConfig
from kernel_fun.kda import chunk_kda
from kernel_fun.testing import relative_error
from ranks import Ranks

RANKS = 2
SIZES = ModelConfig(layers=2, width=32, H=1, HV=2, K=16, V=8, mlp_width=32)


def a_model() -> ByteModel:
    torch.manual_seed(0)
    return ByteModel(SIZES)


def text(rank: int) -> Tensor:
    return torch.randint(256, (2, 70), generator=torch.Generator().manual_seed(rank))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits, _ = model(tokens)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def expected(dtype: torch.dtype = torch.float32) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of all ranks' batches on one process, each rank's computed in a dtype."""
    losses: list[float] = []
    total: dict[str, Tensor] = {}
    for rank in range(RANKS):
        model = a_model().to(dtype)
        loss = loss_of(model, text(rank))
        loss.backward()
        losses.append(loss.item())
        for name, p in model.named_parameters():
            assert p.grad is not None
            total[name] = total.get(name, 0.0) + p.grad.float() / RANKS
    return sum(losses) / RANKS, total


def compare(found: dict[str, Tensor], truth: dict[str, Tensor], limit: float = 1e-5) -> None:
    assert found.keys() == truth.keys()
    for name, gradient in truth.items():
        assert relative_error(gradient, found[name].float()) < limit, name


def ddp(group: Any) -> None:
    rank = dist.get_rank(group)
    wrapped = nn.parallel.DistributedDataParallel(a_model(), process_group=group)
    with wrapped.no_sync():
        loss_of(wrapped, text(rank)).backward()
    loss_of(wrapped, text(rank)).backward()  # gradients add up over the two, then over the ranks
    truth = expected()[1]
    compare({n: p.grad for n, p in wrapped.module.named_parameters()}, {n: 2 * g for n, g in truth.items()})


def sharded(group: Any, **policy: Any) -> ByteModel:
    """The model under FSDP2, a unit a block."""
    mesh = DeviceMesh.from_group(group, "cpu")
    model = a_model()
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh, **policy)
    return model


def fsdp2(group: Any) -> None:
    rank = dist.get_rank(group)
    model = sharded(group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = loss_of(model, text(rank))
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)
    truth, gradients = expected()
    assert abs(total.item() / RANKS - truth) < 1e-5
    compare({n: p.grad.full_tensor() for n, p in model.named_parameters()}, gradients)
    optimizer.step()
    assert loss_of(model, text(rank)).item() < loss.item()


def fsdp2_in_bfloat16(group: Any) -> None:
    """Parameters are bfloat16 inside, A_log and dt_bias too; gradients are reduced in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(group, mp_policy=policy)
    loss_of(model, text(dist.get_rank(group))).backward()
    found = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
    assert all(g.dtype == torch.float32 for g in found.values())
    compare(found, expected(torch.bfloat16)[1], limit=1e-2)


@pytest.mark.parametrize("check", [ddp, fsdp2, fsdp2_in_bfloat16])
def test_wrapped_models_learn_what_one_process_learns(check: Any, ranks: Ranks) -> None:
    ranks.run(RANKS, check)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_no_bit(reentrant: bool) -> None:
    model, tokens = a_model(), text(0)
    loss_of(model, tokens).backward()
    expected = {n: p.grad for n, p in model.named_parameters()}

    twin = a_model()
    for block in twin.blocks:
        block.forward = _checkpointed(block.forward, reentrant)
    loss_of(twin, tokens).backward()
    for name, p in twin.named_parameters():
        assert p.grad is not None, name
        assert torch.equal(p.grad, expected[name]), name


def _checkpointed(forward: Callable[..., Any], reentrant: bool) -> Callable[..., Any]:
    return lambda *args: checkpoint(forward, *args, use_reentrant=reentrant)


def test_deterministic_mode() -> None:
    """Nothing in either operation is refused by it, and it changes no bit."""
    model, tokens = a_model(), text(0)
    loss_of(model, tokens).backward()
    twin = copy.deepcopy(model)
    twin.zero_grad()
    torch.use_deterministic_algorithms(True)
    try:
        loss_of(twin, tokens).backward()
        packed = {"cu_seqlens": torch.tensor([0, 5, 5, 40])}
        x = torch.randn(1, 40, 6, requires_grad=True)
        from kernel_fun.cconv import causal_conv1d

        causal_conv1d(x, torch.randn(6, 4), activation="silu", **packed)[0].sum().backward()
        q = torch.randn(1, 40, 1, 8, requires_grad=True)
        g = -torch.rand(1, 40, 1, 8)
        chunk_kda(q, q, q, g, torch.rand(1, 40, 1), use_qk_l2norm_in_kernel=True, **packed)[
            0
        ].sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    for (name, p), twins in zip(model.named_parameters(), twin.parameters()):
        assert torch.equal(p.grad, twins.grad), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("io", [torch.bfloat16, torch.float32], ids=str)
def test_gate_parameters_in_either_dtype(dtype: torch.dtype, io: torch.dtype) -> None:
    """The same results as with the parameters widened; each gradient in the dtype of its parameter."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "q": (1, 70, 1, 8),
        "k": (1, 70, 1, 8),
        "v": (1, 70, 2, 8),
        "g": (1, 70, 2, 8),
        "beta": (1, 70, 2),
    }
    inputs = {n: torch.randn(s, generator=generator).to(io) for n, s in shapes.items()}
    A_log, dt_bias = (torch.randn(n, generator=generator).to(dtype) for n in (2, 16))
    flags = dict.fromkeys(
        ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel"), True
    )
    results = []
    for widen in (False, True):
        own = [(p.float() if widen else p.clone()).requires_grad_() for p in (A_log, dt_bias)]
        o, _ = chunk_kda(**inputs, A_log=own[0], dt_bias=own[1], **flags)
        results.append((o, *torch.autograd.grad(o.float().square().sum(), own)))
    narrow, wide = results
    assert torch.equal(narrow[0], wide[0])
    for found, truth in zip(narrow[1:], wide[1:]):
        assert found.dtype == dtype
        assert torch.equal(found, truth.to(dtype))
