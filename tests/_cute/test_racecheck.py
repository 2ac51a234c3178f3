"""Racecheck sees some orders and not others: which, on kernels small enough to be read. See docs/numerics.md.

Where it reports a right kernel, what it reports is held to a pattern; a version that sees more reports less.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import racecheck
from racecheck import Hazard

REPORT = """
========= Error: Potential RAW hazard detected at __shared__ 0x67c in block (0,0,0) :
=========     Write Thread (159,0,0) at second+0x510
=========     Read Thread (96,0,0) at second+0x550
=========     Current Value : 0
=========
========= Error: Potential WAR hazard detected at __shared__ 0x10 in block (0,0,0) :
=========     Write Thread (3,0,0) at first(float *)+0x20
=========     Read Thread (40,0,0) at first(float *)+0x10
"""


def test_a_report_is_read():
    assert racecheck.hazards(REPORT) == [
        Hazard("RAW", "second", 159, 96),
        Hazard("WAR", "first(float *)", 40, 3),
    ]


@pytest.fixture(scope="module")
def found() -> dict[str, list[Hazard]]:
    if not hasattr(torch.cuda, "_compile_kernel"):
        pytest.skip("needs a torch that compiles CUDA")
    report, hazards = racecheck.run(str(Path(__file__).with_name("orders.py")))
    by_kernel: dict[str, list[Hazard]] = {}
    for x in hazards:
        by_kernel.setdefault(x.kernel.partition("(")[0], []).append(x)
    for name in ("lanes_arrive", "warps_arrive", "warps_free", "twice", "second_barrier", "some_meet_before"):
        assert f"{name} right" in report
    return by_kernel


@pytest.mark.gpu
@pytest.mark.sm90
@racecheck.needed
class TestOrders:
    def test_a_race_is_reported_of_every_lane(self, found: dict[str, list[Hazard]]):
        assert {x.first % 32 for x in found["unordered"]} == set(range(32))

    def test_equal_stores_of_two_warps_are_reported(self, found: dict[str, list[Hazard]]):
        assert found["twice"]

    def test_arrivals_of_every_lane_are_seen(self, found: dict[str, list[Hazard]]):
        assert "lanes_arrive" not in found

    @pytest.mark.parametrize("name, kind", [("warps_arrive", "RAW"), ("warps_free", "WAR")])
    def test_an_arrival_is_seen_of_its_own_lane_alone(
        self, found: dict[str, list[Hazard]], name: str, kind: str
    ):
        assert {x.kind for x in found.get(name, [])} <= {kind}
        assert 0 not in {x.first % 32 for x in found.get(name, [])}

    def test_a_barrier_of_all_is_lost_to_those_who_met_at_another(self, found: dict[str, list[Hazard]]):
        assert {(x.first // 128, x.second // 128) for x in found.get("second_barrier", [])} <= {(1, 0)}

    def test_a_barrier_of_all_is_lost_to_those_who_did_not_meet_before(self, found: dict[str, list[Hazard]]):
        pairs = {(x.first // 128, x.second // 128) for x in found.get("some_meet_before", [])}
        assert pairs <= {(0, 1), (1, 0)}
