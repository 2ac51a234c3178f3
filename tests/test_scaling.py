"""The model of docs/scaling.md adds up, and its message is what an exchange sends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.scaling import RANKS, TOKENS, Layer, main, table

LAYER = Layer(32, 128, 128, 1, 1024, 1.0, 2.0, 0.5, 0.25, hop=1e-3, link=2**20)


def test_the_terms() -> None:
    assert LAYER.message(2) == 128 + 2 * 2**20
    assert LAYER.message(3) == 128 + 4 * 2**20
    assert replace(LAYER, pieces=2).message(2) == 128 + 8 * 2**20
    assert LAYER.gather(1) == 0
    assert LAYER.gather(3) == pytest.approx(2 * (1e-3 + 4 + 128 / 2**20))
    assert LAYER.step(4096, 1) == 12.0
    assert LAYER.step(4096, 2) == pytest.approx(2 * 3.75 + 2 * LAYER.gather(2))
    assert LAYER.efficiency(4096, 1) == 1.0
    alone = replace(LAYER, alone=2.0)
    assert alone.step(4096, 1) == 8.0
    assert alone.step(4096, 2) == LAYER.step(4096, 2)
    assert LAYER.efficiency(4096, 64) < LAYER.efficiency(4096, 2) < 1.0


def test_the_table_of_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--measured-tokens=1024", "--forward-ms=1", "--backward-ms=2", "--forward-summary-ms=1"]
    assert main([*flags, "--backward-summary-ms=1", "--hop-us=1", "--link-GBps=1"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(table(LAYER)) == 1 + len(RANKS)
    assert all(f"T = {T // 1024}k" in printed[0] for T in TOKENS)
    document = (Path(__file__).parents[1] / "docs" / "scaling.md").read_text()
    received = [str((ranks - 1) * LAYER.message(ranks) // 2**20) for ranks in RANKS[1:]]
    assert f"| received, MiB a direction | {' | '.join(received)} |" in document
