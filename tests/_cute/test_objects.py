"""Kernels built ahead of time: what is loaded is what was built, anything else is refused in one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from tests._cute import scaler

from kernel_fun._common import cache, config
from kernel_fun._cute import compile, objects

CONFIG, OTHER = scaler.Config(threads=128), scaler.Config(threads=64)


def jit() -> compile.Jit[scaler.Config]:
    """The kernel family as a new process sees it."""
    return compile.Jit(scaler.build, "sm_90a")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernels") / "set"
    with config.CACHE_DIR.set(str(tmp_path_factory.mktemp("cache"))):
        objects.write(folder, [(jit(), CONFIG)], "sm_90a")
    return folder


@pytest.fixture
def folder(built: Path, tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the set, in force; the compiler's cache is empty."""
    copy = tmp_path / "set"
    copy.mkdir(mode=0o755)
    for path in built.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    monkeypatch.setenv(config.KERNELS.name, str(copy))
    return copy


def edit(folder: Path, change: Any) -> None:
    path = folder / objects.MANIFEST
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def test_a_prebuilt_kernel_is_loaded_and_nothing_compiled(folder: Path, cache_dir: Path) -> None:
    before = len(objects.ready())
    launch = jit()(CONFIG)
    assert callable(launch)
    (kernel,) = objects.ready()[before:]
    assert (kernel.name, kernel.config, kernel.how) == ("scaler", repr(CONFIG), "prebuilt")
    assert not cache_dir.exists()
    vector = torch.zeros(128)
    with pytest.raises(ValueError, match="device_type=cuda"):  # it is the kernel that answers
        launch(vector, 1)


def test_a_kernel_that_is_not_there_is_refused(folder: Path) -> None:
    with pytest.raises(
        objects.ObjectsRefused, match=r"has no kernel scaler for Config\(threads=64\): build it with"
    ):
        jit()(OTHER)


def test_a_second_build_adds_to_the_first(folder: Path) -> None:
    with config.KERNELS.set(""):
        objects.write(folder, [(jit(), OTHER)], "sm_90a")
        objects.write(folder, [(jit(), OTHER)], "sm_90a")
    assert callable(jit()(CONFIG))
    assert callable(jit()(OTHER))
    assert len(json.loads((folder / objects.MANIFEST).read_text())["kernels"]) == 2
    assert not [p for p in folder.iterdir() if p.name.startswith(".tmp") or ".tmp" in p.suffix]


def test_other_sources_are_refused(folder: Path) -> None:
    edit(folder, lambda m: m["kernels"][0]["sources"].update({"tests._cute.scaler": "0" * 64}))
    with pytest.raises(
        objects.ObjectsRefused, match=r"built from other sources of tests\._cute\.scaler: build it again"
    ):
        jit()(CONFIG)


def test_another_compiler_is_refused(folder: Path) -> None:
    edit(folder, lambda m: m["kernels"][0]["versions"].update({"apache-tvm-ffi": "0.0.1"}))
    with pytest.raises(objects.ObjectsRefused, match=r"was built with apache-tvm-ffi 0\.0\.1, installed is "):
        jit()(CONFIG)


def test_a_damaged_file_is_refused(folder: Path) -> None:
    library = next(folder.glob("*.so"))
    library.write_bytes(library.read_bytes()[:-1])
    with pytest.raises(objects.ObjectsRefused, match=rf"holds a damaged {library.name}"):
        jit()(CONFIG)


def test_a_damaged_manifest_and_another_format_are_refused(folder: Path) -> None:
    edit(folder, lambda m: m.update(format=99))
    with pytest.raises(objects.ObjectsRefused, match="has format 99, this version reads 1"):
        jit()(CONFIG)
    (folder / objects.MANIFEST).write_text("{")
    with pytest.raises(objects.ObjectsRefused, match=r"has a damaged manifest\.json"):
        jit()(CONFIG)


def test_a_directory_others_can_write_is_refused(folder: Path) -> None:
    folder.chmod(0o777)
    with pytest.raises(objects.ObjectsRefused, match="with mode 0777, others can write it"):
        jit()(CONFIG)


