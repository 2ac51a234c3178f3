"""Becoming a backend of fla's own dispatch, and ceasing to be one."""

from __future__ import annotations

import importlib
from typing import Any

from kernel_fun._common import compat, config, support
from kernel_fun.fla.backend import DISPATCHED, RECURRENT, RECURRENT_REGISTRY, backend

_known_to_fla: list[Any] = []
"""Our backend class, once fla has it. fla has no way to forget one; an inactive one takes no call."""


def register() -> None:
    """Serve ``chunk_kda`` and the short convolutions of fla's layers from fla's own dispatch.

    A call comes to us if a GPU backend of ours takes it, or if its tensors are on a CPU, where fla has no
    kernels; else it goes on to fla's next backend, after one warning with the reason. On a CPU the recurrent
    form, the gated norm and swiglu are served too, so that fla's KDA models, built with ``fuse_norm=False``
    and ``fuse_cross_entropy=False``, train and generate there. Registering twice is registering once.

    Raises:
        ImportError: fla is not installed.
        RuntimeError: the installed fla-core cannot give ``chunk_kda`` to anyone; the message says why, and
            what :func:`kernel_fun.fla.patch` does instead.
    """
    _require_dispatch()
    ours = backend()
    if ours.kernel_fun_active:
        return
    for op in (*DISPATCHED, RECURRENT):
        if (difference := compat.difference(op)) is not None:
            raise RuntimeError(f"kernel-fun cannot register with fla: {difference}")
    if not _known_to_fla:
        fla = importlib.import_module("fla.backends")
        for target in (*map(compat.function_of, DISPATCHED), RECURRENT_REGISTRY):
            fla.register(target)(ours)
        _known_to_fla.append(ours)
    ours.kernel_fun_active = True
    version = support.version_of("fla-core")
    support.log.info(f"kernel-fun: registered with fla-core {version} (chunk_kda, causal_conv1d)")


def unregister() -> None:
    """Undo :func:`register`: every call is fla's own again."""
    for ours in _known_to_fla:
        ours.kernel_fun_active = False


def registered() -> bool:
    """Does fla's dispatch ask us? False also under ``KERNEL_FUN_FLA=0``."""
    return config.FLA.on() and any(ours.kernel_fun_active for ours in _known_to_fla)


def _require_dispatch() -> None:
    """Raise what :func:`register` raises where fla's dispatch cannot be used."""
    require_fla()
    version = support.version_of("fla-core")
    instead = "; kernel_fun.fla.patch() rebinds fla's names instead"
    try:
        fla = importlib.import_module("fla.backends")
    except ImportError:
        fla = None
    if fla is None or (version or "").startswith(("0.4.", "0.5.")):
        raise RuntimeError(
            f"kernel-fun cannot register with fla-core {version}: before 0.6.0 fla's dispatch does not reach "
            f"chunk_kda{instead}"
        )
    if getattr(fla, "_DISPATCH_DISABLED", False):
        raise RuntimeError(
            f"kernel-fun cannot register with fla-core {version}: FLA_DISABLE_BACKEND_DISPATCH=1 was set "
            f"when fla was imported{instead}"
        )


def require_fla() -> None:
    """ImportError with a remedy where fla is not installed."""
    if (absent := support.missing("fla")) is not None:
        raise ImportError(f"kernel_fun.fla needs fla-core: {absent}")
