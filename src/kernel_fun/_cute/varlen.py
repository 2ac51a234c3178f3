"""Chunks of packed sequences, laid out on the device without asking it anything.

How many chunks a packing has is known to the device alone, so tables have as many rows as it could have:
ceil(T / BT) + N, where every sequence may add one partial chunk. Rows past the last chunk have no tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

FIRST, VALID, SEQUENCE, CHUNK = range(4)
"""Columns of a chunk table."""


def chunk_bound(tokens: int, sequences: int, BT: int = 64) -> int:
    """Rows of the chunk table of any packing of ``tokens`` tokens into ``sequences`` sequences."""
    return -(-tokens // BT) + sequences


def sequence_chunks(cu_seqlens: Tensor, BT: int = 64) -> Tensor:
    """First chunk of each sequence, then the number of all chunks: ``[N + 1]`` int32, on its device."""
    import torch

    counts = (cu_seqlens.diff() + (BT - 1)).div(BT, rounding_mode="floor")
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)


def chunk_table(cu_seqlens: Tensor, tokens: int, BT: int = 64) -> Tensor:
    """One row per chunk, in sequence order: ``[ceil(tokens / BT) + N, 4]`` int32, no device synchronisation.

    ``cu_seqlens``: ``[N + 1]`` int32 or int64, boundaries of the sequences; empty ones have no chunk.
    Columns: first token, valid tokens (1..BT), sequence, chunk within its sequence. Rows past the last chunk
    are ``(0, 0, N, 0)``: no valid token. ValueError where token indices do not fit 32 bits.
    """
    import torch

    if tokens >= 1 << 31:
        raise ValueError(f"`tokens` must be below 2^31, got {tokens}")
    N = cu_seqlens.shape[0] - 1
    if N == 0:
        return cu_seqlens.new_zeros((chunk_bound(tokens, 0, BT), 4), dtype=torch.int32)
    starts = sequence_chunks(cu_seqlens, BT).long()
    index = torch.arange(chunk_bound(tokens, N, BT), device=cu_seqlens.device)
    sequence = torch.searchsorted(starts[1:], index, right=True)
    chunk = index - starts[sequence]
    bounds = cu_seqlens.long()
    first = bounds[sequence] + BT * chunk
    valid = (bounds[(sequence + 1).clamp(max=N)] - first).clamp(0, BT)
    table = torch.stack((first, valid, sequence, chunk), 1)
    table.mul_((sequence < N).unsqueeze(1))
    table[:, SEQUENCE].copy_(sequence)
    return table.to(torch.int32)
