"""KDA's ledger: the kernels that passed the GPU tests. Written by `kernel-fun verify`."""

from __future__ import annotations

from kernel_fun._common.ledger import Verified

VERIFIED: dict[str, Verified] = {}
