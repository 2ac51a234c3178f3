"""Entries appear whole, are checked before they are used, and live in a directory nobody else can write."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from kernel_fun._common import cache

DIGEST = "d" * 40


def test_an_entry_is_found_again(cache_dir: Path):
    path = cache.store(DIGEST, b"machine code")
    assert cache.load(DIGEST) == (path, b"machine code")
    assert path.parent == cache_dir
    assert cache.load("e" * 40) is None


def test_directory_is_created_for_its_owner_alone(cache_dir: Path):
    cache.store(DIGEST, b"x")
    assert cache_dir.stat().st_mode & 0o777 == 0o700
    assert next(cache_dir.iterdir()).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o722])
def test_a_directory_others_can_write_is_refused(cache_dir: Path, mode: int):
    cache_dir.mkdir()
    cache_dir.chmod(mode)
    with pytest.raises(cache.CacheRefused, match="others can write it"):
        cache.store(DIGEST, b"x")
    with pytest.raises(cache.CacheRefused, match=f"{mode:04o}"):
        cache.load(DIGEST)


def test_a_directory_of_another_user_is_refused(cache_dir: Path, monkeypatch: pytest.MonkeyPatch):
    cache_dir.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: cache_dir.stat().st_uid + 1)
    with pytest.raises(cache.CacheRefused, match="belongs to uid"):
        cache.load(DIGEST)


def test_a_file_in_the_place_of_the_directory_is_refused(cache_dir: Path):
    cache_dir.write_text("")
    with pytest.raises(cache.CacheRefused):
        cache.load(DIGEST)


def test_a_user_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KERNEL_FUN_CACHE_DIR", "~nobody-of-this-name/kernels")
    with pytest.raises(
        cache.CacheRefused, match=r"home directory.*; name a directory by KERNEL_FUN_CACHE_DIR"
    ):
        cache.load(DIGEST)


@pytest.mark.parametrize("damage", [b"", b"machine cod", b"machine codE", b"machine code "])
def test_a_damaged_entry_is_deleted_and_not_returned(cache_dir: Path, damage: bytes):
    path = cache.store(DIGEST, b"machine code")
    path.write_bytes(damage)
    assert cache.load(DIGEST) is None
    assert not path.exists()


def test_a_damaged_entry_does_not_hide_a_good_one(cache_dir: Path):
    bad, good = cache.store(DIGEST, b"one"), cache.store(DIGEST, b"two")
    bad.write_bytes(b"damage")
    assert cache.load(DIGEST) == (good, b"two")


def test_stale_temporaries_are_swept_and_fresh_ones_left(cache_dir: Path):
    cache.store(DIGEST, b"x")
    stale, fresh = cache_dir / ".tmp-1-a", cache_dir / ".tmp-2-b"
    for path in (stale, fresh):
        path.write_bytes(b"half")
    old = time.time() - 2 * cache.STALE_SECONDS
    os.utime(stale, (old, old))
    cache.store(DIGEST, b"y")
    assert not stale.exists()
    assert fresh.exists()


def _race(seed: int, turns: int) -> None:
    content = bytes([seed]) * 200_000
    for _ in range(turns):
        cache.store(DIGEST, content)
        found = cache.load(DIGEST)
        assert found is not None
        assert len(set(found[1])) == 1
        assert len(found[1]) == 200_000


def test_eight_processes_race_and_one_is_killed(cache_dir: Path):
    context = multiprocessing.get_context("fork")
    victim = context.Process(target=_race, args=(99, 100_000))
    racers = [context.Process(target=_race, args=(seed, 15)) for seed in range(8)]
    for process in (victim, *racers):
        process.start()
    time.sleep(0.2)
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    for process in (victim, *racers):
        process.join(30)
    assert [p.exitcode for p in racers] == [0] * 8
    found = cache.load(DIGEST)
    assert found is not None
    assert len(set(found[1])) == 1


@dataclass(frozen=True)
class Config:
    K: int
    io: str = "bfloat16"


MODULE = "kernel_fun.kda._kernels.sm90.fwd_intra"


def test_the_digest_covers_config_target_options_and_compiler(monkeypatch: pytest.MonkeyPatch):
    def digest(config: Config = Config(64), arch: str = "sm_90a", options: str = "") -> str:
        return cache.digest_of(MODULE, config, arch, options)

    one = digest()
    assert one == digest()
    others = [digest(Config(128)), digest(Config(64, "float16")), digest(arch="sm_100a"), digest(options="x")]
    monkeypatch.setattr(cache, "versions", lambda: {"nvidia-cutlass-dsl": "0"})
    others.append(digest())
    assert len({one, *others}) == 6


def test_the_digest_covers_the_modules_a_kernel_is_traced_from():
    sources = cache.sources(MODULE)
    assert MODULE in sources
    traced = {n.rpartition(".")[2] for n in sources if n.startswith("kernel_fun._cute.")}
    assert {"compile", "decay", "scan", "tile", "trisolve", "warp"} <= traced
    assert not traced & {"cache", "inspect", "varlen"}


def test_an_unknown_module_is_an_error():
    with pytest.raises(ValueError, match="must name a module"):
        cache.sources("kernel_fun._kernels.nothing")
