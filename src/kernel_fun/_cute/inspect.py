"""What is inside a compiled kernel: registers, stack, static shared memory. Needs no GPU and no toolkit.

An exported object embeds one CUDA ELF per kernel. Attributes are read from ``.nv.info`` (format 4 records:
attribute, size, then symbol index and value), kernel names from ``.text.<name>``, shared memory known at
compile time from the size of ``.nv.shared.<name>``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

EM_CUDA = 190
SHT_NOBITS = 8
REGISTERS = 0x2F
FRAME_SIZE = 0x11
MIN_STACK_SIZE = 0x12
VALUE_RECORD = 4


@dataclass(frozen=True)
class Resources:
    """One kernel of an object."""

    name: str
    registers: int
    """Per thread, at entry."""
    stack_bytes: int
    """Per thread; anything above 0 is spills or a local array."""
    static_smem_bytes: int
    """Dynamic shared memory is a launch parameter and does not show in machine code."""


@dataclass(frozen=True)
class Section:
    name: str
    kind: int
    size: int
    content: bytes


def resources(content: bytes) -> tuple[Resources, ...]:
    """Every kernel in an exported object or a cubin, in file order. ValueError where there is none."""
    found = tuple(k for elf in _cuda_elfs(content) for k in _kernels(elf))
    if not found:
        raise ValueError("`content` must hold a CUDA ELF with a kernel, found none")
    return found


def _kernels(elf: bytes) -> Iterator[Resources]:
    sections = list(_sections(elf))
    by_name = {s.name: s for s in sections}
    names = _symbol_names(by_name)
    values: dict[str, dict[int, int]] = {}
    for attribute, symbol, value in _records(by_name[".nv.info"].content):
        values.setdefault(names[symbol], {})[attribute] = value
    for section in sections:
        if section.name.startswith(".text."):
            kernel = section.name.removeprefix(".text.")
            have = values.get(kernel, {})
            shared = by_name.get(f".nv.shared.{kernel}")
            yield Resources(
                kernel,
                have.get(REGISTERS, 0),
                max(have.get(FRAME_SIZE, 0), have.get(MIN_STACK_SIZE, 0)),
                shared.size if shared is not None else 0,
            )


def _records(info: bytes) -> Iterator[tuple[int, int, int]]:
    """(attribute, symbol index, value) of each two-word record of ``.nv.info``."""
    at = 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == VALUE_RECORD:
            if size == 8:
                symbol, value = struct.unpack_from("<II", info, at)
                yield attribute, symbol, value
            at += size


def _symbol_names(by_name: dict[str, Section]) -> list[str]:
    table, strings = by_name[".symtab"].content, by_name[".strtab"].content
    starts = (struct.unpack_from("<I", table, at)[0] for at in range(0, len(table), 24))
    return [_string(strings, start) for start in starts]


def _sections(elf: bytes) -> Iterator[Section]:
    (table,) = struct.unpack_from("<Q", elf, 40)
    entry, count, strings_index = struct.unpack_from("<HHH", elf, 58)
    heads = [struct.unpack_from("<IIQQQQ", elf, table + i * entry) for i in range(count)]
    strings = elf[heads[strings_index][4] :]
    for name, kind, _, _, offset, size in heads:
        content = b"" if kind == SHT_NOBITS else elf[offset : offset + size]
        yield Section(_string(strings, name), kind, size, content)


def _cuda_elfs(content: bytes) -> Iterator[bytes]:
    """Everything from each embedded CUDA ELF on; its own header says where it ends."""
    at = 0
    while (at := content.find(b"\x7fELF", at)) >= 0:
        elf = content[at:]
        if len(elf) >= 64 and struct.unpack_from("<H", elf, 18)[0] == EM_CUDA:
            yield elf
        at += 4


def _string(table: bytes, start: int) -> str:
    return table[start : table.index(b"\0", start)].decode()
