"""Every distribution of this repository as an sdist and a wheel: `python -m tests.nightly.ecosystem.wheels dist`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import attrs
from packaging.utils import parse_wheel_filename

ROOT: Final = Path(__file__).resolve().parents[3]


def projects() -> list[Path]:
    """Folders of the core and of the first-party plugins."""
    return [ROOT, *sorted(path.parent for path in ROOT.glob("plugins/*/*/pyproject.toml"))]


def build(project: Path, into: Path, *options: str) -> None:
    """Build a project's sdist and, from what the sdist holds, its wheel, with the build tools of this environment.

    Args:
        project: Its folder.
        into: Where what is built goes.
        options: More of `python -m build`'s.

    Raises:
        AssertionError: The build failed; the message is what it printed.
    """
    _tool("build", "--no-isolation", "--outdir", str(into), *options, str(project))


@attrs.frozen(kw_only=True)
class Wheelhouse:
    """A folder of sdists and wheels that pip installs from.

    Attributes:
        folder: Where they lie, with a constraints file that makes pip take them.
    """

    folder: Path

    @classmethod
    def build(cls, folder: Path, sources: Sequence[Path] | None = None) -> Wheelhouse:
        """Build, and let twine judge what came out.

        Args:
            folder: Empty, or made if it does not exist.
            sources: Folders of projects; by default those of this repository.

        Raises:
            AssertionError: A build failed, or twine has an objection.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for project in projects() if sources is None else sources:
            build(project, folder)
        house = cls(folder=folder.resolve())
        _tool("twine", "check", "--strict", *map(str, [*house.sdists, *house.wheels]))
        house.constraints.write_text("\n".join(house._constraints()) + "\n")
        return house

    @property
    def wheels(self) -> list[Path]:
        """The wheels, by name."""
        return sorted(self.folder.glob("*.whl"))

    @property
    def sdists(self) -> list[Path]:
        """The sdists, by name."""
        return sorted(self.folder.glob("*.tar.gz"))

    @property
    def constraints(self) -> Path:
        """A constraints file with which `pip install cosmos-core` takes the wheel of this folder, not of an index."""
        # Hidden, so that `twine upload dist/*` sees distributions only.
        return self.folder / ".constraints.txt"

    def _constraints(self) -> list[str]:
        # `--find-links` is here rather than in PIP_FIND_LINKS, which would hide what pip's configuration has.
        pins = ["{}=={}".format(*parse_wheel_filename(wheel.name)[:2]) for wheel in self.wheels]
        return [f"--find-links {self.folder}", *pins, f"--constraint {ROOT / 'constraints.txt'}"]


def _tool(module: str, *arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise AssertionError(f"{module} {' '.join(arguments)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")


def main() -> None:
    """Build into a folder, in place of the releases that it holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="releases in it are replaced")
    old = Wheelhouse(folder=parser.parse_args().folder)
    for path in [*old.wheels, *old.sdists]:
        path.unlink()
    made = Wheelhouse.build(old.folder)
    for path in [*made.wheels, *made.sdists]:
        print(f"{path.stat().st_size / 1024:7.0f} KiB  {path.name}")


if __name__ == "__main__":
    main()
