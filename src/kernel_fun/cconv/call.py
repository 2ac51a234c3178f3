"""The arguments of one call, validated once, and the hashable facts a plan is made from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kernel_fun._common import check, context_parallel
from kernel_fun._common.check import ContractError, ContractTypeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kernel_fun._common.context_parallel import Split

__all__ = ["Call", "ContractError", "ContractTypeError", "Problem", "Step", "bind", "bind_step"]

TENSORS = ("x", "weight", "bias", "residual", "initial_state")
"""Differentiable arguments, in the order their gradients are returned."""

ACTIVATIONS = (None, "silu", "swish")
BACKENDS = ("triton", "mix", "cuda")
"""What fla's ``backend`` may say."""


@dataclass(frozen=True)
class Problem:
    """The facts of a call that decide who serves it: sizes, dtypes, flags. No tensor, no value."""

    B: int
    T: int
    D: int
    W: int
    N: int | None = None
    """Sequences of a packed call; None when dense."""
    dtypes: tuple[str, str] = ("bfloat16", "float32")
    """Of x and weight."""
    activation: str | None = None
    has_bias: bool = False
    has_residual: bool = False
    has_h0: bool = False
    wants_ht: bool = False
    needs_grad: bool = False
    asked: str = "triton"
    """The ``backend`` argument: fla's name of an implementation."""
    context_parallel: bool = False
    reduces: bool = False
    """The gradients of parameters are summed over the context-parallel group."""
    unknown: tuple[str, ...] = ()

    @property
    def kind(self) -> Problem:
        """This problem up to the sizes that vary from step to step (B, T, N)."""
        return replace(self, B=0, T=0, N=None if self.N is None else 0)

    def __str__(self) -> str:
        rows = f"B={self.B} T={self.T}" if self.N is None else f"N={self.N} T={self.T} packed"
        flags = [
            word
            for word, on in (
                (self.activation or "linear", True),
                ("bias", self.has_bias),
                ("residual", self.has_residual),
                ("h0", self.has_h0),
                ("ht", self.wants_ht),
                ("grad", self.needs_grad),
                (f"backend={self.asked}", self.asked != "triton"),
                ("cp", self.context_parallel),
            )
            if on
        ]
        return f"{rows} D={self.D} W={self.W} {'/'.join(self.dtypes)} {' '.join(flags)}"


