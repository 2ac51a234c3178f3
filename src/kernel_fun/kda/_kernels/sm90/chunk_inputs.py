"""The host side of what both scans read: sizes, checks, facts for the config, fake tensors for the compiler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernel_fun._cute.compile import symbol, tensor
from kernel_fun.kda._kernels.sm90.scan_config import BT, DECAYS, ScanConfig

if TYPE_CHECKING:
    from torch import Tensor, dtype

CHUNK_TIME = {64: 7, 128: 9}
"""Time of a chunk by BV, in a unit of its own."""


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
            self.tensor(f32, "NT", "HV", DECAYS * c.K),
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


Facts = tuple[tuple[int, ...], tuple[int, ...], "dtype"]
"""Shape, strides and dtype of a tensor: all of it that decides which kernel runs and whether it may."""


def facts_of(*tensors: Tensor | None) -> tuple[Facts | None, ...]:
    """Facts of tensors, as the key of what a launcher has found out about them."""
    return tuple(None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors)


def name_of(dtype: dtype) -> str:
    return str(dtype).removeprefix("torch.")


def v_tile(chains: int, V: int, sms: int) -> int:
    """BV from counts alone: the one whose waves of CTAs end first. ``chains`` = N HV; ``sms``: of the device."""
    if V % 128:
        return 64
    return min((128, 64), key=lambda BV: -(-chains * (V // BV) // max(sms, 1)) * CHUNK_TIME[BV])


def check(name: str, x: Facts, shape: tuple[int, ...], dtypes: tuple[Any, ...], align: int = 1) -> None:
    """Shape, dtype, contiguous last dimension, other strides multiples of ``align`` bytes."""
    found, strides, dtype = x
    if tuple(found) != shape:
        raise ValueError(f"`{name}` must have shape {list(shape)}, got {list(found)}")
    if dtype not in dtypes:
        raise TypeError(f"`{name}` must have dtype {' or '.join(map(str, dtypes))}, got {dtype}")
    size = dtype.itemsize
    if 0 not in found and (strides[-1] != 1 or any(s * size % align for s in strides[:-1])):
        raise ValueError(
            f"`{name}` must be contiguous in its last dimension, its other strides multiples of {align} bytes, "
            f"got strides {tuple(strides)} of {size} bytes"
        )


def check_addresses(names: tuple[str, ...], tensors: tuple[Tensor | None, ...]) -> None:
    """What TMA reads begins at a multiple of 16 bytes."""
    for name, x in zip(names, tensors, strict=True):
        if x is not None and x.data_ptr() % 16:
            raise ValueError(f"`{name}` must begin at a multiple of 16 bytes, got address {x.data_ptr()}")


def check_chunk_inputs(
    q: Facts, k: Facts, g: Facts, beta: Facts, A: Facts, Aqk: Facts, q_rstd: Facts | None, k_rstd: Facts | None,
    total: Facts, A_log: Facts | None, dt_bias: Facts | None, cu_seqlens: Facts | None, first_chunks: Facts | None,
    *, gate: str, has_bound: bool, l2norm: bool,
) -> tuple[int, int]:  # fmt: skip
    """Sequences N and chunks NT of a scan. ValueError or TypeError names the argument that does not fit."""
    import torch

    f32, io = torch.float32, q[2]
    (B, T, HV, _), (H, K) = A[0], q[0][2:]
    N = B if cu_seqlens is None else cu_seqlens[0][0] - 1
    NT = B * -(-T // BT) if cu_seqlens is None else -(-T // BT) + N
    if B * T >= 1 << 31:
        raise ValueError(f"`q` must have less than 2^31 tokens, got {B * T}")
    check("q", q, (B, T, H, K), (torch.bfloat16, torch.float16), 16)
    check("k", k, (B, T, H, K), (io,), 16)
    check("g", g, (B, T, HV, K), (io, f32), 16)
    check("beta", beta, (B, T, HV), (io, f32))
    check("A", A, (B, T, HV, BT), (io,), 16)
    check("Aqk", Aqk, (B, T, HV, BT), (io,), 16)
    check("total", total, (NT, HV, DECAYS * K), (f32,), 16)
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
        if q_rstd[1] != k_rstd[1]:
            raise ValueError(f"`k_rstd` must have the strides of `q_rstd`, {q_rstd[1]}, got {k_rstd[1]}")
    if H == 0 or HV % H:
        raise ValueError(f"the heads of `g` must be a multiple of those of `q`, got {HV} and {H}")
    if K not in (64, 128):
        raise ValueError(f"K must be 64 or 128, got {K}")
    if gate == "bounded" and not has_bound:
        raise ValueError("`lower_bound` must be given with gate 'bounded', got None")
    if cu_seqlens is not None and first_chunks is not None:
        check("table[0]", cu_seqlens, (N + 1,), (torch.int32, torch.int64))
        check("table[1]", first_chunks, (N + 1,), (torch.int32,))
        if B != 1:
            raise ValueError(f"`q` must have batch size 1 with a table, got {B}")
    return N, NT


def chunk_facts(
    q: Facts, g: Facts, beta: Facts, A_log: Facts | None, dt_bias: Facts | None, cu_seqlens: Facts | None, *,
    gate: str, beta_mode: str, l2norm: bool,
) -> dict[str, Any]:  # fmt: skip
    """What the arguments of a scan say of its :class:`ScanConfig`; BV and the states are the kernel's own."""
    return dict(
        io=name_of(q[2]),
        g=name_of(g[2]),
        beta=name_of(beta[2]),
        K=q[0][-1],
        gate=gate,
        beta_mode=beta_mode,
        l2norm=l2norm,
        has_A_log=A_log is not None,
        has_dt_bias=dt_bias is not None,
        index="" if cu_seqlens is None else name_of(cu_seqlens[2]),
    )
