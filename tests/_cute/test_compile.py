"""A config is compiled once, without a GPU, and found again by another process's eyes."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from tests._cute import scaler

from kernel_fun._common import cache, support
from kernel_fun._cute import compile

CONFIG = scaler.Config(threads=128)


def fresh() -> compile.Jit[scaler.Config]:
    """The kernel family as a new process sees it."""
    return compile.Jit(scaler.build, "sm_90a")


def test_compiles_once_and_is_found_on_disk(cache_dir: Path, monkeypatch: pytest.MonkeyPatch):
    first = fresh()
    content = first.object(CONFIG)
    assert [p.name.split("-")[0] for p in cache_dir.iterdir()] == [first.digest(CONFIG)]

    def traced_again(config: scaler.Config) -> compile.Program:
        raise AssertionError("traced twice")

    monkeypatch.setattr(scaler, "trace", traced_again)
    again = fresh()
    assert again.object(CONFIG) == content
    launch = again(CONFIG)
    assert callable(launch)
    assert again(CONFIG) is launch


def test_a_damaged_entry_is_compiled_again(cache_dir: Path):
    content = fresh().object(CONFIG)
    next(cache_dir.iterdir()).write_bytes(content[:-1])
    assert fresh().object(CONFIG)
    (entry,) = cache_dir.iterdir()
    assert cache.load(fresh().digest(CONFIG)) == (entry, entry.read_bytes())


def test_a_refused_directory_is_said_once_and_does_not_stop_compilation(
    cache_dir: Path, caplog: pytest.LogCaptureFixture
):
    cache_dir.mkdir()
    cache_dir.chmod(0o777)
    support.forget_logged()
    with caplog.at_level(logging.WARNING, logger="kernel_fun"):
        assert callable(fresh()(CONFIG))
    assert [r.getMessage() for r in caplog.records if "others can write it" in r.getMessage()]
    assert len(caplog.records) == 1
    assert not list(cache_dir.iterdir())


def test_threads_share_one_compilation(cache_dir: Path, monkeypatch: pytest.MonkeyPatch):
    traces: list[scaler.Config] = []
    trace = scaler.trace

    def counting(config: scaler.Config) -> compile.Program:
        traces.append(config)
        return trace(config)

    monkeypatch.setattr(scaler, "trace", counting)
    jit, launches = fresh(), []
    threads = [threading.Thread(target=lambda: launches.append(jit(CONFIG))) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(traces) == 1
    assert len(set(map(id, launches))) == 1


def test_the_symbol_names_the_digest():
    assert fresh().symbol(CONFIG) == f"kernel_fun_{fresh().digest(CONFIG)}"
