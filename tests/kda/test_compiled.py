"""chunk_kda under torch.compile: no break, the bits of eager mode, one recompile when T varies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_fun._common import support
from kernel_fun.kda import chunk_kda, compiled

dynamo = pytest.importorskip("torch._dynamo")
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

FLAGS: dict[str, Any] = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    dynamo.reset()
    support.forget_logged()
    yield
    dynamo.reset()


def problem(
    B: int = 2, T: int = 70, H: int = 1, HV: int = 2, K: int = 8, V: int = 6, N: int | None = None,
    dtypes: tuple[torch.dtype, ...] = (torch.float32,) * 5,
) -> dict[str, Tensor]:  # fmt: skip
    generator = torch.Generator().manual_seed(T)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    shapes = {
        "q": (B, T, H, K),
        "k": (B, T, H, K),
        "v": (B, T, HV, V),
        "g": (B, T, HV, K),
        "beta": (B, T, HV),
    }
    made = {n: draw(*s, dtype=d) for (n, s), d in zip(shapes.items(), dtypes)}
    state = torch.float64 if torch.float64 in dtypes else torch.float32
    return {
        **made, "A_log": draw(HV), "dt_bias": draw(HV * K), "initial_state": draw(N or B, HV, K, V, dtype=state),
    }  # fmt: skip


def run(op: Callable[..., Any], leaves: dict[str, Tensor], **flags: Any) -> dict[str, Tensor]:
    """o, the final state if there is one, and the gradient of each leaf."""
    own = {n: t.clone().requires_grad_() for n, t in leaves.items()}
    o, ht = op(**own, **flags)
    found = {"o": o, **({} if ht is None else {"ht": ht})}
    ups = [
        torch.linspace(-1, 1, t.numel(), dtype=t.dtype, device=t.device).view(t.shape) for t in found.values()
    ]
    grads = torch.autograd.grad(list(found.values()), list(own.values()), ups, allow_unused=True)
    return {
        **{n: t.detach() for n, t in found.items()},
        **{f"d{n}": g for n, g in zip(own, grads) if g is not None},
    }


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype, name
        assert torch.equal(tensor, b[name]), name


def compile_it(op: Callable[..., Any] = chunk_kda) -> tuple[Callable[..., Any], Any]:
    counter = CompileCounterWithBackend("aot_eager")

    def around(**arguments: Any) -> Any:
        o, ht = op(**{**arguments, "v": arguments["v"] * 1.0})
        return o * 1.0, ht

    return torch.compile(around, backend=counter, fullgraph=True), counter


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("everything in the kernel", {}, {**FLAGS, "output_final_state": True}),
    ("no final state", {}, FLAGS),
    ("bounded, twice sigmoid", {}, {**FLAGS, "lower_bound": -5.0, "safe_gate": True, "allow_neg_eigval": True}),
    ("v-first", {"V": 8}, {**FLAGS, "state_v_first": True, "output_final_state": True}),
    ("states kept", {}, {**FLAGS, "disable_recompute": True, "scale": 0.3}),
    ("bfloat16", {"dtypes": (torch.bfloat16,) * 5}, {**FLAGS, "output_final_state": True}),
    ("float64", {"dtypes": (torch.float64,) * 5}, {**FLAGS, "output_final_state": True}),
    (
        "mixed",
        {"dtypes": (torch.bfloat16, torch.float32, torch.float16, torch.float64, torch.bfloat16)},
        {**FLAGS, "output_final_state": True},
    ),
]  # fmt: skip


@pytest.mark.parametrize("sizes, flags", [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_the_bits_of_eager_mode_without_a_break(sizes: dict[str, Any], flags: dict[str, Any]) -> None:
    op, counter = compile_it()
    same(run(chunk_kda, problem(**sizes), **flags), run(op, problem(**sizes), **flags))
    assert counter.frame_count == 1


def test_given_log_decays_and_raw_beta() -> None:
    op, _ = compile_it()
    leaves = problem()
    leaves = {n: leaves[n] for n in ("q", "k", "v")}
    leaves["k"] = torch.nn.functional.normalize(leaves["k"], dim=-1)
    leaves |= {"g": -torch.rand(2, 70, 2, 8), "beta": torch.rand(2, 70, 2)}
    same(run(chunk_kda, leaves), run(op, leaves))


def test_one_recompile_when_T_varies() -> None:
    """Of T > 1: torch always makes a graph of its own for a size of 1."""
    op, counter = compile_it()
    for T in (70, 100, 64, 131, 7):
        same(run(chunk_kda, problem(T=T), **FLAGS), run(op, problem(T=T), **FLAGS))
    assert counter.frame_count == 2


def test_decays_of_chunks_ask_for_no_graph_of_a_single_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that keeps them for the backward has one row for 64 tokens and fewer."""
    monkeypatch.setattr(compiled, "_has_total", lambda a: True)
    op, counter = compile_it()
    for T in (130, 257, 64, 9):
        given = problem(B=1, T=T)
        same(run(chunk_kda, given, **FLAGS), run(op, given, **FLAGS))
    assert counter.frame_count == 2


