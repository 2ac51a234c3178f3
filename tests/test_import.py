"""What an import costs and loads, in fresh processes."""

from __future__ import annotations

import subprocess
import sys


def run(code: str, *flags: str) -> str:
    done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_no_framework():
    heavy = ("torch", "triton", "cutlass", "fla", "numpy", "rich", "matplotlib")
    loaded = run(f"import kernel_fun, sys; print([m for m in {heavy} if m in sys.modules])")
    assert loaded.strip() == "[]"


def test_import_is_quick():
    code = "import time; t = time.perf_counter(); import kernel_fun; print(time.perf_counter() - t)"
    assert min(float(run(code)) for _ in range(3)) < 0.2


def test_family_loads_torch_and_no_more():
    heavy = ("triton", "cutlass", "fla", "rich", "matplotlib")
    loaded = run(f"import kernel_fun.kda, sys; print([m for m in {heavy} if m in sys.modules])")
    assert loaded.strip() == "[]"


def test_a_family_is_an_attribute_of_the_package_and_loads_when_it_is_named():
    names = ("cconv", "fla", "kda", "testing", "transformers", "warming")
    out = run(
        "import kernel_fun, sys; "
        f"assert set(dir(kernel_fun)) >= set({names}); "
        "print('torch' in sys.modules); "
        "print(kernel_fun.kda.chunk_kda.__module__, kernel_fun.cconv.causal_conv1d.__module__); "
        f"print([getattr(kernel_fun, n).__name__ for n in {names}]); "
        "print(kernel_fun.fla.registered(), kernel_fun.transformers.patch.__name__); "
        "print(hasattr(kernel_fun, 'kdaa'))"
    )
    assert out.splitlines() == [
        "False",
        "kernel_fun.kda.ops kernel_fun.cconv.ops",
        str([f"kernel_fun.{n}" for n in names]),
        "False patch",
        "False",
    ]


def test_versions_import_nothing():
    out = run("import kernel_fun, sys; v = kernel_fun.versions(); print(v['torch'], 'torch' in sys.modules)")
    assert out.split()[1] == "False"
    assert out.split()[0] != "None"
