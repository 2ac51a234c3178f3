"""The host side of what both scans read: sizes, checks, facts for the config, fake tensors for the compiler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernel_fun._cute.compile import symbol, tensor
from kernel_fun.kda._kernels.sm90.operands import BT, ScanConfig

if TYPE_CHECKING:
    from torch import Tensor

FEW_CTAS = 100
"""Below this many CTAs of BV = 128 the V tile is 64."""


class ChunkTensors:
    """Fake tensors of what both scans read. A size may be one of the letters B, T, H, HV, NT."""

    def __init__(self, config: ScanConfig) -> None:
        self.config = config
        self.sizes = {letter: symbol() for letter in ("B", "T", "H", "HV", "NT", "N1")}

    def tensor(self, dtype: str, *shape: Any, align: int = 16) -> Any:
        return tensor(dtype, *(self.sizes.get(s, s) for s in shape), align=align)

    def inputs(self) -> tuple[Any, ...]:
        """q, k, g, beta, A, Aqk, q_rstd, k_rstd, total."""
        c, f32 = self.config, "float32"
        rstd = self.tensor(f32, "B", "T", "H", align=4) if c.l2norm else None
        return (
            self.tensor(c.io, "B", "T", "H", c.K),
            self.tensor(c.io, "B", "T", "H", c.K),
            self.tensor(c.g, "B", "T", "HV", c.K),
            self.tensor(c.beta, "B", "T", "HV", align=4 if c.beta == f32 else 2),
            self.tensor(c.io, "B", "T", "HV", BT),
            self.tensor(c.io, "B", "T", "HV", BT),
            rstd,
            rstd,
            self.tensor(f32, "NT", "HV", c.K),
        )

    def parameters(self) -> tuple[Any, ...]:
        """A_log, dt_bias, cu_seqlens, first chunks."""
        c, f32 = self.config, "float32"
        return (
            self.tensor(f32, "HV", align=4) if c.has_A_log else None,
            self.tensor(f32, "HV", c.K, align=8) if c.has_dt_bias else None,
            self.tensor(c.index, "N1", align=4) if c.is_packed else None,
            self.tensor("int32", "N1", align=4) if c.is_packed else None,
        )


def chunk_facts(
    q: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
    table: tuple[Tensor, Tensor] | None, *, gate: str, beta_mode: str, l2norm: bool,
) -> dict[str, Any]:  # fmt: skip
    """What the arguments of a scan say of its :class:`ScanConfig`; BV and the states are the kernel's own."""
    name = lambda x: str(x.dtype).removeprefix("torch.")
    return dict(
        io=name(q),
        g=name(g),
        beta=name(beta),
        K=q.shape[-1],
        gate=gate,
        beta_mode=beta_mode,
        l2norm=l2norm,
        has_A_log=A_log is not None,
        has_dt_bias=dt_bias is not None,
        index="" if table is None else name(table[0]),
    )


def v_tile(chains: int, V: int) -> int:
    """BV from counts alone; ``chains`` = N HV."""
    return 64 if V % 128 or chains * (V // 128) < FEW_CTAS else 128


def check(name: str, x: Tensor, shape: tuple[int, ...], dtypes: tuple[Any, ...], align: int = 1) -> None:
    """Shape, dtype, contiguous last dimension, address and other strides multiples of ``align`` bytes."""
    if tuple(x.shape) != shape:
        raise ValueError(f"`{name}` must have shape {list(shape)}, got {list(x.shape)}")
    if x.dtype not in dtypes:
        raise TypeError(f"`{name}` must have dtype {' or '.join(map(str, dtypes))}, got {x.dtype}")
    size = x.element_size()
    if x.numel() and (
        x.stride(-1) != 1 or any(b % align for b in (x.data_ptr(), *(s * size for s in x.stride()[:-1])))
    ):
        raise ValueError(
            f"`{name}` must be contiguous in its last dimension, its address and other strides multiples of "
            f"{align} bytes, got strides {x.stride()} of {size} bytes"
        )


def check_chunk_inputs(
    q: Tensor, k: Tensor, g: Tensor, beta: Tensor, A: Tensor, Aqk: Tensor, q_rstd: Tensor | None,
    k_rstd: Tensor | None, total: Tensor, A_log: Tensor | None, dt_bias: Tensor | None,
    table: tuple[Tensor, Tensor] | None, *, gate: str, lower_bound: float | None, l2norm: bool,
) -> tuple[int, int]:  # fmt: skip
    """Sequences N and chunks NT of a scan. ValueError or TypeError names the argument that does not fit."""
    import torch

    f32, io = torch.float32, q.dtype
    B, T, H, K = q.shape
    HV = A.shape[2]
    N = B if table is None else table[0].shape[0] - 1
    NT = B * -(-T // BT) if table is None else -(-T // BT) + N
    check("q", q, (B, T, H, K), (torch.bfloat16, torch.float16), 16)
    check("k", k, (B, T, H, K), (io,), 16)
    check("g", g, (B, T, HV, K), (io, f32), 16)
    check("beta", beta, (B, T, HV), (io, f32))
    check("A", A, (B, T, HV, BT), (io,), 16)
    check("Aqk", Aqk, (B, T, HV, BT), (io,), 16)
    check("total", total, (NT, HV, K), (f32,), 16)
    for name, x, shape in (
        ("q_rstd", q_rstd, (B, T, H)),
        ("k_rstd", k_rstd, (B, T, H)),
        ("A_log", A_log, (HV,)),
        ("dt_bias", dt_bias, (HV, K)),
    ):
        if x is not None:
            check(name, x, shape, (f32,), 8 if name == "dt_bias" else 4)
    if l2norm:
        if q_rstd is None or k_rstd is None:
            raise ValueError("`q_rstd` and `k_rstd` must be given with l2norm, got None")
        if q_rstd.stride() != k_rstd.stride():
            raise ValueError(
                f"`k_rstd` must have the strides of `q_rstd`, {q_rstd.stride()}, got {k_rstd.stride()}"
            )
    if H == 0 or HV % H:
        raise ValueError(f"the heads of `g` must be a multiple of those of `q`, got {HV} and {H}")
    if K not in (64, 128):
        raise ValueError(f"K must be 64 or 128, got {K}")
    if gate == "bounded" and lower_bound is None:
        raise ValueError("`lower_bound` must be given with gate 'bounded', got None")
    if table is not None:
        check("table[0]", table[0], (N + 1,), (torch.int32, torch.int64))
        check("table[1]", table[1], (N + 1,), (torch.int32,))
        if B != 1:
            raise ValueError(f"`q` must have batch size 1 with a table, got {B}")
    return N, NT
