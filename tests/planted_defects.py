"""Plants defects in the product, one at a time, and counts those that the tests catch.

    python -m tests.planted_defects --seed 18 --each 5 > defects.md

Defects are drawn at random: a statement deleted, a comparison turned round, a number off by one, two arguments swapped.
Each is planted in a copy of the checkout, and tests are run there until one fails: first those that bear the module's
name, then all of its package, then the types are checked, then what `--then` names, such as the nightly tests.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs
import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "controller": "cosmos_core/control",
    "weights": "cosmos_core/weights",
    "policy": "cosmos_core/policy",
    "rollout": "cosmos_core/rollout",
    "algorithms": "plugins/algorithms",
    "transport": "cosmos_core/transport",
    "run": "cosmos_core/run",
    "config": "cosmos_core/config",
}
TURNED = {
    ast.Lt: ">", ast.Gt: "<", ast.LtE: ">=", ast.GtE: "<=", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in",
    ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
SILENT = ("_LOG.", "logging.", "warnings.")


@attrs.frozen(kw_only=True)
class Defect:
    """One change of one file.

    Attributes:
        path: The file, relative to the checkout.
        line: The line, from 1.
        kind: The kind of change.
        start: Where the changed text begins, in bytes of the file.
        end: Where it ends.
        text: The text in its place.
    """

    path: str
    line: int
    kind: str
    start: int
    end: int
    text: str


def candidates(path: Path) -> Iterator[Defect]:
    """All defects that can be planted in a file."""
    source = path.read_bytes()
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))

    def place(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return lines[node.lineno - 1] + node.col_offset, lines[node.end_lineno - 1] + node.end_col_offset

    def text(node: ast.expr | ast.stmt) -> str:
        start, end = place(node)
        return source[start:end].decode()

    def defect(kind: str, node: ast.expr | ast.stmt, instead: str) -> Defect:
        start, end = place(node)
        name = str(path.relative_to(ROOT))
        return Defect(path=name, line=node.lineno, kind=kind, start=start, end=end, text=instead)

    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Compare(left=left, ops=[sign], comparators=[right]):
                yield defect("comparison turned", node, f"{text(left)} {TURNED[type(sign)]} {text(right)}")
            case ast.Constant(value=int() as value) if type(value) is int:
                yield defect("off by one", node, str(value + 1))
            case ast.Call(args=[first, second, *_]) if text(first) != text(second):
                between = source[place(first)[1] : place(second)[0]].decode()
                swapped = defect("arguments swapped", first, f"{text(second)}{between}{text(first)}")
                yield attrs.evolve(swapped, end=place(second)[1])
            case ast.stmt() if _is_deletable(node) and not text(node).startswith(SILENT):
                yield defect("statement deleted", node, "pass")


def _is_deletable(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call | ast.Await | ast.YieldFrom)
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], ast.Attribute | ast.Subscript)
    return isinstance(node, ast.AugAssign | ast.Raise | ast.Continue | ast.Break | ast.Delete)


def drawn(package: str, number: int, chance: random.Random) -> list[Defect]:
    """Defects of a package, all kinds alike."""
    files = [path for path in sorted((ROOT / package).rglob("*.py")) if "tests" not in path.parts]
    by_kind: dict[str, list[Defect]] = {}
    for path in files:
        for each in candidates(path):
            by_kind.setdefault(each.kind, []).append(each)
    return [chance.choice(by_kind[chance.choice(sorted(by_kind))]) for _ in range(number)]


def nearest(defect: Defect) -> list[str]:
    """The tests that bear the name of a defect's module, or of a package that it lies in, where there are any."""
    if defect.path.startswith("plugins/"):
        return ["/".join([*Path(defect.path).parts[:3], "tests"])]
    folder = ROOT / "tests/unit" / Path(defect.path).relative_to("cosmos_core").parent
    stem = Path(defect.path).stem
    return [str(path.relative_to(ROOT)) for path in sorted(folder.glob("test_*.py")) if stem in path.stem]


