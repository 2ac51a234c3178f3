"""The pinned tiles as machine code for sm_90, compiled here without a GPU: registers, and no spills."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kernel_fun._cute.inspect import resources

triton = pytest.importorskip("triton")

D = 2048
POINTERS = {
    "x": "*bf16", "weight": "*fp32", "bias": "*fp32", "residual": "*bf16", "h0": "*bf16", "rows": "*i32",
    "y": "*bf16", "dy": "*bf16", "dht": "*bf16", "dx": "*bf16", "partial": "*fp32",
}  # fmt: skip
ABSENT = ("bias", "residual", "h0", "dht")


def compiled(pass_: str, tile_name: str, *, W: int, packed: bool) -> Any:
    """Registers, stack and shared memory of a pass as a training layer calls it: SiLU, no bias, no state."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kernel_fun.cconv._kernels.triton import bwd, config, fwd

    kernel = {"fwd": fwd.cconv_fwd_triton, "bwd": bwd.cconv_bwd_triton}[pass_]
    tile = config.TILES[tile_name]
    constants: dict[str, Any] = {
        "D": D, "s_xt": D, "s_yt": D, "s_rt": 0, "W": W, "SILU": True, "BT": tile.BT, "BD": tile.BD, "U": tile.U,
        **dict.fromkeys(ABSENT), **({} if packed else {"rows": None}),
    }  # fmt: skip
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = POINTERS.get(name, "i64" if name in ("s_xb", "s_yb", "s_rb") else "i32")
        if name in POINTERS or name.endswith("b"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, {n: c for n, c in constants.items() if n in signature}, attributes)
    options = {"num_warps": tile.warps, "maxnreg": tile.maxnreg}
    done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    (found,) = resources(done.asm["cubin"])
    return found


@pytest.mark.parametrize(
    "pass_, tile, W, packed, registers",
    [
        ("fwd", "fwd", 4, False, 96),
        ("fwd", "longer fwd", 4, True, 64),
        ("bwd", "bwd", 4, False, 128),
        ("bwd", "packed bwd", 4, True, 128),
    ],
)
def test_no_spills(pass_: str, tile: str, W: int, packed: bool, registers: int) -> None:
    found = compiled(pass_, tile, W=W, packed=packed)
    assert found.name == f"cconv_{pass_}_triton"
    assert found.stack_bytes == 0
    assert found.static_smem_bytes == 0
    assert found.registers <= registers


@pytest.mark.parametrize("D", [64, 512, 2048, 4096])
@pytest.mark.parametrize("name", ["fwd", "longer fwd", "bwd", "packed bwd", "wide fwd", "wide bwd"])
def test_warmup_meets_every_tile(name: str, D: int) -> None:
    """The lengths warmup runs are those that choose each tile length a larger problem can."""
    from kernel_fun.cconv._kernels.triton.config import TILES, fitted

    lengths, T = [128], 128
    while T * max(1, D // 512) < 1 << 17:
        T *= 2
        lengths.append(T)
    warmed = {fitted(name, 1, T, D) for T in lengths}
    assert fitted(name, 64, 1 << 20, D) in warmed
    assert fitted(name, 1, 1, D) in warmed
    steps = TILES[name].BT.bit_length() - (16).bit_length() + 1
    assert len(warmed) == steps


def test_a_tile_that_cannot_be_is_refused() -> None:
    from kernel_fun.cconv._kernels.triton.config import Tile

    for wrong in ({"BD": 48}, {"BT": 20}, {"BT": 8}, {"U": 3}):
        with pytest.raises(ValueError, match="no such tile"):
            Tile(**{**dict(BD=64, BT=32, U=4, warps=1), **wrong})


@pytest.mark.parametrize(
    "given, W, name",
    [
        ((), 4, "fwd"),
        (("bias",), 4, "fwd"),
        (("residual",), 4, "longer fwd"),
        (("initial_state",), 4, "longer fwd"),
        (("cu_seqlens",), 4, "longer fwd"),
        (("cu_seqlens", "initial_state"), 4, "packed states fwd"),
        (("residual",), 5, "wide fwd"),
    ],
)
def test_what_a_forward_reads_chooses_its_tile(given: tuple[str, ...], W: int, name: str) -> None:
    from kernel_fun.cconv._kernels.triton.config import TILES, fwd_tile

    names = ("bias", "residual", "initial_state", "cu_seqlens")
    tensors = {n: object() if n in given else None for n in names}
    shapes = SimpleNamespace(x=SimpleNamespace(shape=(16, 8192, D)), weight=SimpleNamespace(shape=(D, W)))
    call: Any = SimpleNamespace(**tensors, **vars(shapes))
    assert fwd_tile(call) == TILES[name]
