"""An environment outside the checkout with releases from wheels, and a recipe that runs in it.

python -m tests.nightly.ecosystem.environment --wheels dist --recipe recipes/arithmetic.toml cosmos-model-qwen …
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import attrs

from tests.nightly.ecosystem.wheels import Wheelhouse

# What a person's shell does not have: variables that lead back to the checkout or change what a run does.
_PRIVATE: Final = ("PYTHON", "VIRTUAL_ENV", "COSMOS_", "PYTEST_", "COVERAGE_")


@attrs.frozen(kw_only=True)
class CleanEnvironment:
    """A virtual environment in which pip takes the wheels of a folder, and nothing leads back to the checkout.

    Attributes:
        folder: Holds the environment (`venv`) and what is made with it; commands run here unless told otherwise.
        wheels: The first-party releases.
    """

    folder: Path
    wheels: Wheelhouse

    @classmethod
    def create(cls, folder: Path, wheels: Wheelhouse) -> CleanEnvironment:
        """Make it, with a new pip and nothing else installed.

        Args:
            folder: An existing folder.
            wheels: Releases to install from.
        """
        made = cls(folder=folder.resolve(), wheels=wheels)
        made.run(sys.executable, "-m", "venv", "--upgrade-deps", "venv", timeout_s=180)
        return made

    @property
    def bin(self) -> Path:
        """Its commands."""
        return self.folder / "venv" / "bin"

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.bin / "python"

    @property
    def environment(self) -> dict[str, str]:
        """Variables for processes: its commands come first on the path, and pip takes the wheels."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_PRIVATE)}
        ours = Path(sys.prefix, "bin")
        elsewhere = [place for place in inherited.get("PATH", os.defpath).split(os.pathsep) if Path(place) != ours]
        constraints = f"{inherited.get('PIP_CONSTRAINT', '')} {self.wheels.constraints}".strip()
        return {
            **inherited,
            "PATH": os.pathsep.join([str(self.bin), *elsewhere]),
            "PIP_CONSTRAINT": constraints,
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            # pip reads a `--no-…` option from the environment upside down: 0 is what leaves the compiling out.
            "PIP_NO_COMPILE": "0",
            "OMP_NUM_THREADS": "1",
            "NO_COLOR": "1",
            "COLUMNS": "120",
        }

    def run(self, *command: str | Path, code: int = 0, timeout_s: float = 120.0, folder: Path | None = None) -> str:
        """Run a command to its end.

        Args:
            command: A program, found on the environment's path, and its arguments.
            code: Exit code that it must have.
            timeout_s: Longest time that it may take.
            folder: Where it runs.

        Returns:
            What it printed, standard error included.

        Raises:
            AssertionError: It ended with another code; the message is what it printed.
            subprocess.TimeoutExpired: It took longer.
        """
        words = [str(word) for word in command]
        variables = self.environment
        # The path of the new process is not where `subprocess` looks for a program.
        program = shutil.which(words[0], path=variables["PATH"]) or words[0]
        done = subprocess.run(
            [program, *words[1:]],
            cwd=folder or self.folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode != code:
            raise AssertionError(f"{' '.join(words)}: exit code {done.returncode}, not {code}\n{done.stdout}")
        return done.stdout

    def pip(self, *arguments: str | Path, timeout_s: float = 300.0) -> str:
        """Run the environment's pip.

        Returns:
            What it printed.

        Raises:
            AssertionError: It failed; the message is what it printed.
        """
        return self.run("python", "-m", "pip", *arguments, timeout_s=timeout_s)


def demonstrate(recipe: Path, requirements: Sequence[str], environment: CleanEnvironment) -> None:
    """Install from the wheels, run a recipe, and say so if it did not end as it should.

    Args:
        recipe: It needs no file beside it.
        requirements: What to install.
        environment: Where.

    Raises:
        AssertionError: A step failed.
    """
    print(f"Installing {', '.join(requirements)} from {environment.wheels.folder}", flush=True)
    environment.pip("install", *requirements)
    home = environment.run("python", "-c", "import cosmos_core; print(cosmos_core.__file__)").strip()
    print(f"cosmos-core is {home}", flush=True)
    shutil.copy(recipe, environment.folder)
    command = [str(environment.bin / "cosmos"), "run", recipe.name, "--name", "demo"]
    code = subprocess.run(command, cwd=environment.folder, env=environment.environment, check=False).returncode
    summary = environment.folder / "runs" / "demo" / "summary.json"
    outcome = json.loads(summary.read_text())["outcome"] if summary.exists() else "unfinished"
    if (code, outcome) != (0, "finished"):
        raise AssertionError(f"{recipe.name}: exit code {code}, outcome {outcome}")


def main() -> None:
    """Run a recipe in a new environment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--wheels", type=Path, required=True, help="what `python -m tests.nightly.ecosystem.wheels` made"
    )
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--folder", type=Path, help="keep the environment here; by default it is removed at the end")
    parser.add_argument("requirements", nargs="+", metavar="REQUIREMENT")
    given = parser.parse_args()
    wheels = Wheelhouse(folder=given.wheels.resolve())
    if not wheels.constraints.exists():
        parser.error(f"--wheels {given.wheels}: there are no releases; build them with: make wheels")
    with tempfile.TemporaryDirectory(prefix="cosmos-clean-") as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        demonstrate(given.recipe, given.requirements, CleanEnvironment.create(folder, wheels))


if __name__ == "__main__":
    main()