def test_packed_sequences_of_any_number() -> None:
    op, counter = compile_it()
    for lengths in ((30, 40), (0, 64, 5), (1, 2, 3, 90)):
        cu = torch.tensor([0, *lengths]).cumsum(0)
        leaves = problem(B=1, T=sum(lengths) + 3, N=len(lengths))
        flags = {**FLAGS, "cu_seqlens": cu, "output_final_state": True}
        same(run(chunk_kda, leaves, **flags), run(op, leaves, **flags))
    assert counter.frame_count <= 2


def test_positional_arguments_and_no_grad() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    op = torch.compile(chunk_kda, backend=counter, fullgraph=True)
    p = problem()
    arguments = (p["q"], p["k"], p["v"], -p["g"].abs(), p["beta"], 0.5, p["initial_state"], True, True)
    with torch.no_grad():
        for a, b in zip(chunk_kda(*arguments), op(*arguments)):
            assert torch.equal(a, b)
    assert counter.frame_count == 1


def test_one_output_alone() -> None:
    op, _ = compile_it()
    for keep in (0, 1):
        results = []
        for function in (chunk_kda, op):
            leaves = {n: t.requires_grad_() for n, t in problem().items()}
            out = function(**leaves, **FLAGS, output_final_state=True)[keep]
            results.append(torch.autograd.grad(out.sum(), list(leaves.values()), allow_unused=True))
        for a, b in zip(*results):
            assert torch.equal(a, b)


def test_autocast_changes_nothing() -> None:
    op, _ = compile_it()
    expected = run(chunk_kda, problem(), **FLAGS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same(expected, run(op, problem(), **FLAGS))


def test_it_says_who_runs(caplog: pytest.LogCaptureFixture) -> None:
    op, _ = compile_it()
    with caplog.at_level(logging.INFO, logger="kernel_fun"):
        run(op, problem(), **FLAGS)
    assert (
        "kernel-fun kda: engaged (chunk_kda on eager, CPU: B=2 T=70 H=1 HV=2 K=8 V=6 float32" in caplog.text
    )
    assert "l2norm h0 grad" in caplog.text


def test_refusals_are_those_of_eager_mode() -> None:
    op, _ = compile_it()
    leaves = problem()
    with pytest.raises(Exception, match=r"`dt_bias` must have shape \[HV\*K\] = \[16\] or .*, got \[15\]"):
        op(**{**leaves, "dt_bias": leaves["dt_bias"][:15]}, **FLAGS)
    with pytest.raises(Exception, match=r"`cu_seqlens` must end within the 70 tokens given, got 71"):
        op(**problem(B=1), **FLAGS, cu_seqlens=torch.tensor([0, 71]))


def test_a_forced_backend_that_cannot_serve_is_refused_with_the_facts_of_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KERNEL_FUN_KDA_BACKEND", "sm90")
    op, _ = compile_it()
    x = problem()
    B, T = x["q"].shape[:2]
    with pytest.raises(Exception, match=rf"BACKEND=sm90 cannot serve B={B} T={T} .*gate=softplus .*: "):
        op(**x, **FLAGS)


def test_what_is_not_traced_runs_outside_the_graph() -> None:
    op = torch.compile(lambda **a: chunk_kda(**a)[0] * 2.0, backend="aot_eager")
    with pytest.raises(TypeError, match="unexpected keyword argument 'scales'"):
        op(**problem(), scales=1.0)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'beta'"):
        op(**{n: t for n, t in problem().items() if n != "beta"})
    twice = torch.compile(lambda q, **a: chunk_kda(q, **a)[0] * 2.0, backend="aot_eager")
    with pytest.raises(TypeError, match="multiple values for argument 'q'"):
        twice(problem()["q"], **{("q" if n == "k" else n): t for n, t in problem().items() if n != "q"})
    states = torch.compile(lambda **a: chunk_kda(**a)[2] * 2.0, backend="aot_eager")
    with torch.inference_mode():
        h = states(**problem(), **FLAGS, return_intermediate_states=True)
        assert torch.equal(h, chunk_kda(**problem(), **FLAGS, return_intermediate_states=True)[2] * 2.0)


def test_a_call_for_fla_is_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from kernel_fun.kda import dispatch

    plan = dispatch.plan
    monkeypatch.setattr(dispatch, "plan", lambda *a: replace(plan(*a), backend="fla", reason="as told"))
    op, _ = compile_it()
    with pytest.raises(Exception, match=r"[Dd]isable"):  # fullgraph: the break is an error
        op(**problem(), **FLAGS)


def test_a_graph_made_for_us_refuses_when_we_no_longer_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from kernel_fun.kda import dispatch

    op, _ = compile_it()
    op(**problem(), **FLAGS)
    plan = dispatch.plan
    monkeypatch.setattr(dispatch, "plan", lambda *a: replace(plan(*a), backend="fla", reason="as told"))
    with pytest.raises(
        RuntimeError, match=r"compiled for chunk_kda of kernel-fun, which now does not serve .* as told"
    ):
        op(**problem(), **FLAGS)


def test_no_double_backward() -> None:
    op, _ = compile_it()
    leaves = {n: t.requires_grad_() for n, t in problem().items()}
    o, _ = op(**leaves, **FLAGS)
    (dq,) = torch.autograd.grad(o.sum(), leaves["q"], create_graph=True)
    with pytest.raises(RuntimeError, match=r"double backward"):
        (dq.square().sum() + o.sum()).backward()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_the_operators_keep_their_word(packed: bool, grad: bool) -> None:
    """Schema, fake shapes and strides, autograd registration, as torch checks them."""
    leaves = problem(B=1, T=20, N=2 if packed else None)
    if packed:
        leaves["cu_seqlens"] = torch.tensor([0, 5, 20])
    a = compiled.Arguments(**leaves, **FLAGS, output_final_state=True, needs_grad=True)
    if grad:
        a = a._replace(**{n: leaves[n].requires_grad_() for n in ("q", "v", "g", "A_log", "initial_state")})
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.kernel_fun.chunk_kda.default, tuple(a), test_utils=tests)
    with torch.no_grad():
        out = torch.ops.kernel_fun.chunk_kda(*a)
    backward = (torch.ones_like(out[0]), None, list(out[2:]), *a)
    torch.library.opcheck(torch.ops.kernel_fun.chunk_kda_backward.default, backward, test_utils=tests[:2])


