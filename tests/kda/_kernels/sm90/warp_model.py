"""A warp on numpy: the lanes of a traced kernel function as arrays, its PTX interpreted, its shared memory as bytes.

Runs the plain Python parts of a kernel as they stand. Registers are ``[32]`` arrays, words are int64 modulo 2^32.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np

LANE = np.arange(32)
ROW, COLUMN = LANE // 4, LANE % 4


def bf16_bits(x: Any) -> np.ndarray:
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.int64)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def bf16_values(bits: Any) -> np.ndarray:
    return ((np.asarray(bits, np.int64) & 0xFFFF) << 16).astype(np.uint32).view(np.float32)


def rounded(x: Any) -> np.ndarray:
    return bf16_values(bf16_bits(x))


def words_of(x: np.ndarray) -> np.ndarray:
    """The bits of fp32 values; words as they are."""
    return x.view(np.uint32).astype(np.int64) if x.dtype == np.float32 else x


class Machine:
    """Shared memory and an interpreter of the inline PTX the kernels use."""

    def __init__(self, smem_bytes: int = 232448) -> None:
        self.smem = np.zeros(smem_bytes, np.uint8)

    def halves(self, address: int, n: int) -> np.ndarray:
        return self.smem[address : address + 2 * n].view(np.uint16)

    def floats(self, address: int, n: int) -> np.ndarray:
        return self.smem[address : address + 4 * n].view(np.float32)

    def put_tile(self, address: int, x: np.ndarray) -> None:
        """bf16 (rows, cols) in the 128-byte swizzle, 64 columns after another."""
        for r in range(x.shape[0]):
            for u in range(x.shape[1] // 8):
                at = address + u // 8 * (x.shape[0] * 128) + r * 128 + ((u % 8) ^ (r % 8)) * 16
                self.halves(at, 8)[:] = bf16_bits(x[r, 8 * u : 8 * u + 8])

    def get_tile(self, address: int, rows: int, cols: int) -> np.ndarray:
        out = np.zeros((rows, cols), np.float32)
        for r in range(rows):
            for u in range(cols // 8):
                at = address + u // 8 * (rows * 128) + r * 128 + ((u % 8) ^ (r % 8)) * 16
                out[r, 8 * u : 8 * u + 8] = bf16_values(self.halves(at, 8))
        return out

    def ptx(self, code: str, write_only_types: Any = (), read_only_args: Any = ()) -> Any:
        op = code.split(maxsplit=1)[0] if code[0] != "{" else "clamp"
        args = [np.broadcast_to(np.asarray(x), 32) for x in read_only_args]
        if found := re.search(r"\{\$r0\}\+(\d+)\]", code):
            args[0] = args[0] + int(found.group(1))
        out = getattr(self, "op_" + re.sub(r"\W", "_", op.split(".")[0]))(op, *args)
        return out[0] if out is not None and len(out) == 1 else out

    def op_cvt(self, op: str, lo: Any, hi: Any) -> Any:
        assert op == "cvt.rn.bf16x2.f32"
        return [bf16_bits(lo) | (bf16_bits(hi) << 16)]

    def op_shl(self, op: str, word: Any) -> Any:
        return [bf16_values(word)]

    def op_and(self, op: str, word: Any) -> Any:
        return [bf16_values(word >> 16)]

    def op_ex2(self, op: str, x: Any) -> Any:
        with np.errstate(over="ignore", under="ignore"):
            y = np.exp2(x.astype(np.float32))
        return [np.where(y < np.float32(2.0**-126), np.float32(0), y)]

    def op_clamp(self, op: str, x: Any, high: Any, low: Any) -> Any:
        return [np.clip(x, low, high)]

    def op_mul(self, op: str, x: Any, y: Any) -> Any:
        if op == "mul.rn.bf16x2":
            pairs = ([bf16_values(w >> n) for n in (0, 16)] for w in map(words_of, (x, y)))
            return self.op_cvt("cvt.rn.bf16x2.f32", *(a * b for a, b in zip(*pairs, strict=True)))
        assert op == "mul.sat.f32"
        return [np.nan_to_num(np.clip(x * y, np.float32(0), np.float32(1)))]

    def op_add(self, op: str, x: Any) -> Any:
        """Of a number as a word, what rounds it to tf32."""
        assert op == "add.u32"
        return [(words_of(x) + 0x1000).astype(np.uint32).view(np.float32)]

    def op_abs(self, op: str, x: Any) -> Any:
        return [np.abs(x)]

    def op_mov(self, op: str, x: Any) -> Any:
        return [x]

    def op_ldmatrix(self, op: str, address: Any) -> Any:
        words = []
        for m in range(2 if ".x2" in op else 4):
            x = np.stack([self.halves(int(a), 8) for a in address[8 * m : 8 * m + 8]]).astype(np.int64)
            x = x.T if ".trans" in op else x
            words.append(x[ROW, 2 * COLUMN] | (x[ROW, 2 * COLUMN + 1] << 16))
        return words

    def op_stmatrix(self, op: str, address: Any, *words: Any) -> None:
        for m, word in enumerate(words):
            x = np.zeros((8, 8), np.int64)
            x[ROW, 2 * COLUMN], x[ROW, 2 * COLUMN + 1] = word & 0xFFFF, (word >> 16) & 0xFFFF
            x = x.T if ".trans" in op else x
            for i in range(8):
                self.halves(int(address[8 * m + i]), 8)[:] = x[i]

    def op_ld(self, op: str, address: Any) -> Any:
        n = int(m.group(1)) if (m := re.search(r"\.v(\d)", op)) else 1
        kind = np.uint32 if op.endswith("b32") else np.float32
        x = np.stack([self.smem[int(a) : int(a) + 4 * n].view(kind) for a in address], 1)
        return list(x.astype(np.int64) if kind is np.uint32 else x)

    def op_st(self, op: str, address: Any, *values: Any) -> None:
        values = tuple(words_of(v) for v in values) if op.endswith("b32") else values
        kind = np.uint32 if op.endswith("b32") else np.float32
        for lane in LANE:
            at = int(address[lane])
            self.smem[at : at + 4 * len(values)].view(kind)[:] = [v[lane] for v in values]

    def op_mma(self, op: str, *args: Any) -> Any:
        k = 8 if "m16n8k8" in op else 16
        n_a, n_b = k // 4, k // 8
        a, b, c = args[:n_a], args[n_a : n_a + n_b], args[n_a + n_b :]
        A, B, C = np.zeros((16, k)), np.zeros((k, 8)), np.zeros((16, 8))
        for i, word in enumerate(a):
            for p in range(2):
                A[ROW + 8 * (i % 2), 2 * COLUMN + p + 8 * (i // 2)] = bf16_values(word >> (16 * p))
        for i, word in enumerate(b):
            for p in range(2):
                B[2 * COLUMN + p + 8 * i, ROW] = bf16_values(word >> (16 * p))
        for e in range(4):
            C[ROW + 8 * (e // 2), 2 * COLUMN + e % 2] = c[e]
        C = (C + A @ B).astype(np.float32)
        return [C[ROW + 8 * (e // 2), 2 * COLUMN + e % 2] for e in range(4)]


def install(monkeypatch: Any, machine: Machine, *modules: Any) -> None:
    """Make the traced code of ``modules`` run on a machine."""
    import cutlass
    from cutlass import cute

    monkeypatch.setattr(cute.arch, "inline_ptx", machine.ptx)
    monkeypatch.setattr(cute.arch, "shuffle_sync_bfly", lambda x, offset: x[LANE ^ offset])
    monkeypatch.setattr(cute.arch, "sync_warp", lambda: None)
    monkeypatch.setattr(cute.arch, "rcp_approx", lambda x: np.float32(1.0) / x)
    monkeypatch.setattr(cutlass, "min", np.minimum)
    monkeypatch.setattr(cutlass, "max", np.maximum)
    for module in modules:
        for name, put in (
            ("select", lambda c, x, y: np.where(np.broadcast_to(c, 32), x, y)),
            ("Float32", np.float32),
            ("Int32", np.int64),
        ):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, put)


class View:
    """An array of shared memory as a kernel indexes it."""

    def __init__(self, machine: Machine, address: int, kind: Any, n: int) -> None:
        self.x = machine.smem[address : address + np.dtype(kind).itemsize * n].view(kind)
        self.iterator = SimpleNamespace(toint=lambda: np.int64(address))

    def __getitem__(self, i: Any) -> Any:
        x = self.x[np.broadcast_to(np.asarray(i), 32)]
        return x if x.dtype == np.float32 else x.astype(np.int64)

    def __setitem__(self, i: Any, value: Any) -> None:
        self.x[np.broadcast_to(np.asarray(i), 32)] = value


class Registers(list[Any]):
    """fp32 registers of every lane."""

    def __init__(self, n: int, _kind: Any = None) -> None:
        super().__init__([np.zeros(32, np.float32)] * n)

    def fill(self, x: float) -> None:
        self[:] = [np.full(32, x, np.float32)] * len(self)
