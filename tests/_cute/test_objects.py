"""Kernels built ahead of time: what is loaded is what was built, anything else is refused in one sentence."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from tests._cute import scaler

from kernel_fun._common import cache, config, support
from kernel_fun._cute import compile, objects

DAMAGED = (
    b"",
    b"{",
    b"\xff\xfe",
    b"[]",
    b"{}",
    b'{"format": 1}',
    b'{"format": 1, "kernels": {}}',
    b'{"format": 1, "kernels": [{"module": "m"}]}',
)
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
    for content in DAMAGED:
        (folder / objects.MANIFEST).write_bytes(content)
        with pytest.raises(objects.ObjectsRefused, match=r"has a damaged manifest\.json"):
            jit()(CONFIG)


@pytest.mark.parametrize("file", [5, None, "../kernel.so", "/kernel.so", ""])
def test_a_file_that_is_none_of_the_directory_is_refused(folder: Path, file: Any) -> None:
    edit(folder, lambda m: m["kernels"][0].update(file=file))
    with pytest.raises(objects.ObjectsRefused, match=r"has a damaged manifest\.json"):
        jit()(CONFIG)
    holding = objects.holding()
    assert holding is not None
    assert (holding.kernels, holding.usable) == (0, 0)


def test_a_file_that_others_can_write_is_refused(folder: Path) -> None:
    library = next(folder.glob("*.so"))
    library.chmod(0o666)
    with pytest.raises(objects.ObjectsRefused, match=rf"{library.name} has mode 0666.*: chmod go-w "):
        jit()(CONFIG)


@pytest.mark.parametrize("content", [*DAMAGED, b'{"format": 99, "kernels": []}'])
def test_a_build_replaces_a_manifest_it_cannot_read(
    folder: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    support.forget_logged()
    (folder / objects.MANIFEST).write_bytes(content)
    objects.write(folder, [(jit(), CONFIG)], "sm_90a")
    said = [r.getMessage() for r in caplog.records if "is replaced" in r.getMessage()]
    assert len(said) == 1
    assert said[0].startswith(f"kernel-fun: {folder} has ")
    assert callable(jit()(CONFIG))


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077], ids=oct)
def test_what_is_built_is_closed_whatever_the_umask(folder: Path, tmp_path: Path, umask: int) -> None:
    out = tmp_path / "a" / "b"
    before = os.umask(umask)
    try:
        objects.write(out, [(jit(), CONFIG)], "sm_90a")
        objects.write(out, [(jit(), CONFIG)], "sm_90a")
    finally:
        os.umask(before)
    assert stat.S_IMODE(out.stat().st_mode) == 0o755
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()} == dict.fromkeys(
        (objects.LOCK, objects.MANIFEST, f"{jit().digest(CONFIG)}.so"), 0o644
    )
    with config.KERNELS.set(str(out)):
        assert callable(jit()(CONFIG))


@pytest.mark.parametrize("what", ["directory", "manifest"])
def test_nothing_is_compiled_for_a_directory_others_can_write(
    folder: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = folder if what == "directory" else folder / objects.MANIFEST
    place.chmod(0o775)
    monkeypatch.setattr(compile.Jit, "object", lambda self, kernel_config: pytest.fail("compiled"))
    with pytest.raises(objects.ObjectsRefused, match="so that others can write it: chmod go-w") as refused:
        objects.write(folder, [(jit(), OTHER)], "sm_90a")
    assert str(refused.value).startswith(f"no kernels can be built into {folder}: {place} has mode 0775")
    assert config.KERNELS.name not in str(refused.value)


@pytest.mark.parametrize(
    ("below", "why"), [("file/kernels", "File exists"), ("n" * 300, "File name too long")]
)
def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path, below: str, why: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(objects.ObjectsRefused, match=rf"cannot be made a directory \({why}\)") as refused:
        objects.prepare(tmp_path / below)
    assert str(refused.value).startswith(f"no kernels can be built into {tmp_path / below}: {tmp_path}")


def test_a_file_is_no_directory_to_build_into(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(objects.ObjectsRefused, match="file is not a directory"):
        objects.prepare(tmp_path / "file")


WRITER = """
import sys, time
from pathlib import Path
from kernel_fun._cute import objects

class Kernel:
    module, options = "tests._cute.scaler", ""
    def digest(self, config): return config
    def symbol(self, config): return config
    def object(self, config): return config.encode()

objects._link = lambda content, library: library.write_bytes(content)
folder, name = Path(sys.argv[1]), sys.argv[2]
(folder.parent / f"{name}.ready").touch()
while not (folder.parent / "go").exists(): time.sleep(0.001)
for i in range(20):
    objects.write(folder, [(Kernel(), f"{name}{i}")], "sm_90a")
"""


def test_no_entry_is_lost_where_several_processes_build(tmp_path: Path) -> None:
    folder, names = tmp_path / "set", ("a", "b", "c")
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(folder), name]) for name in names]
    while not all((tmp_path / f"{name}.ready").exists() for name in names):
        assert all(writer.poll() is None for writer in writers)
        time.sleep(0.01)
    (tmp_path / "go").touch()
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    entries = json.loads((folder / objects.MANIFEST).read_text())["kernels"]
    assert sorted(e["symbol"] for e in entries) == sorted(f"{n}{i}" for n in names for i in range(20))


def test_a_directory_others_can_write_is_refused(folder: Path) -> None:
    folder.chmod(0o777)
    with pytest.raises(
        objects.ObjectsRefused, match=f"has mode 0777, so that others can write it: chmod go-w {folder}, or"
    ):
        jit()(CONFIG)
    folder.chmod(0o755)
    (folder / objects.MANIFEST).chmod(0o664)
    with pytest.raises(
        objects.ObjectsRefused, match="json has mode 0664, so that others can write it: chmod"
    ):
        jit()(CONFIG)


def test_a_directory_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(folder, 65534, -1)
        belongs = f"belongs to uid 65534 and must belong to root: chown 0 {folder}, or unset"
    else:
        monkeypatch.setattr(objects.os, "geteuid", lambda: 1)
        belongs = f"and must belong to uid 1 of this process or to root: chown 1 {folder}, or unset"
    with pytest.raises(objects.ObjectsRefused, match=belongs) as refused:
        jit()(CONFIG)
    assert "others can write" not in str(refused.value)


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
