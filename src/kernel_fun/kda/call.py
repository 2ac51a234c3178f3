"""The arguments of one call, validated once, and the hashable facts a plan is made from."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kernel_fun._common import check, context_parallel
from kernel_fun._common.check import ContractError, ContractTypeError
from kernel_fun._common.notes import Notes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kernel_fun._common.context_parallel import Split

__all__ = ["Call", "ContractError", "ContractTypeError", "Problem", "bind"]

BT = 64
"""Tokens of a chunk."""

TENSORS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
"""Differentiable arguments, in the order their gradients are returned."""

_NO_TENSORS = dict.fromkeys(TENSORS)

FLAGS = (
    "output_final_state",
    "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
    "safe_gate",
    "state_v_first",
    "return_intermediate_states",
    "disable_recompute",
    "use_graph",
)

GATES = ("log", "softplus", "bounded")
"""log: g is the log decay. softplus, bounded: computed from raw g in the kernel."""
BETA_MODES = ("raw", "sigmoid", "sigmoid2")
"""sigmoid2: twice the sigmoid."""

KEYWORDS = ("A_log", "dt_bias", "chunk_size", "transpose_state_layout")
"""What chunk_kda reads from its ``**kwargs``."""


@dataclass(frozen=True)
class Problem:
    """The facts of a call that decide who serves it: sizes, dtypes, flags. No tensor, no value."""

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int | None = None
    """Sequences of a packed call; None when dense."""
    dtypes: tuple[str, str, str, str, str] = ("bfloat16", "bfloat16", "bfloat16", "bfloat16", "bfloat16")
    """Of q, k, v, g, beta."""
    gate: str = "log"
    """One of :data:`GATES`."""
    lower_bound: float | None = None
    """Of a bounded gate, whose kernels depend on it; None stands for -5."""
    beta_mode: str = "raw"
    """One of :data:`BETA_MODES`."""
    l2norm: bool = False
    state_v_first: bool = False
    has_h0: bool = False
    wants_ht: bool = False
    wants_h: bool = False
    needs_grad: bool = False
    keep: bool = False
    """disable_recompute: the forward keeps its states for the backward."""
    chunk_size: int = BT
    use_graph: bool = False
    context_parallel: bool = False
    reduces: bool = False
    """The gradients of parameters are summed over the context-parallel group."""
    unknown: tuple[str, ...] = ()

    @property
    def kind(self) -> Problem:
        """This problem up to the sizes that vary from step to step (B, T, N), and how it says -5."""
        bound = None if self.lower_bound == -5 else self.lower_bound
        return replace(self, B=0, T=0, N=None if self.N is None else 0, lower_bound=bound)

    @property
    def columns(self) -> int:
        """Independent state columns of 64 values: sequences x value heads x ceil(V/64)."""
        return (self.B if self.N is None else self.N) * self.HV * -(-self.V // 64)

    def __str__(self) -> str:
        rows = f"B={self.B} T={self.T}" if self.N is None else f"N={self.N} T={self.T} packed"
        heads = f"H={self.H}" if self.H == self.HV else f"H={self.H} HV={self.HV}"
        kinds = "/".join(dict.fromkeys(self.dtypes))
        bound = "" if self.lower_bound in (None, -5) else f" lower_bound={self.lower_bound:g}"
        flags = [f"gate={self.gate}{bound}", f"beta={self.beta_mode}"]
        flags += [
            word
            for word, on in (
                ("l2norm", self.l2norm),
                ("h0", self.has_h0),
                ("ht", self.wants_ht),
                ("h", self.wants_h),
                ("v-first", self.state_v_first),
                ("grad", self.needs_grad),
                ("keep", self.keep),
                ("graph", self.use_graph),
                ("cp", self.context_parallel),
            )
            if on
        ]
        return f"{rows} {heads} K={self.K} V={self.V} {kinds} {' '.join(flags)}"


def check_bound(name: str, bound: Any, gate: str) -> None:
    """A problem's lower bound: a number that a call takes with gate "bounded", None with any gate.

    ContractError or ContractTypeError under the name it is given by.
    """
    if bound is None:
        return
    if gate != "bounded":
        raise ContractError(f"`{name}` must be None with gate {gate!r}, got {bound!r}")
    if not check.number(name, bound) < 0:
        raise ContractError(f"`{name}` must be negative, got {bound}")


@dataclass(frozen=True)
class Call:
    """Validated arguments of chunk_kda. ``A_log`` and ``dt_bias`` are None unless the gate reads them."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    cu_seqlens_cpu: Tensor | None
    scale: float
    gate: str
    lower_bound: float | None
    beta_mode: str
    l2norm: bool
    state_v_first: bool
    output_final_state: bool
    return_intermediate_states: bool
    disable_recompute: bool
    chunk_size: int
    use_graph: bool
    max_num_seqs: int | None
    context_parallel: bool
    unknown: tuple[str, ...]
    verbatim: dict[str, Any]
    """The arguments as the caller gave them, for delegation."""
    memo: dict[str, Any] = field(default_factory=dict[str, Any])
    """What one stage derived and later ones read again. A context keeps it: plain data, and of tensors only
    the index tables of a packing (under 20 bytes a chunk)."""
    split: Split | None = None
    """Under context parallel: what this rank holds of the packed batch."""
    scratch: dict[str, Any] = field(default_factory=dict[str, Any], init=False)
    """What the stages of one pass share, tensors too: every copy of a call begins with none of it."""
    notes: Notes = field(default_factory=Notes, init=False)
    """What a backend worked out from the facts of this pass; a copy of a call begins with none, unless it is
    made with those of the same facts."""

    @property
    def BT(self) -> int:
        """Chunk length of the algorithm: the caller's only where chunk states are returned."""
        return self.chunk_size if self.return_intermediate_states else BT

    def tensors(self) -> tuple[Tensor | None, ...]:
        return (self.q, self.k, self.v, self.g, self.beta, self.A_log, self.dt_bias, self.initial_state)

    def wide(self) -> torch.dtype:
        """Of states: float64 where an input is, else float32."""
        import torch

        return (
            torch.float64
            if any(t is not None and t.dtype == torch.float64 for t in self.tensors())
            else torch.float32
        )

    def like(self, *, notes: Notes | None = None, **changes: Any) -> Call:
        """The same call with other values of some fields, already checked. ``notes``: those of its facts."""
        other = object.__new__(Call)
        own = {"scratch": {}, "notes": Notes() if notes is None else notes}
        object.__setattr__(other, "__dict__", {**self.__dict__, **changes, **own})
        return other

    def without_tensors(self) -> Call:
        """The same call holding none of its differentiable tensors: what a context may keep."""
        return self.like(notes=self.notes, verbatim={}, **_NO_TENSORS)

    def with_tensors(
        self, tensors: tuple[Tensor | None, ...], cu_seqlens: Tensor | None, notes: Notes | None = None
    ) -> Call:
        """The call as its backward reads it."""
        return self.like(notes=notes, cu_seqlens=cu_seqlens, **dict(zip(TENSORS, tensors)))

    def problem(self) -> Problem:
        import torch

        B, T, H, K = self.q.shape
        grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in self.tensors())
        names = (check.dtype_name(t.dtype) for t in (self.q, self.k, self.v, self.g, self.beta))
        return Problem(
            B,
            T,
            H,
            self.v.shape[2],
            K,
            self.v.shape[3],
            N=None if self.cu_seqlens is None else self.cu_seqlens.numel() - 1,
            dtypes=tuple(names),  # pyright: ignore[reportArgumentType]
            gate=self.gate,
            lower_bound=self.lower_bound,
            beta_mode=self.beta_mode,
            l2norm=self.l2norm,
            state_v_first=self.state_v_first,
            has_h0=self.initial_state is not None,
            wants_ht=self.output_final_state,
            wants_h=self.return_intermediate_states,
            needs_grad=grad,
            keep=self.disable_recompute,
            chunk_size=self.chunk_size,
            use_graph=self.use_graph,
            context_parallel=self.context_parallel,
            reduces=self.split is not None and self.split.reduce_gradients,
            unknown=self.unknown,
        )