def test_the_operator_takes_what_chunk_kda_takes() -> None:
    """Every argument of chunk_kda is a field, or decides that a call is not traced."""
    from kernel_fun._common import compat

    apart = {"disable_recompute", "return_intermediate_states", "cp_context", "transpose_state_layout"}
    known = {*compat.CHUNK_KDA.parameters, *compat.CHUNK_KDA.keywords}
    assert known - apart == set(compiled.Arguments._fields) - {"needs_grad"}
    schema = torch.ops.kernel_fun.chunk_kda.default._schema
    assert tuple(a.name for a in schema.arguments) == compiled.Arguments._fields


def test_uncompiled_calls_do_not_pass_through_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "trace", lambda *a: pytest.fail("traced"))
    run(chunk_kda, problem(), **FLAGS)


def test_importing_the_operation_imports_no_compiler() -> None:
    import subprocess
    import sys

    code = (
        "import torch, sys; had = 'torch._dynamo' in sys.modules; import kernel_fun.kda, kernel_fun.cconv;"
        "assert had or 'torch._dynamo' not in sys.modules; assert 'kernel_fun.kda.compiled' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_model_around_both_operations(checkpointed: bool) -> None:
    """The demo's model: every parameter's gradient, also with activation checkpointing inside the graph."""
    from torch.utils.checkpoint import checkpoint

    from kernel_fun.demo.model import ByteModel, ModelConfig

    torch.manual_seed(0)
    model = ByteModel(ModelConfig(layers=2, width=16, H=1, HV=2, K=8, V=8, mlp_width=16))

    def logits(tokens: Tensor) -> Tensor:
        if not checkpointed:
            return model(tokens)[0]
        x = model.embedding(tokens)
        for block in model.blocks:
            x = checkpoint(lambda x, b=block: b(x, None, "chunk", False)[0], x, use_reentrant=False)
        return model.norm(x)

    counter = CompileCounterWithBackend("aot_eager")
    op = torch.compile(logits, backend=counter, fullgraph=True)
    for T in (70, 90):
        tokens = torch.randint(256, (2, T))
        results = [
            torch.autograd.grad(f(tokens).square().mean(), list(model.blocks.parameters()))
            for f in (logits, op)
        ]
        for a, b in zip(*results):
            assert torch.equal(a, b)
    assert counter.frame_count == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_on_a_gpu(packed: bool, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels in a compiled graph: the bits of eager mode, one recompile."""
    from kernel_fun.kda import is_supported

    monkeypatch.setenv("KERNEL_FUN_KDA_BACKEND", "sm90")
    counter = CompileCounterWithBackend(backend)
    op = torch.compile(lambda **a: chunk_kda(**a), backend=counter, fullgraph=True)
    for T in (130, 257, 64):
        leaves = problem(
            B=1, T=T, H=2, HV=2, K=128, V=128, N=3 if packed else None, dtypes=(torch.bfloat16,) * 5
        )
        leaves = {n: t.cuda() for n, t in leaves.items()}
        more = {"cu_seqlens": torch.tensor([0, 1, 60, T], device="cuda")} if packed else {}
        flags = {**FLAGS, **more, "output_final_state": True}
        served, reason = is_supported(**leaves, **flags)
        if not served:
            pytest.skip(f"no kernel of ours: {reason}")
        same(run(chunk_kda, leaves, **flags), run(op, leaves, **flags))
    assert counter.frame_count == 2


@pytest.mark.slow
def test_inductor() -> None:
    """The default backend of torch.compile, which needs a C++ compiler."""
    op = torch.compile(lambda **a: chunk_kda(**a), fullgraph=True)
    same(run(chunk_kda, problem(), **FLAGS), run(op, problem(), **FLAGS))
