"""CuTe kernels for Hopper."""

from __future__ import annotations

from kernel_fun._cute import absent

KERNELS = {
    stage: f"kernel_fun.kda._kernels.sm90.{stage}"
    for stage in ("fwd_intra", "fwd_state", "bwd_state", "bwd_grads")
}
"""Module of each stage's kernel."""

absent.prepare("kernel_fun.kda._kernels.sm90.stages")
