"""The two scripts that switch a model over run as they are, learn, and run on us."""

from __future__ import annotations

import logging
import runpy
from pathlib import Path

import pytest
import torch

from kernel_fun._common import support

EXAMPLES = Path(__file__).parents[1] / "examples"

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    "name, package", [("train_fla", "fla.models"), ("train_kimi_linear", "transformers.models.kimi_linear")]
)
def test_it_trains_on_our_kernels(
    name: str, package: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip(package)
    import kernel_fun.fla

    support.forget_logged()
    try:
        with caplog.at_level(logging.INFO, logger="kernel_fun"):
            runpy.run_path(str(EXAMPLES / f"{name}.py"))
    finally:
        kernel_fun.fla.unregister()
    losses = [
        float(line.split()[-1]) for line in capsys.readouterr().out.splitlines() if line.startswith("step")
    ]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 1.0, losses
    if not torch.cuda.is_available():
        assert "engaged (chunk_kda on eager, CPU: B=4 T=256" in caplog.text
        assert "engaged (causal_conv1d on eager, CPU: B=4 T=256" in caplog.text
