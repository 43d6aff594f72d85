"""Writes what a run was made with to `manifest.json`, and compares sessions and machines with it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from cosmos_core import __version__
from cosmos_core.config.job import Job
from cosmos_core.config.sources import is_copy, label, read, split, version_of
from cosmos_core.errors import ConfigError
from cosmos_core.plugins.discovery import PluginRecord
from cosmos_core.plugins.manifest import manifest
from cosmos_core.plugins.recipe import selections
from cosmos_core.run.folder import write_json

FILE: Final = "manifest.json"


def made_with(plugins: Iterable[PluginRecord], assets: Path | None = None) -> dict[str, Any]:
    """The manifest of a session: its plugins, and facts about this machine; of a run's first also the assets."""
    made = {"plugins": manifest(plugins), **_machine()}
    return made if assets is None else {**made, "assets": _digests(assets)}


def resumed_with(directory: Path, plugins: Iterable[PluginRecord], changes: Sequence[str] = ()) -> list[str]:
    """Add a session and its `changes` of the recipe, in words, to a run's manifest.

    Returns how it differs from the session before, in sentences; none if the same code goes on with the same recipe.
    """
    session = {**made_with(plugins), "changes": list(changes)}
    recorded, differences = _compared(directory, session)
    recorded.setdefault("resumed", []).append(session)
    write_json(directory / FILE, recorded)
    return [f"Changed since the run's last session: {each}" for each in (*differences, *changes)]


def joined_with(directory: Path, plugins: Iterable[PluginRecord]) -> list[str]:
    """Differences of this machine's installation from that of a run's newest session, in words; empty if none."""
    return _compared(directory, made_with(plugins))[1]


def sources(job: Job) -> Iterator[tuple[str, str, str]]:
    """(label, `--set` that takes its file anew, notice if that has changed) of plugins whose file is still there.

    The `--set` is empty where a run keeps its copy: of all but rewards, which come first.
    """
    try:
        recorded = json.loads((job.directory / FILE).read_text(encoding="utf-8"))
        sessions = [*reversed(recorded.get("resumed", [])), recorded]
    except (OSError, ValueError, TypeError, AttributeError):
        return
    named = [("reward", each.label, each.plugin) for each in job.recipe.reward]
    named += [(kind, label(name), name) for kind, name in selections(job.recipe) if kind != "reward"]
    for index, (kind, name, selection) in enumerate(named):
        if (copy := split(selection)) is None:
            continue
        with contextlib.suppress(ConfigError):
            for file, taken in _origins(sessions, *copy):
                setting = f"--set {shlex.quote(f'reward.{index}.plugin={file}:{copy[1]}')}" if kind == "reward" else ""
                told = (
                    f"The file of {kind} {name} has changed: the run goes on with its copy of {taken}; "
                    f"{f'to take the new one: {setting}' if setting else 'a new run takes the new one'}"
                )
                is_same = version_of(read(file)) == copy[0].parent.name
                yield name, setting, "" if is_same else told


def _origins(sessions: Iterable[Mapping[str, Any]], copy: Path, name: str) -> Iterator[tuple[Path, str]]:
    """The file that a copy is of, and when it was taken, if it is still there."""
    for session in sessions:
        # An older session may be whole where this one is damaged, or its file where nobody may look.
        with contextlib.suppress(OSError, KeyError, TypeError):
            for plugin in session["plugins"]:
                found = split(plugin["module"])
                is_it = found is not None and found[1] == name and plugin["version"] == copy.parent.name
                if found and is_it and not is_copy(found[0]) and found[0].is_file():
                    yield found[0], session["created"]
                    return


def _compared(directory: Path, session: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A run's manifest, and how a session differs from the newest in it."""
    path = directory / FILE
    try:
        recorded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        differences = list(_differences([recorded, *recorded.get("resumed", [])][-1], session))
        assets = dict(recorded.get("assets", {}))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: missing or damaged ({type(error).__name__}: {error}); a run needs it") from error
    found = _digests(directory / "assets")
    for name, digest in assets.items():
        if found.get(name) != digest:
            fault = "is not what the run was made with (SHA-256)" if name in found else "is missing"
            raise ConfigError(f"{directory / 'assets' / name} {fault}; restore it")
    return recorded, differences


def _digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each file in a folder, by its path there; nothing if there is no folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    if before["cosmos_core"] != after["cosmos_core"]:
        yield f"cosmos-core was {before['cosmos_core']}, is {after['cosmos_core']}"
    old, new = _by_distribution(before["plugins"]), _by_distribution(after["plugins"])
    for name in sorted(old.keys() | new.keys()):
        if name not in old or name not in new:
            yield f"{name} {'came' if name in new else 'went'}"
        elif old[name]["version"] != new[name]["version"]:
            yield f"{name} was {old[name]['version']}, is {new[name]['version']}"
        elif old[name]["sha256"] != new[name]["sha256"]:
            yield f"{name} {new[name]['version']} has other code than before"


def _by_distribution(plugins: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    # Files may share a name, as those of two folders do.
    return {
        plugin["distribution"]
        if split(plugin["module"]) is None
        else f"{plugin['kind']} {plugin['name']} of {plugin['distribution']}": plugin
        for plugin in plugins
    }


def _machine() -> dict[str, Any]:
    """Facts about this machine and installation."""
    return {
        "cosmos_core": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "git_commit": _git_commit(),
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _git_commit() -> str | None:
    git = shutil.which("git")
    if git is None:
        return None
    try:
        answer = subprocess.run(
            [git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False, timeout=5, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None
