"""The smallest kernel: doubles a vector. Compiled by the tests of the compiler and the inspector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, cute

from kernel_fun._cute.compile import Program, symbol, tensor


@dataclass(frozen=True)
class Config:
    threads: int


class Scaler:
    def __init__(self, config: Config) -> None:
        self.threads = config.threads

    @cute.jit
    def __call__(self, mX: cute.Tensor, blocks: Int32, stream: Any):
        self.scaler(mX).launch(grid=(blocks, 1, 1), block=(self.threads, 1, 1), stream=stream)

    @cute.kernel
    def scaler(self, mX: cute.Tensor):
        i = cute.arch.block_idx()[0] * self.threads + cute.arch.thread_idx()[0]
        mX[i] = mX[i] * 2.0


def trace(config: Config) -> Program:
    return Program(Scaler(config), (tensor("float32", symbol()), Int32(1)))


def build(config: Config) -> Program:
    return trace(config)
