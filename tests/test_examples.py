"""The examples do what they say."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from ranks import Ranks

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_cp.py"
SIZES: dict[str, Any] = {"steps": 4, "tokens": 96, "dim": 16, "layers": 2}


def example() -> ModuleType:
    if "train_cp" in sys.modules:
        return sys.modules["train_cp"]
    spec = importlib.util.spec_from_file_location("train_cp", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_cp"] = module
    spec.loader.exec_module(module)
    return module


def train_cp(group: Any, shape: tuple[int, int], sizes: dict[str, Any]) -> list[float]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp"))
    return example().train(example().Settings(**sizes), mesh, torch.float32)


def same_losses(found: list[float], expected: list[float]) -> None:
    assert len(found) == len(expected) == SIZES["steps"]
    assert all(abs(a - b) < 1e-4 for a, b in zip(found, expected)), (found, expected)


@pytest.mark.parametrize(
    ("change", "world", "cp", "message"),
    [
        ({}, 2, 0, "--cp must divide the number of processes, 2, got 0"),
        ({}, 4, 3, "--cp must divide the number of processes, 4, got 3"),
        ({}, 6, 2, "--batches must be a multiple of dp = processes / cp = 3, got 2"),
        ({}, 3, 3, r"--tokens must be at least 2 and a multiple of 3 \(contiguous, cp = 3\), got 512"),
        ({"tokens": 1}, 1, 1, "--tokens must be at least 2"),
        ({"tokens": 6, "layout": "zigzag"}, 2, 2, "--tokens must be at least 2 and a multiple of 4"),
        ({"heads": 3}, 1, 1, "--heads must divide --dim = 32 into heads of at most 256, got 3"),
        ({"dim": 512, "heads": 1}, 1, 1, "--heads must divide --dim = 512 into heads of at most 256, got 1"),
        ({"heads": 0}, 1, 1, "--heads must be positive, got 0"),
        ({"lr": float("nan")}, 1, 1, "--lr must be positive, got nan"),
        ({"layout": "striped"}, 1, 1, "--layout must be contiguous or zigzag, got striped"),
    ],
)
def test_train_cp_says_what_it_cannot_train(
    change: dict[str, Any], world: int, cp: int, message: str, monkeypatch: Any, capsys: Any
) -> None:
    module = example()
    assert module.complaint(module.Settings(), 2, 2) is None
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(world))
    with pytest.raises(SystemExit) as stopped:
        module.main([f"--cp={cp}", *(f"--{name}={value}" for name, value in change.items())])
    assert stopped.value.code == 2
    assert re.search(message, capsys.readouterr().err.replace("\n", " "))


@pytest.mark.slow
def test_train_cp_reaches_the_losses_of_one_process(ranks: Ranks, group_of_one: Any) -> None:
    one = train_cp(group_of_one, (1, 1), SIZES)
    assert one[-1] < one[0]
    for found in ranks.run(4, train_cp, (2, 2), {**SIZES, "layout": "zigzag"}):
        same_losses(found, one)
    flags = [f"--{name}={value}" for name, value in SIZES.items()]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, str(EXAMPLE), "--json", *flags],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    same_losses(json.loads(done.stdout), one)