@dataclass(frozen=True)
class Call:
    """Validated arguments of causal_conv1d, x and residual as [B, T, D]."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    N: int
    """Sequences: B when dense."""
    activation: str | None
    output_final_state: bool
    asked: str
    context_parallel: bool
    unknown: tuple[str, ...]
    verbatim: dict[str, Any]
    """The arguments as the caller gave them, for delegation."""
    memo: dict[str, Any] = field(default_factory=dict[str, Any])
    """What a backend derived from cu_seqlens in the forward and its backward reads again."""
    split: Split | None = None
    """Under context parallel: what this rank holds of the packed batch."""

    @property
    def silu(self) -> bool:
        return self.activation is not None

    def tensors(self) -> tuple[Tensor | None, ...]:
        return tuple(getattr(self, name) for name in TENSORS)

    def like(self, **changes: Any) -> Call:
        """The same call with other values of some fields, already checked."""
        other = object.__new__(Call)
        other.__dict__.update(self.__dict__, **changes)
        return other

    def facts(self) -> tuple[Any, ...]:
        """What a context keeps beside its saved tensors."""
        return self.N, self.activation, self.memo

    @staticmethod
    def for_backward(
        facts: tuple[Any, ...],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        h0: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> Call:
        """The call as its backward reads it."""
        N, activation, memo = facts
        return Call(
            x, weight, bias, None, h0, cu_seqlens, N, activation,
            output_final_state=False, asked="triton", context_parallel=False, unknown=(), verbatim={},
            memo=memo,
        )  # fmt: skip

    def problem(self) -> Problem:
        import torch

        B, T, D = self.x.shape
        return Problem(
            B, T, D, self.weight.shape[1],
            N=None if self.cu_seqlens is None else self.N,
            dtypes=(check.dtype_name(self.x.dtype), check.dtype_name(self.weight.dtype)),
            activation=self.activation,
            has_bias=self.bias is not None,
            has_residual=self.residual is not None,
            has_h0=self.initial_state is not None,
            wants_ht=self.output_final_state,
            needs_grad=torch.is_grad_enabled()
            and any(t is not None and t.requires_grad for t in self.tensors()),
            asked=self.asked,
            context_parallel=self.context_parallel,
            reduces=self.split is not None and self.split.reduce_gradients,
            unknown=self.unknown,
        )  # fmt: skip


@dataclass(frozen=True)
class Step:
    """Validated arguments of causal_conv1d_update: x, residual [N, D]; cache [N, D, W], shifted in place."""

    x: Tensor
    cache: Tensor
    residual: Tensor | None
    weight: Tensor
    bias: Tensor | None
    activation: str | None

    @property
    def silu(self) -> bool:
        return self.activation is not None

    def problem(self) -> Problem:
        N, D = self.x.shape
        return Problem(
            N, 1, D, self.weight.shape[1],
            dtypes=(check.dtype_name(self.x.dtype), check.dtype_name(self.weight.dtype)),
            activation=self.activation,
            has_bias=self.bias is not None,
            has_residual=self.residual is not None,
            has_h0=True,
            wants_ht=True,
        )  # fmt: skip


def bind(arguments: dict[str, Any]) -> Call:
    """Validate the arguments of causal_conv1d: every parameter by name, and ``kwargs``.

    Raises ContractError (a ValueError) for shapes and values, ContractTypeError (a TypeError) for
    types and dtypes, each naming the argument, what is expected and what was given.
    """
    a = {name: value for name, value in arguments.items() if name != "kwargs"}
    kwargs: dict[str, Any] = arguments["kwargs"]
    asked, cp_context = a["backend"], a["cp_context"]
    split = None if cp_context is None else context_parallel.read(cp_context)
    if asked not in BACKENDS:
        raise ContractError(f"`backend` must be one of {', '.join(BACKENDS)}, got {asked!r}")
    _activation(a["activation"])
    x = check.is_tensor("x", a["x"])
    check.holds_data("x", x)
    if x.dim() < 3:
        raise ContractError(f"`x` must have shape [B, T, D], got {list(x.shape)}")
    residual = a["residual"]
    if residual is not None and check.is_tensor("residual", residual).shape != x.shape:
        raise _other_shape(residual, x)
    x = x.flatten(2)
    sizes = _parameters(a, x, "B T D")
    if residual is not None:
        residual = residual.flatten(2)
        check.dtype("residual", residual, _floats())
        check.same_device("residual", residual, "x", x)
    cu_seqlens, cu_seqlens_cpu = a["cu_seqlens"], a["cu_seqlens_cpu"]
    if cp_context is not None:  # its boundaries hold, whatever the call says
        cu_seqlens, cu_seqlens_cpu = context_parallel.local_boundaries(cp_context, x.device)
    if split is not None:
        context_parallel.check_local(split, "x", x, a["initial_state"])
    _packing(cu_seqlens, cu_seqlens_cpu, x)
    sizes["N"] = x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    if a["initial_state"] is not None:
        h0 = check.is_tensor("initial_state", a["initial_state"])
        check.shape("initial_state", h0, "N D W", sizes)
        check.dtype("initial_state", h0, _floats())
        check.same_device("initial_state", h0, "x", x)
    return Call(
        x, a["weight"], a["bias"], residual, a["initial_state"], cu_seqlens,
        N=sizes["N"],
        activation=a["activation"],
        output_final_state=check.flag("output_final_state", a["output_final_state"]),
        asked=asked,
        context_parallel=split is not None,
        unknown=tuple(sorted(kwargs)),
        verbatim={**a, **kwargs},
        split=split,
    )  # fmt: skip


def bind_step(arguments: dict[str, Any]) -> Step:
    """Validate the arguments of causal_conv1d_update. Errors as from :func:`bind`."""
    a = arguments
    _activation(a["activation"])
    x = check.is_tensor("x", a["x"])
    check.holds_data("x", x)
    given = x.shape
    if x.dim() >= 3:
        x = x.flatten(2)
        if 1 not in x.shape[:2]:
            raise ContractError(
                "`x` must have shape [N, D], [1, N, D] or [N, 1, D] (one token per sequence), "
                f"got {list(given)}"
            )
        x = x.flatten(0, 1)
    sizes = _parameters(a, x, "N D")
    residual = a["residual"]
    if residual is not None:
        if check.is_tensor("residual", residual).shape != given:
            raise _other_shape(residual, a["x"])
        check.dtype("residual", residual, _floats())
        check.same_device("residual", residual, "x", x)
        residual = residual.reshape(x.shape)
    cache = check.is_tensor("cache", a["cache"])
    check.shape("cache", cache, "N D W", sizes)
    check.dtype("cache", cache, _floats())
    check.same_device("cache", cache, "x", x)
    if any(size > 1 and stride == 0 for size, stride in zip(cache.shape, cache.stride())):
        raise ContractError(
            "`cache` must have memory of its own for every element, since it is written, got an expanded "
            f"tensor of strides {list(cache.stride())}: clone it"
        )
    return Step(x, cache, residual, a["weight"], a["bias"], a["activation"])


def _other_shape(residual: Tensor, x: Tensor) -> ContractError:
    return ContractError(
        f"`residual` must have the shape of `x`, {list(x.shape)}, got {list(residual.shape)}"
    )


def _floats() -> tuple[torch.dtype, ...]:
    import torch

    return (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _activation(activation: Any) -> None:
    if activation not in ACTIVATIONS:
        raise ContractError(f"`activation` must be None, 'silu' or 'swish', got {activation!r}")


def _parameters(a: dict[str, Any], x: Tensor, letters: str) -> dict[str, int]:
    """Bind the letters of x and weight; check x, weight and bias."""
    sizes: dict[str, int] = {}
    check.shape("x", x, letters, sizes)
    check.dtype("x", x, _floats())
    weight = check.is_tensor("weight", a["weight"])
    check.shape("weight", weight, "D W", sizes)
    if sizes["W"] < 1:
        raise ContractError("`weight` must have W >= 1 taps, got W = 0")
    named = {"weight": weight}
    if a["bias"] is not None:
        named["bias"] = check.is_tensor("bias", a["bias"])
        check.shape("bias", named["bias"], "D", sizes)
    for name, tensor in named.items():
        check.dtype(name, tensor, _floats())
        check.same_device(name, tensor, "x", x)
    return sizes


def _packing(cu: Any, cu_cpu: Any, x: Tensor) -> None:
    """Check cu_seqlens, and its content where the host can see it."""
    import torch

    if cu is None:
        if cu_cpu is not None:
            raise ContractError("`cu_seqlens_cpu` must come with `cu_seqlens`, got cu_seqlens=None")
        return
    cu = check.is_tensor("cu_seqlens", cu)
    check.dtype("cu_seqlens", cu, (torch.int64, torch.int32))
    check.same_device("cu_seqlens", cu, "x", x)
    if cu.dim() != 1 or cu.numel() < 1:
        raise ContractError(f"`cu_seqlens` must have shape [N+1], got {list(cu.shape)}")
    if x.shape[0] != 1:
        raise ContractError(
            f"`x` must have batch size 1 with `cu_seqlens`, got {x.shape[0]}: "
            "flatten the sequences into one row"
        )
    if cu_cpu is not None:
        cu_cpu = check.is_tensor("cu_seqlens_cpu", cu_cpu)
        check.dtype("cu_seqlens_cpu", cu_cpu, (torch.int64, torch.int32))
        if cu_cpu.device.type != "cpu" or cu_cpu.shape != cu.shape:
            raise ContractError(
                f"`cu_seqlens_cpu` must be a CPU tensor of shape {list(cu.shape)} like `cu_seqlens`, "
                f"got {list(cu_cpu.shape)} on {cu_cpu.device}"
            )
    host = cu if cu.device.type == "cpu" else cu_cpu
    if host is not None:
        check.boundaries("cu_seqlens", host.tolist(), x.shape[1])
        if cu_cpu is not None and host is cu and not torch.equal(cu.long(), cu_cpu.long()):
            raise ContractError("`cu_seqlens_cpu` must hold the values of `cu_seqlens`, got others")
