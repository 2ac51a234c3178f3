"""KDA's ledger: the Hopper stages that passed the GPU tests of the whole operation.

None has yet: they are compiled, not run.
"""

from __future__ import annotations

from kernel_fun._common.ledger import Verified

VERIFIED: dict[str, Verified] = {}

KERNELS = {
    stage: f"kernel_fun.kda._kernels.sm90.{stage}"
    for stage in ("fwd_intra", "fwd_state", "bwd_state", "bwd_grads")
}
"""Module of each kernel."""
