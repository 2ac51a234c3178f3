"""A byte-level language model whose only way to look back is Kimi Delta Attention.

The model has two forms with the same parameters: `chunk_kda` over a whole sequence, for training,
and `fused_recurrent_kda` from carried state, for generation. One layer:

    qkv = silu(causal_conv(x Wqkv))               q, k [B,T,H,K]   v [B,T,HV,V]
    g   = x Wf1 Wf2                               [B,T,HV,K]       gate before activation
    b   = x Wb                                    [B,T,HV]         write strength before sigmoid
    o   = kda(q/|q|, k/|k|, v, -exp(A_log) softplus(g + dt_bias), sigmoid(b))
    y   = (rms_norm(o) * sigmoid(x Wg1 Wg2)) Wo
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernel_fun._common import config
from kernel_fun.cconv import causal_conv1d
from kernel_fun.kda import chunk_kda, fused_recurrent_kda

Form = Literal["chunk", "recurrent"]
Convolution = Literal["kernel-fun", "torch"]


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; the defaults of each machine are in `recipe.py`."""

    layers: int
    width: int
    H: int
    HV: int
    K: int
    V: int
    mlp_width: int
    conv_taps: int = 4
    vocabulary: int = 256
    convolution: Convolution = "kernel-fun"
    """What computes the short convolution: `kernel_fun.cconv`, or torch to compare step times with."""


@dataclass
class LayerState:
    """What one layer carries from token to token.

    `kda` is fp32 `[B, HV, K, V]`; `conv` is `[B, D, conv_taps]`, the last inputs of the short
    convolution, the newest last.
    """

    kda: Tensor
    conv: Tensor


def _recurrent(**arguments: Any) -> tuple[Tensor, Tensor | None]:
    """One token after another. A backend that is demanded of chunk_kda need not have this form."""
    with config.KDA_BACKEND.set(config.KDA_BACKEND.default):
        return fused_recurrent_kda(**arguments)