@contextmanager
def planted(defect: Defect, copy: Path) -> Iterator[None]:
    """A copy of the checkout with a defect in it."""
    path = copy / defect.path
    good = path.read_bytes()
    path.write_bytes(good[: defect.start] + defect.text.encode() + good[defect.end :])
    try:
        yield
    finally:
        path.write_bytes(good)


def importable(copy: Path) -> str:
    """The roots of all packages of the copy, as a path variable of Python."""
    return os.pathsep.join(map(str, [copy, *(each.parent for each in copy.glob("plugins/*/*/pyproject.toml"))]))


def run(tests: Sequence[str], copy: Path) -> str:
    """Run tests in the copy until one fails.

    Returns:
        The first test that failed, or an empty text.
    """
    if not tests:
        return ""
    environment = {**os.environ, "PYTHONPATH": importable(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--timeout=120", "-p", "no:cacheprovider"]
    command += ["--numprocesses", "2", "--dist", "worksteal", *tests]
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=1200, check=False
        )
    except subprocess.TimeoutExpired:
        return "(they hang)"
    if done.returncode in {0, pytest.ExitCode.NO_TESTS_COLLECTED}:
        return ""
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0] if failed else f"(exit code {done.returncode})"


def typed(copy: Path, what: Sequence[str] = ()) -> bool:
    """Tell whether the types of the copy are right: of all of it, or of what is named."""
    environment = {**os.environ, "MYPYPATH": importable(copy)}
    command = [sys.executable, "-m", "mypy", *what]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    if done.returncode > 1:
        raise RuntimeError(f"mypy cannot check the copy: {done.stdout}{done.stderr}")
    return not done.returncode


def of_file(defect: Defect) -> list[str]:
    """What mypy is to check of a defect: its file, or the package of its plugin."""
    parts = Path(defect.path).parts
    return [f"--package={parts[3]}"] if parts[0] == "plugins" else [defect.path]


def found_by(defect: Defect, copy: Path, own: str, then: Sequence[str]) -> str:
    """What catches a defect that is planted in the copy; an empty text if nothing does."""
    if failed := run(nearest(defect), copy) or run([own], copy):
        return failed
    return run(then, copy) if typed(copy, of_file(defect)) else "types"


def copied(folder: Path) -> Path:
    """A copy of what git knows of the checkout."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    # Tests ask git for the files of their checkout.
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    subprocess.run(["git", "add", "--all"], cwd=folder, check=True)
    return folder


def main() -> None:
    """Draw, plant, run, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=18)
    parser.add_argument("--each", type=int, default=5, help="defects of each package")
    parser.add_argument("--packages", nargs="+", choices=PACKAGES, default=list(PACKAGES))
    parser.add_argument("--then", nargs="+", default=[], help="tests for the defects that these do not catch")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(Path(folder) / "copy")
        if failed := run(options.then, copy):
            sys.exit(f"without a defect, too, there is {failed}")
        if not typed(copy):
            sys.exit("without a defect, too, types are wrong")
        print(f"Seed {options.seed}.\n\n| package | place | defect | caught by |\n|---|---|---|---|", flush=True)
        caught: list[str] = []
        for name in options.packages:
            package = PACKAGES[name]
            own = "plugins/algorithms" if name == "algorithms" else package.replace("cosmos_core", "tests/unit")
            chance = random.Random(f"{options.seed} {name}")
            for defect in drawn(package, options.each, chance):
                with planted(defect, copy):
                    found = found_by(defect, copy, own, options.then)
                caught.append(found)
                place = f"{defect.path.removeprefix('cosmos_core/')}:{defect.line}"
                print(f"| {name} | `{place}` | {defect.kind} | {found or '**none**'} |", flush=True)
        print(f"\n{len(list(filter(None, caught)))} of {len(caught)} caught.")


if __name__ == "__main__":
    main()
