"""A wheel that is not installed: laid out in a folder as installers do it, and why they would refuse it."""

from __future__ import annotations

import base64
import hashlib
import lzma
import sys
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from email import message_from_string
from importlib.machinery import all_suffixes
from importlib.metadata import Distribution
from pathlib import Path, PurePosixPath
from typing import Final

import attrs
from packaging.tags import sys_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, canonicalize_version, parse_wheel_filename

from cosmos_core.errors import ConfigError, PluginBrokenError
from cosmos_core.plugins.compatibility import CORE
from cosmos_core.plugins.discovery import entries
from cosmos_core.plugins.distributions import distributions, identity, record_rows

# RuntimeError is for what is encrypted; NotImplementedError, a compression that Python does not have, is one.
_UNREADABLE: Final = (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error, lzma.LZMAError)
_AGAIN: Final = "build it again: python -m build"


def astray(dist: Distribution, files: Iterable[PurePosixPath]) -> dict[str, str]:
    """Top-level names that are not a distribution's own, each with a message: its own are those of its plugins.

    Args:
        dist: The distribution.
        files: What it installs among the packages of all others.
    """
    first: dict[str, PurePosixPath] = {}
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


@attrs.frozen(kw_only=True)
class Wheel:
    """A wheel, unpacked.

    Attributes:
        file: The wheel itself.
        folder: Where it lies: its metadata, and what is in packages of its own.
        distribution: Its metadata.
        files: All that it installs among the packages of others.
        faults: Why installers, or those who have other packages installed, would refuse it.
    """

    file: Path
    folder: Path
    distribution: Distribution
    files: tuple[PurePosixPath, ...]
    faults: tuple[str, ...]


def unpack(file: Path, folder: Path) -> Wheel:
    """Lay a wheel out.

    No file of it can take the place of a module that is not its own, so a process may have the folder on its path.

    Raises:
        ConfigError: It cannot be read, or is no wheel.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            members = {each.filename: archive.read(each) for each in archive.infolist() if not each.is_dir()}
    except FileNotFoundError:
        raise ConfigError(f"{file} does not exist; build it with: python -m build") from None
    except _UNREADABLE as error:
        raise ConfigError(f"{file} cannot be read as a wheel: {error}; {_AGAIN}") from error
    infos = {top for top in (name.partition("/")[0] for name in members) if top.endswith(".dist-info")}
    if len(infos) > 1:
        raise ConfigError(f"{file} is no wheel: it has several .dist-info folders ({', '.join(sorted(infos))})")
    info = "".join(infos)
    if f"{info}/METADATA" not in members or not _is_inside(PurePosixPath(info)):
        raise ConfigError(f"{file} is no wheel: it has no .dist-info/METADATA; build it with: python -m build")
    _write(folder, {PurePosixPath(name): data for name, data in members.items() if name.startswith(f"{info}/")})
    dist = next(distributions([str(folder)]), None)
    if dist is None or not identity(dist).name:
        raise ConfigError(f"{file} is no wheel: its METADATA has no name; {_AGAIN}")
    placed = {place: data for name, data in members.items() for place in _places(name, info)}
    foreign = astray(dist, placed)
    _write(folder, {place: data for place, data in placed.items() if place.parts[0] not in foreign})
    faults = (*_name_faults(file, dist), *_content_faults(members, dist, info), *foreign.values())
    return Wheel(file=file.resolve(), folder=folder, distribution=dist, files=tuple(placed), faults=faults)


def _places(name: str, info: str) -> Iterator[PurePosixPath]:
    """Where a member comes to lie among the packages: nowhere, if it is metadata, a script, or leads out of them."""
    file = PurePosixPath(name)
    if not _is_inside(file) or file.parts[0] == info:
        return
    if file.parts[0] != f"{info.removesuffix('.dist-info')}.data":
        yield file
    elif file.parts[1] in ("purelib", "platlib") and file.parts[2:]:
        yield PurePosixPath(*file.parts[2:])


def _is_inside(file: PurePosixPath) -> bool:
    return bool(file.parts) and not file.is_absolute() and ".." not in file.parts and "\\" not in str(file)


def _write(folder: Path, files: Mapping[PurePosixPath, bytes]) -> None:
    for file, data in files.items():
        if _is_inside(file):
            path = folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def _name_faults(file: Path, dist: Distribution) -> Iterator[str]:
    try:
        name, version, _, tags = parse_wheel_filename(file.name)
    except InvalidWheelFilename:
        # check-wheel-contents tells of it.
        return
    known = identity(dist)
    if (canonicalize_name(known.name), canonicalize_version(known.version)) != (name, canonicalize_version(version)):
        yield f"its file name is that of {name} {version}, its metadata that of {known.name} {known.version}; {_AGAIN}"
    if not tags.intersection(sys_tags()):
        yield f"it is for {', '.join(sorted(map(str, tags)))}, so pip refuses it for this Python on this machine"


def _content_faults(members: Mapping[str, bytes], dist: Distribution, info: str) -> Iterator[str]:
    """A format that installers do not know, and differences between the record and the files."""
    version = message_from_string(dist.read_text("WHEEL") or "")["Wheel-Version"] or ""
    if version.partition(".")[0] != "1":
        yield f"{info}/WHEEL has Wheel-Version {version!r}, installers ask for 1.0; {_AGAIN}"
    try:
        hashes = {row[0]: "".join(row[1:2]) for row in record_rows(dist)}
    except PluginBrokenError as error:
        yield str(error)
        return
    record = f"{info}/RECORD"
    signed = {name: data for name, data in members.items() if name not in (record, f"{record}.jws", f"{record}.p7s")}
    for problem, names in (
        ("does not list", [name for name in signed if name not in hashes]),
        ("lists what is not there:", [name for name in hashes if name not in members]),
        ("has another hash than", [name for name in signed if not _is_hash(hashes.get(name), signed[name])]),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            yield f"{record} {problem} {names[0]!r}{more}; {_AGAIN}"


def _is_hash(recorded: str | None, data: bytes) -> bool:
    """True if there is nothing to compare with, or a hash of the data by an algorithm that installers take."""
    algorithm, _, digest = (recorded or "").partition("=")
    is_known = algorithm in ("sha256", "sha384", "sha512")
    made = hashlib.new(algorithm, data).digest() if is_known else b""
    return recorded is None or (is_known and base64.urlsafe_b64encode(made).decode().rstrip("=") == digest)