def shifted_products(x: Tensor, weight: Tensor, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    """`causal_conv1d` with SiLU as a sum of shifted products that autograd differentiates.

    Args:
        x: `[B, T, D]`.
        weight: `[D, W]`; tap `W - 1` multiplies the present token.
        initial_state: `[B, D, W]`, the last W inputs before `x`, or None for zeros.

    Returns:
        `(y, final_state)`: `[B, T, D]` and `[B, D, W]`, both in the dtype of x.
    """
    B, T, D = x.shape
    W = weight.shape[1]
    if initial_state is None:
        initial_state = x.new_zeros(B, D, W)
    padded = torch.cat([initial_state.transpose(1, 2), x], dim=1)  # [B, W + T, D]
    taps = weight.to(x.dtype)
    y = padded[:, W:] * taps[:, W - 1]
    for w in range(W - 1):
        y = torch.addcmul(y, padded[:, w + 1 : w + 1 + T], taps[:, w])
    return F.silu(y), padded[:, -W:].transpose(1, 2)


class KimiDeltaAttention(nn.Module):
    """One KDA layer: `[B, T, width] -> [B, T, width]`."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.config = c
        self.key_dim, self.value_dim = c.H * c.K, c.HV * c.V
        channels = 2 * self.key_dim + self.value_dim
        self.qkv_proj = nn.Linear(c.width, channels, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(channels, c.conv_taps))
        self.f_proj = nn.Sequential(
            nn.Linear(c.width, c.V, bias=False), nn.Linear(c.V, c.HV * c.K, bias=False)
        )
        self.b_proj = nn.Linear(c.width, c.HV, bias=False)
        self.g_proj = nn.Sequential(nn.Linear(c.width, c.V, bias=False), nn.Linear(c.V, self.value_dim))
        self.norm_weight = nn.Parameter(torch.ones(c.V))
        self.o_proj = nn.Linear(self.value_dim, c.width, bias=False)
        self.A_log = nn.Parameter(torch.empty(c.HV))
        self.dt_bias = nn.Parameter(torch.empty(c.HV * c.K))
        self._initialise_decay()

    @torch.no_grad()
    def _initialise_decay(self) -> None:
        """Decay rates A in (1, 16) and time steps in (1e-3, 0.1): memories of 1 to 1000 tokens."""
        self.A_log.uniform_(1, 16).log_()
        dt = self.dt_bias.uniform_(math.log(1e-3), math.log(0.1)).exp_()
        dt.add_((-torch.expm1(-dt)).log())  # inverse of softplus
        nn.init.uniform_(self.conv_weight, -0.5, 0.5)

    def forward(
        self, x: Tensor, state: LayerState | None, form: Form, keep_state: bool
    ) -> tuple[Tensor, LayerState | None]:
        c = self.config
        qkv, conv = self._convolve(self.qkv_proj(x), None if state is None else state.conv, keep_state)
        q, k, v = qkv.split([self.key_dim, self.key_dim, self.value_dim], dim=-1)
        kda = chunk_kda if form == "chunk" else _recurrent
        o, final_state = kda(
            q=q.unflatten(-1, (c.H, c.K)),
            k=k.unflatten(-1, (c.H, c.K)),
            v=v.unflatten(-1, (c.HV, c.V)),
            g=self.f_proj(x).unflatten(-1, (c.HV, c.K)),
            beta=self.b_proj(x),
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            initial_state=None if state is None else state.kda,
            output_final_state=keep_state,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
        )
        gate = self.g_proj(x).unflatten(-1, (c.HV, c.V)).sigmoid()
        y = self.o_proj((F.rms_norm(o, (c.V,), self.norm_weight.to(o.dtype), 1e-5) * gate).flatten(-2))
        return y, None if final_state is None or conv is None else LayerState(final_state, conv)

    def _convolve(self, x: Tensor, state: Tensor | None, keep_state: bool) -> tuple[Tensor, Tensor | None]:
        if self.config.convolution == "torch":
            return shifted_products(x, self.conv_weight, state)
        return causal_conv1d(
            x,
            self.conv_weight,
            initial_state=state,
            output_final_state=keep_state,
            activation="silu",
        )


class Block(nn.Module):
    """Pre-norm residual block: KDA, then a gated MLP."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.kda_norm = nn.RMSNorm(c.width, eps=1e-5)
        self.kda = KimiDeltaAttention(c)
        self.mlp_norm = nn.RMSNorm(c.width, eps=1e-5)
        self.mlp_in = nn.Linear(c.width, 2 * c.mlp_width, bias=False)
        self.mlp_out = nn.Linear(c.mlp_width, c.width, bias=False)

    def forward(
        self, x: Tensor, state: LayerState | None, form: Form, keep_state: bool
    ) -> tuple[Tensor, LayerState | None]:
        y, state = self.kda(self.kda_norm(x), state, form, keep_state)
        x = x + y
        gate, up = self.mlp_in(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.mlp_out(F.silu(gate) * up), state


class ByteModel(nn.Module):
    """Embedding, blocks, norm, and a head tied to the embedding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        shrink = (2 * self.config.layers) ** -0.5  # the residual stream keeps its size at any depth
        for module in self.modules():
            if isinstance(module, nn.Linear):
                for name, parameter in module.named_parameters():
                    std = module.in_features**-0.5 if name == "weight" else 0.0
                    nn.init.normal_(parameter, std=std)
        for module in self.modules():
            if isinstance(module, Block):
                module.kda.o_proj.weight.mul_(shrink)
                module.mlp_out.weight.mul_(shrink)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(
        self,
        tokens: Tensor,
        states: list[LayerState] | None = None,
        *,
        form: Form = "chunk",
        keep_states: bool = False,
    ) -> tuple[Tensor, list[LayerState] | None]:
        """Logits of the next byte.

        Args:
            tokens: int64 `[B, T]`.
            states: what the layers carry from the tokens before, or None at the start.
            form: "chunk" (differentiable) or "recurrent" (no gradient).
            keep_states: also return the states after the last token.

        Returns:
            `(logits [B, T, 256], states or None)`.
        """
        x = self.embedding(tokens)
        kept: list[LayerState] = []
        for i, block in enumerate(self.blocks):
            x, state = block(x, None if states is None else states[i], form, keep_states)
            if state is not None:
                kept.append(state)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return logits, kept if keep_states else None
