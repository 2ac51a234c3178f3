"""Arrival counts and sizes follow from the roles; bad declarations are refused; rings of both kinds compile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("cutlass")

import cutlass
from cutlass import Float32, Int32, cute

from kernel_fun._cute import inspect, pipe
from kernel_fun._cute.compat import SmemAllocator
from kernel_fun._cute.compile import Jit, Program, symbol, tensor
from kernel_fun._cute.pipe import Pipe, Role
from kernel_fun._cute.tile import storage, vector

LOAD, BUILD, STATE = Role(0, 1), Role(4, 8, 64), Role(12, 4, 192)


def test_counts_of_a_ring_filled_by_tma():
    ring = Pipe(3, LOAD, (BUILD, STATE), tx_bytes=4096)
    assert (ring.full_arrivals, ring.empty_arrivals, ring.barriers, ring.smem_bytes) == (1, 12, 6, 48)


def test_counts_of_a_ring_filled_by_stores():
    ring = Pipe(2, BUILD, (STATE,))
    assert (ring.full_arrivals, ring.empty_arrivals, ring.barriers) == (8, 4, 4)


def test_a_ring_that_frees_nothing_has_no_empty_barriers():
    ring = Pipe(3, BUILD)
    assert (ring.full_arrivals, ring.empty_arrivals, ring.barriers, ring.smem_bytes) == (8, 0, 3, 24)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(stages=0, writer=LOAD), "`stages` must be at least 1, got 0"),
        (dict(stages=1, writer=LOAD, tx_bytes=1 << 20), "`tx_bytes` must be in"),
        (dict(stages=1, writer=LOAD, tx_bytes=-1), "`tx_bytes` must be in"),
        (dict(stages=1, writer=LOAD, readers=(STATE, Role(15, 2))), "`readers` must not share warps"),
    ],
)
def test_bad_declarations_are_refused(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        Pipe(**arguments)


def test_register_budget():
    assert pipe.registers_at_entry(512) == 128
    assert pipe.registers_at_entry(640) == 96
    assert pipe.register_budget(512, (Role(0, 8, 64), Role(8, 8, 192))) == 0
    assert pipe.register_budget(512, (Role(0, 8, 72), Role(8, 8, 192))) < 0
    assert pipe.register_budget(512, (Role(0, 8), Role(8, 8))) == 0


@dataclass(frozen=True)
class Config:
    stages: int = 2


class Relay:
    """One warp writes a vector a turn, another adds it up."""

    def __init__(self, config: Config) -> None:
        self.stages = config.stages
        self.WRITE, self.READ = Role(0, 1), Role(1, 1)
        self.pipe = Pipe(config.stages, self.WRITE, (self.READ,))

    @cute.jit
    def __call__(self, mX: cute.Tensor, stream: Any):
        self.Storage = storage(pipe=self.pipe.field(), x=vector(Float32, 32 * self.stages))
        self.relay(mX).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)

    @cute.kernel
    def relay(self, mX: cute.Tensor):
        st = SmemAllocator().allocate(self.Storage)
        ring = self.pipe.bind(st.pipe)
        pipe.start()
        sX = st.x.get_tensor(cute.make_layout((32, self.stages)))
        lane = pipe.thread_again() % 32
        if pipe.index_of_warp() == 0:
            at = ring.write_cursor()
            for n in cutlass.range(mX.shape[0], unroll=1):
                ring.wait_empty(at)
                sX[lane, at.index] = mX[n, lane]
                ring.publish(at)
                at.advance()
        else:
            total = Float32(0.0)
            at = ring.read_cursor()
            for _ in cutlass.range(mX.shape[0], unroll=1):
                ring.wait_full(at)
                total = total + sX[lane, at.index]
                ring.free(at)
                at.advance()
            mX[Int32(0), lane] = total


def build(config: Config) -> Program:
    return Program(Relay(config), (tensor("float32", symbol(), 32),))


def test_a_ring_of_ordinary_stores_compiles(cache_dir: Any):
    (kernel,) = inspect.resources(Jit(build, "sm_90a").object(Config()))
    assert kernel.stack_bytes == 0
    assert kernel.registers <= 40
