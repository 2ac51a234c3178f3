"""Every switch is read per call, and says what it holds when it cannot be used."""

from __future__ import annotations

import os

import pytest

from kernel_fun._common import config, support
from kernel_fun._common.plan import Policy


def test_names_are_unique_and_documented():
    names = [s.name for s in config.SWITCHES]
    assert len(set(names)) == len(names)
    assert all(s.meaning for s in config.SWITCHES)


@pytest.mark.parametrize(
    ("word", "on"), [("1", True), ("yes", True), ("0", False), ("", False), ("off", False)]
)
def test_on(monkeypatch, word, on):
    monkeypatch.setenv(config.DISABLE.name, word)
    assert config.DISABLE.on() is on
    assert config.disabled_by(config.KDA_DISABLE) == (f"KERNEL_FUN_DISABLE={word}" if on else None)


def test_a_word_that_is_neither_is_refused(monkeypatch):
    monkeypatch.setenv(config.DISABLE.name, "maybe")
    with pytest.raises(ValueError, match="KERNEL_FUN_DISABLE must be 0 or 1, got 'maybe'"):
        config.DISABLE.on()
    monkeypatch.setenv(config.KDA_MIN_CTAS.name, "-1")
    with pytest.raises(ValueError, match="0 or more, got '-1'"):
        config.integer(config.KDA_MIN_CTAS)


def test_family_switch(monkeypatch):
    monkeypatch.setenv(config.KDA_DISABLE.name, "1")
    assert config.disabled_by(config.KDA_DISABLE) == "KERNEL_FUN_KDA_DISABLE=1"
    assert config.disabled_by(config.CCONV_DISABLE) is None


def test_forced_backend(monkeypatch):
    assert config.forced_backend(config.KDA_BACKEND, ("eager",)) is None
    monkeypatch.setenv(config.KDA_BACKEND.name, "Eager")
    assert config.forced_backend(config.KDA_BACKEND, ("eager",)) == "eager"
    monkeypatch.setenv(config.KDA_BACKEND.name, "hopper")
    with pytest.raises(ValueError, match="KERNEL_FUN_KDA_BACKEND must be auto or one of eager, got 'hopper'"):
        config.forced_backend(config.KDA_BACKEND, ("eager",))


def test_fallback(monkeypatch):
    assert config.fallback() == "auto"
    for word, meaning in (("1", "auto"), ("0", "error"), ("FLA", "fla"), ("eager", "eager")):
        monkeypatch.setenv(config.FALLBACK.name, word)
        assert config.fallback() == meaning
    monkeypatch.setenv(config.FALLBACK.name, "maybe")
    with pytest.raises(
        ValueError, match="KERNEL_FUN_FALLBACK must be one of auto, fla, eager, error, got 'maybe'"
    ):
        config.fallback()


def test_a_misspelt_name_is_told_once_with_the_nearest(monkeypatch, caplog):
    support.warn_of_unknown_switches.cache_clear()
    monkeypatch.setenv("KERNEL_FUN_KDA_BACKENDS", "sm90")
    monkeypatch.setenv("kernel_fun_disable", "1")
    monkeypatch.setenv("KERNEL_FUN_XYZZY", "1")
    for _ in range(2):
        Policy.read(config.KDA_DISABLE, config.KDA_BACKEND)
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 3
    assert said[0] == (
        "kernel-fun: KERNEL_FUN_KDA_BACKENDS is no variable of kernel-fun and does nothing; "
        "did you mean KERNEL_FUN_KDA_BACKEND?"
    )
    assert said[1].endswith("there are " + ", ".join(s.name for s in config.SWITCHES))
    assert "did you mean KERNEL_FUN_DISABLE?" in said[2]
    support.warn_of_unknown_switches.cache_clear()


def test_known_names_are_no_cause_to_warn(monkeypatch):
    for switch in config.SWITCHES:
        monkeypatch.setenv(switch.name, switch.default)
    assert config.unknown() == []


@pytest.mark.parametrize("switch", [config.DISABLE, config.DEBUG, config.FALLBACK, config.KDA_DISABLE])
def test_a_policy_reads_every_word_it_hangs_on(switch, monkeypatch):
    monkeypatch.setenv(switch.name, "loud")
    with pytest.raises(ValueError, match=f"{switch.name} must be .*, got 'loud'"):
        Policy.read(config.KDA_DISABLE, config.KDA_BACKEND)


def test_integer(monkeypatch):
    monkeypatch.setenv(config.KDA_MIN_CTAS.name, "many")
    with pytest.raises(ValueError, match="KERNEL_FUN_KDA_MIN_CTAS must be an integer, 0 or more, got 'many'"):
        config.integer(config.KDA_MIN_CTAS)
    monkeypatch.setenv(config.KDA_MIN_CTAS.name, "")
    assert config.integer(config.KDA_MIN_CTAS) == 0


def test_set_holds_and_restores(monkeypatch):
    monkeypatch.delenv(config.DEBUG.name, raising=False)
    with config.DEBUG.set("1"):
        assert config.DEBUG.on()
    assert config.DEBUG.name not in os.environ
    monkeypatch.setenv(config.DEBUG.name, "0")
    with pytest.raises(RuntimeError), config.DEBUG.set("1"):
        raise RuntimeError
    assert os.environ[config.DEBUG.name] == "0"