def bind(arguments: dict[str, Any]) -> Call:
    """Validate the arguments of chunk_kda: every parameter by name, and ``kwargs``.

    Raises ContractError (a ValueError) for shapes and values, ContractTypeError (a TypeError) for
    types and dtypes, each naming the argument, what is expected and what was given.
    """
    a = {name: value for name, value in arguments.items() if name != "kwargs"}
    kwargs: dict[str, Any] = arguments["kwargs"]
    q, k, v, g, beta = (a[name] for name in ("q", "k", "v", "g", "beta"))
    h0, cp_context = a["initial_state"], a["cp_context"]
    flags = {name: check.flag(name, a[name]) for name in FLAGS}
    state_v_first = flags["state_v_first"]
    unknown = tuple(sorted(n for n in kwargs if n not in KEYWORDS))
    if "transpose_state_layout" in kwargs:
        if state_v_first:
            raise ContractError(
                "cannot pass both `state_v_first` and the deprecated `transpose_state_layout`"
            )
        warnings.warn(
            "`transpose_state_layout` is deprecated, use `state_v_first`", DeprecationWarning, stacklevel=4
        )
        state_v_first = check.flag("transpose_state_layout", kwargs["transpose_state_layout"])
    chunk_size = kwargs.get("chunk_size", BT)
    if check.integer("chunk_size", chunk_size) not in (32, 64):
        raise ContractError(f"`chunk_size` must be either 32 or 64 for KDA, got {chunk_size!r}")
    if a["max_num_seqs"] is not None:
        check.integer("max_num_seqs", a["max_num_seqs"])

    split = None if cp_context is None else context_parallel.read(cp_context)
    sizes = _shapes(q, k, v, g, beta)
    cu_seqlens, cu_seqlens_cpu = a["cu_seqlens"], a["cu_seqlens_cpu"]
    if cp_context is not None:  # its boundaries hold, whatever the call says
        cu_seqlens, cu_seqlens_cpu = context_parallel.local_boundaries(cp_context, q.device, split)
    if split is not None:
        context_parallel.check_local(split, "q", q, h0)
    N = _packing({**a, "cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens_cpu}, q)
    sizes["N"] = sizes["B"] if N is None else N
    _state(h0, sizes, (q, k, v, g, beta), state_v_first)
    gate, lower_bound, A_log, dt_bias = _gate(a, kwargs, sizes, q)
    sigmoid, doubled = a["use_beta_sigmoid_in_kernel"], a["allow_neg_eigval"]
    if doubled and not sigmoid:
        raise ContractError("`allow_neg_eigval=True` requires `use_beta_sigmoid_in_kernel=True`, got False")
    if a["return_intermediate_states"]:
        _inference_only(a["disable_recompute"])
    scale = a["scale"]
    return Call(
        q, k, v, g, beta, A_log, dt_bias, h0, cu_seqlens, cu_seqlens_cpu,
        scale=sizes["K"] ** -0.5 if scale is None else check.number("scale", scale),
        gate=gate,
        lower_bound=lower_bound,
        beta_mode=("sigmoid2" if doubled else "sigmoid") if sigmoid else "raw",
        l2norm=flags["use_qk_l2norm_in_kernel"],
        state_v_first=state_v_first,
        output_final_state=flags["output_final_state"],
        return_intermediate_states=flags["return_intermediate_states"],
        disable_recompute=flags["disable_recompute"],
        chunk_size=int(chunk_size),
        use_graph=flags["use_graph"],
        max_num_seqs=a["max_num_seqs"],
        context_parallel=split is not None,
        unknown=unknown,
        verbatim={**a, **kwargs},
        split=split,
    )  # fmt: skip


def _floats() -> tuple[torch.dtype, ...]:
    import torch

    return (torch.float32, torch.bfloat16, torch.float16, torch.float64)


SHAPES = (("q", "B T H K"), ("k", "B T H K"), ("v", "B T HV V"), ("g", "B T HV K"), ("beta", "B T HV"))


def _shapes(q: Any, k: Any, v: Any, g: Any, beta: Any) -> dict[str, int]:
    """Bind the letters of the five inputs; check shapes, dtypes, devices."""
    sizes: dict[str, int] = {}
    check.holds_data("q", check.is_tensor("q", q))
    for (name, letters), value in zip(SHAPES, (q, k, v, g, beta)):
        tensor = check.is_tensor(name, value)
        note = "; q and k must have the same shape" if name == "k" else ""
        check.shape(name, tensor, letters, sizes, note)
        check.dtype(name, tensor, _floats())
        check.same_device(name, tensor, "q", q)
    head_dims(sizes)
    return sizes


def head_dims(sizes: dict[str, int]) -> None:
    """Limits on K, V, H and HV."""
    if not 1 <= sizes["K"] <= 256:
        raise ContractError(
            f"`q` must have 1 <= K <= 256, got K = {sizes['K']}: "
            "Currently we only support key headdim <=256 for KDA"
        )
    if sizes["H"] < 1 or sizes["HV"] < 1:
        raise ContractError(
            f"`q` and `v` must have at least one head, got H = {sizes['H']}, HV = {sizes['HV']}"
        )
    if sizes["HV"] % sizes["H"] != 0:
        raise ContractError(
            f"For GVA `v` must have HV = a multiple of H = {sizes['H']} heads, got HV = {sizes['HV']}"
        )


def _packing(a: dict[str, Any], q: Tensor) -> int | None:
    """Check cu_seqlens and its relatives. Returns N, or None for a dense call."""
    import torch

    cu, cu_cpu, h0 = (a[name] for name in ("cu_seqlens", "cu_seqlens_cpu", "initial_state"))
    max_num_seqs = a["max_num_seqs"]
    if cu is None:
        if cu_cpu is not None:
            raise ContractError("`cu_seqlens_cpu` must come with `cu_seqlens`, got cu_seqlens=None")
        return None
    cu = check.is_tensor("cu_seqlens", cu)
    check.dtype("cu_seqlens", cu, (torch.int64, torch.int32))
    check.boundaries_device(cu, "q", q)
    if cu.dim() != 1 or cu.numel() < 1:
        raise ContractError(f"`cu_seqlens` must have shape [N+1], got {list(cu.shape)}")
    N = cu.numel() - 1
    if q.shape[0] != 1:
        raise ContractError(
            f"The batch size is expected to be 1 rather than {q.shape[0]} when using `cu_seqlens`. "
            "Please flatten variable-length inputs before processing."
        )
    if isinstance(h0, torch.Tensor) and h0.shape[:1] != (N,):
        raise ContractError(
            "The number of initial states is expected to be equal to the number of input sequences, "
            f"i.e. `initial_state` must have {N} rows, got {h0.shape[0] if h0.dim() else 0}"
        )
    if a["use_graph"]:
        limit = N if max_num_seqs is None else max_num_seqs
        if limit != N:
            raise ContractError(
                f"`cu_seqlens` must hold exactly max_num_seqs + 1 entries = {limit + 1} with use_graph "
                f"(pad it with empty sequences), got {N + 1}"
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
        check.boundaries("cu_seqlens", host.tolist(), q.shape[1])
        if cu_cpu is not None and host is cu and not torch.equal(cu.long(), cu_cpu.long()):
            raise ContractError("`cu_seqlens_cpu` must hold the values of `cu_seqlens`, got others")
    return N


def _state(h0: Any, sizes: dict[str, int], inputs: tuple[Tensor, ...], v_first: bool) -> None:
    import torch

    if h0 is None:
        return
    h0 = check.is_tensor("initial_state", h0)
    wide = any(t.dtype == torch.float64 for t in inputs)
    if h0.dtype != torch.float32 and not (wide and h0.dtype == torch.float64):
        raise ContractTypeError(
            f"initial_state must be in float32. `initial_state` must be float32"
            f"{' or float64' if wide else ''}, got {check.dtype_name(h0.dtype)}"
        )
    check.shape("initial_state", h0, "N HV V K" if v_first else "N HV K V", sizes)
    check.same_device("initial_state", h0, "q", inputs[0])


def _gate(
    a: dict[str, Any], kwargs: dict[str, Any], sizes: dict[str, int], q: Tensor
) -> tuple[str, float | None, Tensor | None, Tensor | None]:
    """The form of the gate and the parameters it reads: (gate, lower_bound, A_log, dt_bias)."""
    if not a["use_gate_in_kernel"]:
        return "log", None, None, None
    A_log, dt_bias = kwargs.get("A_log"), kwargs.get("dt_bias")
    lower_bound, safe = a["lower_bound"], a["safe_gate"]
    if A_log is None and lower_bound is None:
        raise ContractError(
            "`A_log` must be provided when `use_gate_in_kernel=True` and `lower_bound` is None, got None"
        )
    if safe and lower_bound is None:
        raise ContractError(
            "`lower_bound` must be specified when `safe_gate=True` and `use_gate_in_kernel=True`, got None"
        )
    if lower_bound is not None:
        lower_bound = check.number("lower_bound", lower_bound)
        if safe and not -5 <= lower_bound < 0:
            raise ContractError(f"`lower_bound` must be in the safe range [-5, 0), got {lower_bound}")
        if not lower_bound < 0:
            raise ContractError(f"`lower_bound` must be negative, got {lower_bound}")
    HV, K = sizes["HV"], sizes["K"]
    for name, value in (("A_log", A_log), ("dt_bias", dt_bias)):
        if value is None:
            continue
        tensor = check.is_tensor(name, value)
        given = list(tensor.shape)
        if name == "A_log" and (tensor.numel() != HV or max(given, default=1) != HV):
            raise ContractError(
                f"`A_log` must have HV = {HV} elements in one dimension (others may be 1), got shape {given}"
            )
        if name == "dt_bias" and given not in ([HV * K], [HV, K]):
            raise ContractError(
                f"`dt_bias` must have shape [HV*K] = [{HV * K}] or [HV, K] = [{HV}, {K}], got {given}"
            )
        check.dtype(name, tensor, _floats())
        check.same_device(name, tensor, "q", q)
    return "softplus" if lower_bound is None else "bounded", lower_bound, A_log, dt_bias


def _inference_only(disable_recompute: bool) -> None:
    import torch

    if not torch.is_inference_mode_enabled():
        raise ContractError(
            "`return_intermediate_states=True` is only allowed in inference mode (torch.inference_mode()), "
            "got a call outside it"
        )
    if disable_recompute:
        raise ContractError(
            "`return_intermediate_states=True` must be used with disable_recompute=False, got True"
        )
