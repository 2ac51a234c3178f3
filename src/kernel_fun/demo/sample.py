"""Text from a trained model by the recurrent form, and how well the two forms agree."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernel_fun.demo.model import ByteModel


@torch.no_grad()
def generate(
    model: ByteModel,
    prompt: bytes,
    length: int,
    *,
    seed: int,
    temperature: float = 0.7,
    dtype: torch.dtype = torch.float32,
) -> bytes:
    """`length` bytes that follow `prompt`.

    The prompt goes through `chunk_kda` in one call; its final states are handed to
    `fused_recurrent_kda`, which then takes one byte at a time.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt)], device=device)
    written = bytearray()
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        logits, states = model(tokens, form="chunk", keep_states=True)
        for _ in range(length):
            weights = (logits[0, -1].float().cpu() / temperature).softmax(-1)
            byte = int(torch.multinomial(weights, 1, generator=generator))
            written.append(byte)
            tokens = torch.tensor([[byte]], device=device)
            logits, states = model(tokens, states, form="recurrent", keep_states=True)
    return bytes(written)


@dataclass(frozen=True)
class Agreement:
    """How far the logits of the two forms are apart on one window of held-out text.

    `difference` is the largest absolute difference, also over the run that starts in the chunk form
    and hands its states over at byte `handed_over_at`; `largest` is the largest absolute logit.
    """

    bytes: int
    handed_over_at: int
    difference: float
    largest: float
    same_choice: int
    tolerance: float

    @property
    def agrees(self) -> bool:
        return self.difference <= self.tolerance * self.largest

    def __str__(self) -> str:
        verdict = "agree" if self.agrees else "DISAGREE"
        return (
            f"chunk and recurrent logits {verdict}: on {self.bytes} held-out bytes they differ by "
            f"at most {self.difference:.1e} (largest logit {self.largest:.1f}, allowed "
            f"{self.tolerance * self.largest:.1e}); same most likely byte at {self.same_choice} "
            f"of {self.bytes}; states also handed over at byte {self.handed_over_at}"
        )


#: Allowed difference of the logits, as a fraction of the largest one: the forms round differently
#: in every layer, and bf16 keeps 8 bits where fp32 keeps 24.
AGREEMENT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


@torch.no_grad()
def agreement(model: ByteModel, tokens: Tensor, dtype: torch.dtype) -> Agreement:
    """Compares the two forms on `tokens` int64 `[1, T]`, from the start and after a hand-over."""
    T = tokens.shape[1]
    cut = T * 2 // 5 + 1  # not a multiple of the chunk length
    with torch.autocast(tokens.device.type, dtype, enabled=dtype != torch.float32):
        chunk, _ = model(tokens, form="chunk")
        recurrent, _ = model(tokens, form="recurrent")
        _, states = model(tokens[:, :cut], form="chunk", keep_states=True)
        resumed, _ = model(tokens[:, cut:], states, form="recurrent")
    chunk, recurrent, resumed = chunk.float(), recurrent.float(), resumed.float()
    differences = torch.stack([(recurrent - chunk).abs().max(), (resumed - chunk[:, cut:]).abs().max()])
    return Agreement(
        bytes=T,
        handed_over_at=cut,
        difference=float(differences.max()),  # NaN on either side is NaN here, and disagrees
        largest=float(chunk.abs().max()),
        same_choice=int((recurrent.argmax(-1) == chunk.argmax(-1)).sum()),
        tolerance=AGREEMENT_TOLERANCE[dtype],
    )
