"""fla's KDA layer and model on our operations, through fla's own dispatch and by rebinding its names."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kernel_fun._common import support
from kernel_fun.testing import relative_error

pytest.importorskip("fla.layers.kda", reason="flash-linear-attention is not installed")

import fla.layers.kda as fla_layer
import fla.ops.kda as fla_ops
from fla.backends import BaseBackend
from fla.backends import register as fla_register
from fla.models.kda import KDAConfig, KDAForCausalLM

import kernel_fun.fla as ours
from kernel_fun._common import compat
from kernel_fun._common.check import ContractError
from kernel_fun._common.exchange import PeerFailure
from kernel_fun.fla import backend, cpu
from kernel_fun.kda import build_cp_context, chunk_kda, reference
from ranks import Ranks

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    support.forget_logged()
    yield
    ours.unregister()


@pytest.fixture
def registered() -> None:
    ours.register()


def a_layer(**settings: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "head_dim": 16, "num_heads": 2, "num_v_heads": 4, "layer_idx": 0}
    return fla_layer.KimiDeltaAttention(**{**sizes, **settings})


def a_model() -> Any:
    torch.manual_seed(0)
    config = KDAConfig(
        hidden_size=48, head_dim=16, num_heads=2, num_hidden_layers=2, vocab_size=61, hidden_ratio=2,
        fuse_norm=False, fuse_swiglu=False, fuse_cross_entropy=False,
    )  # fmt: skip
    return KDAForCausalLM(config)


def tokens(B: int, T: int) -> Tensor:
    return torch.randint(3, 61, (B, T), generator=torch.Generator().manual_seed(T))


def by_hand(layer: Any, x: Tensor) -> Tensor:
    """The layer in torch: what fla's class computes, with the token recurrence."""

    def convolved(y: Tensor, conv: Any) -> Tensor:
        z = torch.nn.functional.conv1d(y.mT, conv.weight, conv.bias, padding=3, groups=y.shape[-1])
        return torch.nn.functional.silu(z[..., : y.shape[1]].mT)

    q, k, v = (
        convolved(getattr(layer, f"{n}_proj")(x), getattr(layer, f"{n}_conv1d")).unflatten(-1, (-1, 16))
        for n in "qkv"
    )
    o, _ = reference.recurrent(
        q, k, v, layer.f_proj(x).unflatten(-1, (-1, 16)), layer.b_proj(x),
        A_log=layer.A_log, dt_bias=layer.dt_bias, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, safe_gate=layer.safe_gate, lower_bound=layer.lower_bound,
        allow_neg_eigval=layer.allow_neg_eigval,
    )  # fmt: skip
    gate = layer.g_proj(x).unflatten(-1, (-1, 16)).sigmoid()
    o = o.to(x.dtype)
    normed = o * (o.square().mean(-1, keepdim=True) + layer.o_norm.eps).rsqrt() * layer.o_norm.weight
    return layer.o_proj((normed * gate).flatten(-2))


@pytest.mark.parametrize(
    "settings",
    [{}, {"safe_gate": True, "lower_bound": -5.0}, {"allow_neg_eigval": True}, {"conv_bias": True}],
    ids=["default", "safe gate", "negative eigenvalues", "convolution bias"],
)
def test_the_layer_forward_and_backward(
    registered: None, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    layer = a_layer(**settings)
    x = torch.randn(2, 70, 48, requires_grad=True)
    leaves = {"x": x, **dict(layer.named_parameters())}
    with caplog.at_level(logging.INFO, logger="kernel_fun"):
        y = layer(x)[0]
    assert "kernel-fun kda: engaged (chunk_kda on eager, CPU" in caplog.text
    assert "kernel-fun cconv: engaged (causal_conv1d on eager, CPU" in caplog.text
    up = torch.randn_like(y)
    found = dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), up)))
    truth = by_hand(layer, x)
    assert relative_error(truth, y) < 1e-5
    for name, gradient in zip(leaves, torch.autograd.grad(truth, list(leaves.values()), up)):
        assert relative_error(gradient, found[name]) < 3e-5, name


def test_a_model_trains(registered: None) -> None:
    model, text = a_model(), tokens(4, 70)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for _ in range(8):
        loss = model(input_ids=text, labels=text).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert losses[-1] < losses[0] - 0.5, losses


def test_decoding_from_a_cache_gives_the_logits_of_the_whole(registered: None) -> None:
    """Prefill through chunk_kda, then one token a step through the recurrent form and the update."""
    model, text = a_model().eval(), tokens(2, 78)
    with torch.no_grad():
        whole = model(input_ids=text).logits
        out = model(input_ids=text[:, :70], use_cache=True)
        assert relative_error(whole[:, :70], out.logits) < 1e-5
        for t in range(70, 78):
            step = text[:, t : t + 1]
            out = model(input_ids=step, past_key_values=out.past_key_values, use_cache=True)
            assert relative_error(whole[:, t : t + 1], out.logits) < 1e-5, t


