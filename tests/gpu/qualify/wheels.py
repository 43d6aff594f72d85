"""Wheels for a machine that has torch with CUDA and transformers, and neither a network nor this project's environment.

    python -m tests.gpu.qualify.wheels gather gpu-wheels    # where there is a network
    python -m tests.gpu.qualify.wheels install gpu-wheels build/gpu-site    # there, with its own Python

`gather` downloads what the project needs of what such a machine is not taken to have. `install` unpacks it and writes
the metadata of the core and its plugins beside it, by which plugins are found; their modules are those of this tree.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[3]
MOST_MIB: Final = 60
PRESENT: Final = frozenset(
    (  # noqa: SIM905 - a list of names reads best so
        "aiohttp attrs filelock fsspec httpx huggingface-hub hypothesis jinja2 mpmath numpy packaging pillow pluggy "
        "psutil pyarrow pytest pytest-timeout pyyaml regex requests rich safetensors sympy tokenizers torch tqdm "
        "transformers typer typing-extensions"
    ).split()
)
"""What the machine has, besides what these need."""
PLUGINS: Final = (  # noqa: SIM905 - likewise
    "algorithms/sft algorithms/grpo algorithms/flow-grpo datasets/arithmetic datasets/shapes datasets/world "
    "engines/diffusion models/qwen models/qwen-vl models/wan rewards/math rewards/vision"
).split()
"""Those whose libraries are taken along: the runs of stage E."""
PLATFORMS: Final = [*(f"manylinux_2_{minor}_x86_64" for minor in range(39, 16, -1)), "manylinux2014_x86_64"]


def projects(folders: Sequence[str] = ("*/*",)) -> list[dict[str, Any]]:
    """The `[project]` tables of the core and of plugins."""
    paths = [
        ROOT / "pyproject.toml",
        *(p for each in folders for p in sorted(ROOT.glob(f"plugins/{each}/pyproject.toml"))),
    ]
    return [tomllib.loads(path.read_text(encoding="utf-8"))["project"] for path in paths]


def needed() -> dict[str, str]:
    """What has to be taken along, as pip takes it, by name: what the environment of this tree has of it."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    waiting = [Requirement(line) for project in projects(PLUGINS) for line in project.get("dependencies", ())]
    found: dict[str, str] = {}
    while waiting:
        requirement = waiting.pop()
        name, marker = canonicalize_name(requirement.name), requirement.marker
        if name in PRESENT or name.startswith("cosmos-") or (marker and not marker.evaluate({"extra": ""})):
            continue
        found[name] = f"{name}=={importlib.metadata.version(name)}"
        for line in importlib.metadata.requires(name) or ():
            theirs = Requirement(line)
            extras = ["", *requirement.extras]
            if theirs.marker is None or any(theirs.marker.evaluate({"extra": extra}) for extra in extras):
                theirs.marker = None
                waiting += [theirs] if canonicalize_name(theirs.name) not in found else []
    return found


def gather(folder: Path, python: str) -> None:
    """Download the wheels, for a release of Python on x86-64 Linux, in place of those in the folder."""
    for old in folder.glob("*.whl"):
        old.unlink()
    wanted = sorted(needed().values())
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    options = ["--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", *options, "--dest", str(folder), *wanted], check=True
    )
    size = sum(path.stat().st_size for path in folder.glob("*.whl")) / 2**20
    print(f"{folder}: {len(wanted)} wheels for Python {python}, {size:.1f} MiB: {', '.join(wanted)}")
    if size > MOST_MIB:
        sys.exit(f"{folder}: {size:.0f} MiB are more than the {MOST_MIB} that such machines are sent")


def install(folder: Path, site: Path) -> None:
    """Unpack the wheels, write the metadata of this tree, and say what is still missing."""
    wheels = [str(path) for path in sorted(folder.glob("*.whl"))]
    options = ["--no-index", "--no-deps", "--no-compile", "--upgrade", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *options, *wheels], check=True)
    for project in projects():
        _write_metadata(project, site)
    sys.path.insert(0, str(site))
    if lacking := sorted(_unmet()):
        sys.exit(
            f"this machine's Python lacks {'; '.join(lacking)}: make gpu-wheels takes along what PRESENT does not name"
        )


def _write_metadata(project: dict[str, Any], site: Path) -> None:
    name, version = project["name"], project["version"]
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    lines = ["Metadata-Version: 2.3", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {line}" for line in project.get("dependencies", ())]
    (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
    groups = project.get("entry-points", {})
    points = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in each.items()) for group, each in groups.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(points), encoding="utf-8")


def _unmet() -> Iterator[str]:
    from packaging.requirements import Requirement

    for project in projects(PLUGINS):
        for line in project.get("dependencies", ()):
            requirement = Requirement(line)
            try:
                found = importlib.metadata.version(requirement.name)
            except importlib.metadata.PackageNotFoundError:
                yield f"{line} ({project['name']})"
                continue
            if not requirement.specifier.contains(found, prereleases=True):
                yield f"{line} ({project['name']}; it has {found})"


def main() -> None:
    """Gather, or install."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("gather", "install"))
    parser.add_argument("folder", type=Path, help="of wheels")
    parser.add_argument("site", type=Path, nargs="?", help="install: where modules and metadata go")
    parser.add_argument("--python", default="3.12", help="gather: release of the machine's Python (default: 3.12)")
    options = parser.parse_args()
    if options.what == "gather":
        gather(options.folder, options.python)
    else:
        install(options.folder, options.site)


if __name__ == "__main__":
    main()