def test_a_directory_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(config.KERNELS.name, str(tmp_path / "none"))
    with pytest.raises(
        objects.ObjectsRefused,
        match=r"KERNEL_FUN_KERNELS=.*none is no directory of prebuilt kernels: it cannot be read",
    ):
        jit()(CONFIG)


def test_without_a_linker_the_build_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache_dir: Path
) -> None:
    monkeypatch.setattr(objects.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match=r"no linker \(ld\) on this machine"):
        objects.write(tmp_path / "set", [(jit(), CONFIG)], "sm_90a")


def test_loading_needs_no_compiler(folder: Path) -> None:
    """A process in which cutlass cannot be imported loads the kernel."""
    entry = json.loads((folder / objects.MANIFEST).read_text())["kernels"][0]
    code = (
        "import sys; sys.modules['cutlass'] = None\n"
        "from pathlib import Path\n"
        "from kernel_fun._cute import objects\n"
        f"launch = objects._loaded(Path({str(folder / entry['file'])!r}), {entry['symbol']!r})\n"
        "print(type(launch).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "Function", done.stderr


def test_a_cold_kernel_is_refused_while_a_graph_is_captured(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm = jit()
    launch = warm(CONFIG)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert warm(CONFIG) is launch
    with pytest.raises(
        RuntimeError, match=r"scaler for Config\(threads=128\) is cold and a CUDA graph is being"
    ):
        jit()(CONFIG)


def test_the_module_leaves_no_trace_in_machine_code() -> None:
    assert "kernel_fun._cute.objects" in cache.HOST_ONLY
    assert "kernel_fun._cute.objects" not in cache.sources("tests._cute.scaler")


def test_a_rehearsal_launches_and_compiles_nothing(cache_dir: Path) -> None:
    seen: dict[tuple[str, str], Any] = {}
    own = jit()
    with objects.rehearsal(seen):
        assert own(CONFIG)("no tensor") is None
    assert list(seen) == [("tests._cute.scaler", repr(CONFIG))]
    assert not cache_dir.exists()
    assert compile.Jit.__call__.__qualname__ == "Jit.__call__"


WITHOUT_THE_COMPILER = """
import sys
sys.modules["cutlass"] = None
import torch
from kernel_fun._common import config, device
from kernel_fun._cute import objects
from kernel_fun.kda import exercise
from kernel_fun.kda.call import Problem

problem = Problem(1, 1, 2, 2, 64, 64, gate="softplus", beta_mode="sigmoid", l2norm=True, needs_grad=True)
with config.KDA_BACKEND.set("sm90"), device.pretend("sm90"):
    try:
        exercise.run(problem, torch.device("cpu"))
    except Exception as error:
        print(type(error).__name__, error)
assert sys.modules["cutlass"] is None
assert not [name for name in sys.modules if name.startswith("cutlass.")]
"""


@pytest.mark.parametrize("prebuilt", [True, False])
def test_launchers_need_no_compiler_where_kernels_are_prebuilt(
    folder: Path, prebuilt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Hopper call reaches the loading of its first kernel in a process without cutlass, and only there."""
    if not prebuilt:
        monkeypatch.delenv(config.KERNELS.name)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_COMPILER], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    if prebuilt:
        assert "ObjectsRefused" in done.stdout
        assert "has no kernel fwd_intra for Config(io='bfloat16'" in done.stdout
    else:
        assert "fwd_intra: sm90: cutlass not installed (pip install 'kernel-fun[cute]')" in done.stdout


def test_stand_ins_are_gone_once_the_modules_are_imported(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cutlass

    from kernel_fun._cute import absent

    with absent._standing_in():
        import cutlass as stand_in
        from cutlass.cute.nvgpu import warp

        assert isinstance(stand_in, absent.StandIn)
        assert isinstance(warp.anything, absent.StandIn)

        def kernel() -> None: ...

        assert stand_in.cute.jit(kernel) is kernel
        assert isinstance(stand_in.cute.Tensor | None, absent.StandIn)
    assert sys.modules["cutlass"] is cutlass
    assert not absent.wanted()  # cutlass is here