def test_padding_is_packing(registered: None, caplog: pytest.LogCaptureFixture) -> None:
    model, text = a_model(), tokens(2, 40)
    mask = torch.ones_like(text)
    mask[0, :25] = 0
    with caplog.at_level(logging.INFO, logger="kernel_fun"):
        padded = model(input_ids=text, attention_mask=mask).logits
    assert "N=2 T=80 packed" in caplog.text or "packed" in caplog.text
    alone = model(input_ids=text[:1, 25:]).logits
    assert relative_error(alone[0], padded[0, 25:]) < 1e-6


def test_every_holder_of_the_function_reaches_us_and_unregister_ends_it(registered: None) -> None:
    assert ours.registered()
    asked: list[str] = []

    class Next(BaseBackend):
        backend_type = "after_us"
        priority = 9

        def chunk_kda(self, *args: Any, **kwargs: Any) -> str:
            asked.append("next")
            return "next"

    fla_register(fla_ops.chunk_kda)(Next)
    try:
        q = torch.randn(1, 5, 1, 8)
        g = -torch.rand(1, 5, 1, 8)
        arguments = (q, q, q, g, torch.rand(1, 5, 1))
        for holder in (fla_ops.chunk_kda, fla_layer.chunk_kda):
            assert torch.equal(holder(*arguments)[0], chunk_kda(*arguments)[0])
        assert not asked
        ours.unregister()
        assert not ours.registered()
        assert fla_ops.chunk_kda(*arguments) == "next"
        ours.register()
        assert torch.equal(fla_ops.chunk_kda(*arguments)[0], chunk_kda(*arguments)[0])
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("KERNEL_FUN_FLA", "0")
            assert not ours.registered()
            assert fla_ops.chunk_kda(*arguments) == "next"
        assert asked == ["next", "next"]
    finally:
        Next.package_name = "no_such_package_of_anyone"


