"""Imports point down only, heavy packages stay where they belong, hooks stay light; read from the source."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "slurm_resil"
LEVELS = (
    ("core",),
    ("format", "slurm", "comm"),
    ("agent", "watch", "drain", "redundancy", "ckpt", "catalog"),
    ("session", "launch", "recovery", "hooks"),
    ("integrations", "simulate", "bench", "report"),
    ("cli",),
)
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
# constructs things of several parts, and nothing imports it but commands
APART = {"sandbox": {"sandbox", "core"}}
# who may import a heavy package
HEAVY = {
    "torch": ("ckpt", "integrations", "launch.standby", "launch.guard", "bench"),
    "h5py": ("format.container",),
    "mpi4py": ("comm.mpi",),
    "pyslurm": ("slurm",),
}
# one level may use the other in these pairs only: see DESIGN, "the session constructs"
HOOKS = {
    "argparse",
    "contextlib",
    "fcntl",
    "grp",
    "json",
    "os",
    "pwd",
    "re",
    "resource",
    "signal",
    "socket",
    "stat",
    "sys",
    "time",
}


def modules(package: Path) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(package.rglob("*.py")):
        name = ".".join(path.relative_to(package).with_suffix("").parts).removesuffix(".__init__")
        yield name, ast.parse(path.read_text())


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def faults(package: Path) -> list[str]:
    found = []
    for name, tree in modules(package):
        part = name.split(".")[0]
        for imported in imports(tree):
            top, _, rest = imported.partition(".")
            if top in HEAVY and not any(name == place or name.startswith(place + ".") for place in HEAVY[top]):
                found.append(f"{name} imports {top}")
            if top != "slurm_resil" or part in ("__init__", "__main__"):
                continue
            other = rest.split(".")[0]
            if part in APART:
                if other not in APART[part]:
                    found.append(f"{name} imports {other}")
            elif other in APART:
                if part != "cli":
                    found.append(f"{name} imports {other}")
            elif other in LEVEL and other != part and LEVEL[other] >= LEVEL[part]:
                found.append(f"{name} imports {other}")
    return found


def test_imports_point_down_and_heavy_packages_stay_where_they_belong() -> None:
    assert faults(PACKAGE) == []


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("core/a.py", "from slurm_resil.format import layout"),
        ("agent/a.py", "def f():\n    import slurm_resil.drain.plan"),
        ("drain/a.py", "import torch"),
        ("sandbox/a.py", "from slurm_resil.launch import rank"),
        ("launch/a.py", "from slurm_resil.sandbox import Sandbox"),
        ("ckpt/a.py", "import h5py"),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, where: str, text: str) -> None:
    path = tmp_path / where
    path.parent.mkdir()
    path.write_text(text)
    assert len(faults(tmp_path)) == 1


def test_hooks_import_what_is_light_and_nothing_else() -> None:
    odd = []
    for path in sorted((PACKAGE / "hooks").glob("*.py")):
        for imported in imports(ast.parse(path.read_text())):
            top = imported.split(".")[0]
            own = imported.startswith(("slurm_resil.core.", "slurm_resil.hooks"))
            if top not in HOOKS and not own and top != "__future__":
                odd.append(f"{path.name}: {imported}")
    assert odd == []


def test_nothing_heavy_comes_along_with_the_hooks() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import slurm_resil.hooks.prolog, slurm_resil.hooks.epilog; "
    code += "import slurm_resil.core.fsio; print(' '.join(sys.modules))"
    argv = [sys.executable, "-I", "-S", "-c", code, str(ROOT)]
    loaded = set(subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split())
    heavy = {"subprocess", "logging", "click", "pathlib", "tomllib", "dataclasses", "numpy", "torch", "h5py", "asyncio"}
    assert loaded & heavy == set()


def test_the_top_level_holds_what_was_agreed() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode:
        pytest.skip("this is no git checkout")
    top = {name.split("/")[0] for name in tracked.stdout.splitlines()}
    agreed = {"setup.cfg", "pyproject.toml", "slurm_resil", "spank", "jobscripts", "tests", "site_configs"}
    assert {name for name in top if not name.startswith(".")} - agreed <= {"README.md", "LICENSE"}


def test_no_file_is_too_long() -> None:
    files = [p for top in ("slurm_resil", "spank", "tests", "jobscripts") for p in (ROOT / top).rglob("*")]
    long = {p.name: n for p in files if p.suffix in (".py", ".c", ".sh") and (n := p.read_text().count("\n")) > 500}
    assert long == {}
