"""Decays of a chunk as fwd_intra hands them to the scans."""

import torch


def around(a: torch.Tensor) -> torch.Tensor:
    """What fwd_intra calls total, [..., 9 K], from the decays [..., 64, K] of the tokens of a chunk."""
    D = a.unflatten(-2, (4, 16)).prod(-2)
    one = torch.ones_like(D[..., :1, :])
    before = torch.cat((one, D[..., :-1, :]), -2).cumprod(-2)
    after = torch.cat((D[..., 1:, :], one), -2).flip(-2).cumprod(-2).flip(-2)
    return torch.cat((D.prod(-2, keepdim=True), before, after), -2).flatten(-2)