def test_what_we_do_not_take_goes_on_with_the_reason(
    registered: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernel_fun._common import device

    monkeypatch.setattr(device, "of", lambda where: device.named("sm80"))
    monkeypatch.setattr(support, "missing", lambda need: None)
    entry = backend.backend()()
    q = torch.randn(1, 5, 1, 8)
    arguments = {"q": q, "k": q, "v": q, "g": -q.abs(), "beta": q[..., 0]}
    with caplog.at_level(logging.WARNING, logger="kernel_fun"):
        accepted, reason = entry.verify("chunk_kda", **arguments)
    assert not accepted
    assert reason is not None
    assert "no kernel for sm80 (A100)" in reason
    assert f"delegated to fla: {reason}" in caplog.text
    elsewhere = {**arguments, "q": q.to("meta")}
    accepted, reason = entry.verify("chunk_kda", **elsewhere, use_everything=True)
    assert not accepted
    assert reason == "keyword 'use_everything' is not known to kernel-fun"
    assert f"delegated to fla: {reason}" in caplog.text
    monkeypatch.setenv("KERNEL_FUN_KDA_BACKEND", "eager")
    assert entry.verify("chunk_kda", **arguments) == (True, None)


def test_a_mistake_is_said_in_our_words(registered: None) -> None:
    q = torch.randn(1, 5, 1, 8)
    with pytest.raises(TypeError, match="multiple values for argument 'q'"):
        fla_ops.chunk_kda(q, q, q, q, q[..., 0], q=q)
    with pytest.raises(TypeError, match="unexpected keyword argument 'use_everything'"):
        fla_ops.chunk_kda(q, q, q, q, q[..., 0], use_everything=True)
    with pytest.raises(
        ValueError, match=r"`g` must have shape \[B, T, HV, K\] = \[1, 5, 1, 8\], got \[1, 5, 1, 4\]"
    ):
        fla_ops.chunk_kda(q, q, q, q[..., :4], q[..., 0])


def test_the_decision_is_made_once_a_call(registered: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernel_fun.kda import ops

    bound: list[int] = []
    bind = ops.bind
    monkeypatch.setattr(ops, "bind", lambda arguments: bound.append(1) or bind(arguments))
    q = torch.randn(1, 5, 1, 8)
    fla_ops.chunk_kda(q, q, q, -q.abs(), q[..., 0])
    assert len(bound) == 1


def on_rank_through_fla(group: Any, mistake: str = "") -> Tensor:
    """fla's chunk_kda on this rank's part of one sequence; rank 1 makes a mistake."""
    ours.register()
    try:
        context = build_cp_context(torch.tensor([0, 32]), group)
        x: dict[str, Any] = {n: context.shard(t) for n, t in one_sequence().items()}
        first: tuple[Any, ...] = ()
        if dist.get_rank(group) == 1:
            if mistake == "a short beta":
                x["beta"] = x["beta"][:, :-1]
            elif mistake == "no q and an unknown keyword":
                x |= {"q": None, "shiny": 1}
            elif mistake == "a missing argument":
                del x["beta"]
            elif mistake == "an argument given twice":
                first = (x["q"],)
        return fla_ops.chunk_kda(*first, **x, use_qk_l2norm_in_kernel=True, cp_context=context)[0]
    finally:
        ours.unregister()


def goes_on(group: Any, mistake: str) -> list[str]:
    """Rank 1 makes a mistake that no other hears of, and goes on."""
    group = dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)
    said: list[str] = []
    for wrong in (mistake, ""):
        if dist.get_rank(group) == 1 or not wrong:
            try:
                on_rank_through_fla(group, wrong)
                said.append("returned")
            except Exception as error:
                said.append(type(error).__name__)
    return said


def one_sequence() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(3)
    x = {n: torch.randn(1, 32, 2, 4, generator=draw, dtype=torch.float64) for n in "qkvg"}
    x["g"] = -0.05 * x["g"].abs()
    return x | {"beta": torch.rand(1, 32, 2, generator=draw, dtype=torch.float64)}


def test_context_parallel_reaches_us(ranks: Ranks) -> None:
    whole = chunk_kda(**one_sequence(), use_qk_l2norm_in_kernel=True)[0]
    found = torch.cat(ranks.run(2, on_rank_through_fla), 1)
    assert (found - whole).abs().max() < 1e-13


@pytest.mark.parametrize(
    ("mistake", "error", "name"),
    [("a short beta", ContractError, "`beta`"), ("no q and an unknown keyword", TypeError, "shiny")],
)
def test_a_rank_whose_call_is_refused_tells_the_others(
    mistake: str, error: type[Exception], name: str, ranks: Ranks
) -> None:
    (there, here), seconds = ranks.try_run(2, on_rank_through_fla, mistake)
    assert issubclass(here.type, error)
    assert there.type is PeerFailure
    assert name in there.text
    assert seconds < 60


@pytest.mark.parametrize("mistake", ["a missing argument", "an argument given twice"])
def test_a_rank_whose_call_python_refuses_is_astray(mistake: str, ranks: Ranks) -> None:
    there, here = ranks.run(2, goes_on, mistake)
    assert here == ["TypeError", "PeerFailure"]
    assert there == ["PeerFailure"]


def test_registering_twice_is_registering_once() -> None:
    from fla.backends import _function_registries

    ours.register()
    ours.register()
    registry = next(r for f, r in _function_registries.items() if f.__name__ == "chunk_kda")
    assert [b.backend_type for b in registry._get_sorted_backends()].count("kernel_fun") == 1
    priorities = {b.backend_type: b.priority for b in registry._get_sorted_backends()}
    assert priorities["kernel_fun"] < priorities["flash_kda"]


def test_an_older_fla_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "fla.backends", None)
    with pytest.raises(
        RuntimeError, match=r"before 0\.6\.0 fla's dispatch does not reach chunk_kda; kernel_fun\.fla\.patch"
    ):
        ours.register()


def test_a_version_before_0_6_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "version_of", lambda name: "0.5.2")
    with pytest.raises(RuntimeError, match=r"cannot register with fla-core 0\.5\.2: before 0\.6\.0"):
        ours.register()


def test_a_dispatch_that_is_switched_off_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fla.backends._DISPATCH_DISABLED", True)
    with pytest.raises(RuntimeError, match="FLA_DISABLE_BACKEND_DISPATCH=1"):
        ours.register()


def test_another_signature_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "difference", lambda op: f"{op.name} is another")
    with pytest.raises(RuntimeError, match="cannot register with fla: chunk_kda is another"):
        ours.register()


