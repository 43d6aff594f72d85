"""A wheel that is not installed: laid out in a folder as installers do it, and why they would refuse it."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import lzma
import shutil
import sys
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from email import message_from_string
from importlib.machinery import all_suffixes
from importlib.metadata import Distribution
from pathlib import Path, PurePath, PurePosixPath
from typing import Final

from packaging.tags import sys_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, canonicalize_version, parse_wheel_filename

from cosmos_core.errors import ConfigError, PluginBrokenError
from cosmos_core.plugins.compatibility import CORE
from cosmos_core.plugins.discovery import entries
from cosmos_core.plugins.distributions import Readable, distributions, identity, record_rows

# RuntimeError is for what is encrypted; NotImplementedError, a compression that Python does not have, is one.
_UNREADABLE: Final = (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error, lzma.LZMAError)
_AGAIN: Final = "build it again: python -m build"


def astray(dist: Distribution, files: Iterable[PurePath]) -> dict[str, str]:
    """Top-level names that are not a distribution's own, each with a message: its own are those of its plugins.

    Args:
        dist: The distribution.
        files: What it installs among the packages of all others.
    """
    first: dict[str, PurePath] = {}
    for file in files:
        first.setdefault(file.parts[0], file)
    values = [entry.value for entry in entries(dist.read_text("entry_points.txt") or "")]
    own = dict.fromkeys(value.partition(":")[0].partition(".")[0].strip() for value in values)
    owners = _owners(identity(dist).name, {top.partition(".")[0] for top in first})
    found = {}
    for top, file in first.items():
        name = top.partition(".")[0]
        # A file such as `.pth` is in no package.
        is_code = len(file.parts) > 1 or file.name.endswith((*all_suffixes(), ".pyi"))
        if name in owners:
            found[top] = f"{file} lies in {name}, which belongs to {owners[name]}; move it into a package of its own"
        elif name not in own or not is_code:
            packages = ", ".join(f'"{each}"' for each in own)
            found[top] = (
                f"{file} would lie beside the packages of all other projects; leave it out of the wheel, "
                f"for example with packages = [{packages}] in [tool.hatch.build.targets.wheel]"
            )
    return found


def _owners(name: str, tops: Iterable[str]) -> dict[str, str]:
    """The distribution, other than the one of that name, that each package and module belongs to, if one does."""
    owners = {top: "Python" for top in tops if top in sys.stdlib_module_names}
    ours = canonicalize_name(name)
    if ours != CORE:
        # The core may be installed editable, so that its record names none of its files.
        owners["cosmos_core"] = CORE
    for dist in distributions():
        other = canonicalize_name(identity(dist).name)
        if other and other != ours:
            # Searched, not parsed: some records have tens of thousands of rows. Namespace packages are everybody's.
            record = "\n" + (dist.read_text("RECORD") or "")
            owners |= {top: other for top in tops if f"\n{top}/__init__.py," in record or f"\n{top}.py," in record}
    return owners


def unpack(file: Path, folder: Path) -> tuple[Distribution, list[str]]:
    """Lay a wheel out in an empty folder.

    No file of it can take the place of a module that is not its own, so a process may have the folder on its path.

    Returns:
        Its metadata, and why installers, or those who have other packages installed, would refuse it.

    Raises:
        ConfigError: It cannot be read, or is no wheel.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            members = {each.filename: archive.read(each) for each in archive.infolist() if not each.is_dir()}
            archive.extractall(folder, [name for name in members if _is_inside(PurePosixPath(name))])
    except FileNotFoundError:
        raise ConfigError(f"{file} does not exist; build it with: python -m build") from None
    except _UNREADABLE as error:
        raise ConfigError(f"{file} cannot be read as a wheel: {error}; {_AGAIN}") from error
    info, *more = sorted(path.name for path in folder.glob("*.dist-info")) or [""]
    dist = Readable(Distribution.at(folder / info))
    if not info or more or not identity(dist).name:
        wanted, seen = "one .dist-info folder, whose METADATA has a name", ", ".join([info, *more]) or "none"
        raise ConfigError(f"{file} is no wheel: it must have {wanted}, and has {seen}; {_AGAIN}")
    faults = [*_format_faults(file, dist), *_record_faults(members, dist, info)]
    data = f"{info.removesuffix('.dist-info')}.data"
    for library in filter(Path.is_dir, (folder / data / "purelib", folder / data / "platlib")):
        shutil.copytree(library, folder, dirs_exist_ok=True)
    placed = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    foreign = astray(dist, (each for each in placed if each.parts[0] not in (info, data)))
    for top in foreign:
        path = folder / top
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return dist, [*faults, *foreign.values()]


def _is_inside(file: PurePosixPath) -> bool:
    return not file.is_absolute() and ".." not in file.parts


def _format_faults(file: Path, dist: Distribution) -> Iterator[str]:
    # Of any other file name, check-wheel-contents tells.
    with contextlib.suppress(InvalidWheelFilename):
        name, version, _, tags = parse_wheel_filename(file.name)
        known, named = identity(dist), canonicalize_version(version)
        if (canonicalize_name(known.name), canonicalize_version(known.version)) != (name, named):
            its_own = f"its metadata that of {known.name} {known.version}"
            yield f"its file name is that of {name} {version}, {its_own}; {_AGAIN}"
        if not tags.intersection(sys_tags()):
            yield f"it is for {', '.join(sorted(map(str, tags)))}, so pip refuses it for this Python on this machine"
    form = message_from_string(dist.read_text("WHEEL") or "")["Wheel-Version"] or ""
    if form.partition(".")[0] != "1":
        yield f"its WHEEL has Wheel-Version {form!r}, installers ask for 1.0; {_AGAIN}"


def _record_faults(members: Mapping[str, bytes], dist: Distribution, info: str) -> Iterator[str]:
    try:
        hashes = {row[0]: "".join(row[1:2]) for row in record_rows(dist)}
    except PluginBrokenError as error:
        yield str(error)
        return
    unsigned = {f"{info}/RECORD{suffix}" for suffix in ("", ".jws", ".p7s")}
    listed = [name for name in members if name in hashes and name not in unsigned]
    for problem, names in (
        ("does not list", [name for name in members if name not in hashes and name not in unsigned]),
        ("lists what is not there:", [name for name in hashes if name not in members]),
        ("has another hash than", [name for name in listed if not _is_hash(hashes[name], members[name])]),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            yield f"its RECORD {problem} {names[0]!r}{more}; {_AGAIN}"


def _is_hash(recorded: str, data: bytes) -> bool:
    """True if it is the hash of data by an algorithm that installers take."""
    algorithm, _, digest = recorded.partition("=")
    if algorithm not in ("sha256", "sha384", "sha512"):
        return False
    made = hashlib.new(algorithm, data).digest()
    return base64.urlsafe_b64encode(made).decode().rstrip("=") == digest
