"""The shapes that are benchmarked, by name. A shape is never typed twice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Sizes of one KDA call; with `lengths`, that many packed sequences of T tokens in all."""

    name: str
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    lengths: tuple[int, ...] | None = None

    @property
    def token_heads(self) -> int:
        return self.B * self.T * self.HV

    def __str__(self) -> str:
        heads = f"H{self.H}" if self.H == self.HV else f"H{self.H} HV{self.HV}"
        packed = f" {len(self.lengths)} sequences" if self.lengths else ""
        return f"{self.name} (B{self.B} T{self.T} {heads} K{self.K} V{self.V}{packed})"


#: Twenty lengths from 7 tokens to a quarter of the batch, multiples of no chunk length.
_VARLEN_20 = (
    16411, 12289, 9001, 7013, 5003, 4001, 3001, 2203, 1709, 1301,
    997, 751, 563, 421, 317, 239, 179, 97, 33, 7,
)  # fmt: skip

_ALL = (
    Shape("prod8192", 16, 8192, 16, 16, 128, 256),
    Shape("b8_4k_h32", 8, 4096, 32, 32, 128, 128),
    Shape("kimi_8k", 1, 8192, 32, 32, 128, 128),
    Shape("kimi_64k", 1, 65536, 32, 32, 128, 128),
    Shape("kimi_256k", 1, 262144, 32, 32, 128, 128),
    Shape("k3_16k_h96", 1, 16384, 96, 96, 128, 128),
    Shape("flash_8k_h64", 1, 8192, 64, 64, 128, 128),
    Shape("small_2k", 2, 2048, 8, 8, 64, 64),
    Shape("tp8_64k", 1, 65536, 4, 4, 128, 128),
    Shape("varlen_20", 1, 65536, 32, 32, 128, 128, lengths=_VARLEN_20),
    Shape("smoke", 1, 150, 2, 4, 32, 48),
    Shape("smoke_packed", 1, 150, 1, 1, 32, 32, lengths=(100, 1, 49)),
    Shape("cpu_1k_h4", 1, 1024, 4, 4, 128, 128),
    Shape("cpu_4k_h4_d64", 1, 4096, 4, 4, 64, 64),
    Shape("cpu_packed_2k", 1, 2048, 4, 4, 64, 64, lengths=(1024, 500, 300, 150, 63, 11)),
)

SHAPES = {shape.name: shape for shape in _ALL}

#: What `kernel-fun bench` runs where none is named.
DEFAULT = {
    "cpu": ("cpu_1k_h4",),
    "cuda": ("prod8192", "b8_4k_h32", "kimi_8k"),
}