class TestPatch:
    def test_rebinds_and_undoes(self) -> None:
        before = fla_layer.chunk_kda, fla_ops.chunk_kda
        with ours.patch() as done:
            assert "fla.layers.kda.chunk_kda" in done.names
            assert any(name.endswith("causal_conv1d") for name in done.names)
            layer, x = a_layer(), torch.randn(2, 20, 48)
            layer.o_norm = torch.nn.Identity()
            layer.o_norm.forward = lambda o, gate: o
            assert layer(x)[0].isfinite().all()
            assert compat.function_of(compat.CHUNK_KDA) is before[1]
        assert (fla_layer.chunk_kda, fla_ops.chunk_kda) == before
        assert done.names == ()

    def test_a_name_someone_else_rebound_is_left_to_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        done = ours.patch()
        theirs = object()
        before = compat.function_of(compat.CHUNK_KDA)
        fla_layer.chunk_kda = theirs
        try:
            done.undo()
            assert fla_layer.chunk_kda is theirs
        finally:
            fla_layer.chunk_kda = before

    def test_the_switch_sends_calls_to_fla(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fla_ops, "chunk_kda", lambda *args: "fla")
        with ours.patch():
            assert fla_ops.chunk_kda.__name__ == "chunk_kda"
            monkeypatch.setenv("KERNEL_FUN_FLA", "0")
            assert fla_ops.chunk_kda(1) == "fla"

    def test_other_names_and_odd_modules(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import sys
        from types import ModuleType, SimpleNamespace

        mine = ModuleType("mine")
        mine.attention = fla_ops.chunk_kda  # pyright: ignore[reportAttributeAccessIssue]
        for name, module in (("mine", mine), ("odd", SimpleNamespace(a=1)), ("none", None)):
            monkeypatch.setitem(sys.modules, name, module)
        with ours.patch() as done:
            assert "mine.attention" in done.names
            q = torch.randn(1, 5, 1, 8)
            assert mine.attention(q, q, q, -q.abs(), q[..., 0])[0].shape == q.shape
        assert mine.attention is fla_ops.chunk_kda

    def test_patching_twice_and_undoing_in_any_order(self) -> None:
        before = fla_layer.chunk_kda
        first, second = ours.patch(), ours.patch()
        assert second.names == ()
        first.undo()
        assert fla_layer.chunk_kda is not before  # the second still stands
        first.undo()
        second.undo()
        assert fla_layer.chunk_kda is before
        first, second = ours.patch(), ours.patch()
        second.undo()
        assert fla_layer.chunk_kda is not before
        first.undo()
        assert fla_layer.chunk_kda is before


@pytest.mark.parametrize("activation", ["swish", "sigmoid"])
@pytest.mark.parametrize("rms", [True, False])
@pytest.mark.parametrize("residual", [True, False])
def test_the_gated_norm(activation: str, rms: bool, residual: bool) -> None:
    x, g, dy, r = (torch.randn(5, 6, dtype=torch.float64) for _ in range(4))
    weight, bias = torch.randn(6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (x, g, weight, bias, r)]
    total = x + r if residual else x
    centred = total if rms else total - total.mean(-1, keepdim=True)
    normed = centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight + bias
    truth = normed * (torch.sigmoid(g) if activation == "sigmoid" else torch.nn.functional.silu(g))
    with torch.no_grad():
        y, mean, rstd, kept = cpu.norm_fwd(
            x, g, weight, bias, activation, 1e-5, r if residual else None, is_rms_norm=rms
        )
        found = cpu.norm_bwd(
            dy, kept, g, weight, bias, activation, 1e-5, mean, rstd, has_residual=residual, is_rms_norm=rms
        )
    assert torch.allclose(y, truth, rtol=1e-12, atol=1e-12)
    for a, b in zip(found, torch.autograd.grad(truth, leaves, dy, allow_unused=True)):
        assert (a is None) == (b is None)
        assert b is None or torch.allclose(a, b, rtol=1e-11, atol=1e-11)


def test_swiglu() -> None:
    x, y, up = (torch.randn(5, 6, dtype=torch.float64, requires_grad=True) for _ in range(3))
    truth = torch.nn.functional.silu(x) * y
    with torch.no_grad():
        assert torch.allclose(cpu.swiglu_fwd(x, y), truth, rtol=1e-13)
        found = cpu.swiglu_fwdbwd(x, y, up, use_weight=True)
    for a, b in zip(found, (*torch.autograd.grad(truth, (x, y), up), truth)):
        assert torch.allclose(a, b, rtol=1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_served_call_runs_our_kernels(registered: None, caplog: pytest.LogCaptureFixture) -> None:
    """bf16, K = V = 128 as fla's default layer; the plan decides, and the log says who ran."""
    layer = a_layer(hidden_size=256, head_dim=128, num_v_heads=2).cuda().bfloat16()
    x = torch.randn(2, 256, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with caplog.at_level(logging.INFO, logger="kernel_fun"):
        y = layer(x)[0]
        y.float().square().mean().backward()
    assert "kernel-fun cconv: engaged (causal_conv1d on triton" in caplog.text
    assert "chunk_kda on sm90" in caplog.text or "chunk_kda delegated to fla" in caplog.text
    assert x.grad is not None
    assert x.grad.isfinite().all()
