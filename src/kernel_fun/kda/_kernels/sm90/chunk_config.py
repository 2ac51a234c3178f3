"""What the configs of the kernels that work on one chunk, fwd_intra and bwd_grads, have in common."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_fun._cute.decay import GATES

BETA_MODES = ("raw", "sigmoid", "sigmoid2")


@dataclass(frozen=True)
class ChunkConfig:
    """Static facts of a call, dtypes by torch name. ValueError for a word that no kernel knows."""

    io: str
    g: str
    beta: str
    K: int
    gate: str
    beta_mode: str
    l2norm: bool
    has_A_log: bool
    has_dt_bias: bool
    packed: bool

    def __post_init__(self) -> None:
        half = ("bfloat16", "float16")
        for name, given, allowed in (
            ("io", self.io, half),
            ("g", self.g, (*half, "float32")),
            ("beta", self.beta, (*half, "float32")),
            ("K", self.K, (64, 128)),
            ("gate", self.gate, GATES),
            ("beta_mode", self.beta_mode, BETA_MODES),
        ):
            if given not in allowed:
                raise ValueError(f"`{name}` must be one of {', '.join(map(str, allowed))}, got {given}")
        if self.gate == "log" and (self.has_A_log or self.has_dt_bias):
            raise ValueError("`A_log` and `dt_bias` must be None with gate 'log', which has no parameters")
