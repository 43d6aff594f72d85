"""Writes the package of a new plugin (`cosmos plugins new`), whole or not at all, from templates.

`templates/common` holds what every package has, `templates/<kind>` what is special to a kind, `templates/agent` to an
agent. Where both have a file, the special one is taken; it usually extends the common one. A folder called `package`
stands for the Python package. Files that end in `.j2` are rendered, others are copied.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any, Final

import attrs
import jinja2
from packaging.version import Version

from cosmos_core import protocols
from cosmos_core.config.problems import nearest
from cosmos_core.config.sources import split
from cosmos_core.errors import ConfigError, PluginConflictError
from cosmos_core.plugins.compatibility import CORE
from cosmos_core.plugins.discovery import RULE, discover, is_valid, nearest_valid
from cosmos_core.plugins.functions import function_record, import_function
from cosmos_core.plugins.known import KNOWN
from cosmos_core.protocols import KINDS, PROTOCOL_VERSIONS, Kind
from cosmos_core.protocols.provider import entry_point_group

LONGEST: Final = 40
"""Characters of a name. The templates' lines are laid out for it."""

KIND_OF: Final[Mapping[str, Kind]] = {**{kind: kind for kind in KINDS}, "agent": "environment"}
"""What can be made, each with its kind of plugin: an agent is an environment that calls the model."""

_IMPORTED: Final = frozenset({*protocols.__all__, "HuggingFaceModel", "HuggingFaceOptions"})
"""Classes that a template may import: a plugin's own must have another name."""


@attrs.frozen(kw_only=True)
class Names:
    """The names of one package.

    Attributes:
        what: What it is, of `KIND_OF`.
        name: What recipes say, `slow-one`.
    """

    what: str
    name: str

    @classmethod
    def of(cls, what: str, name: str) -> Names:
        """Check what a user typed.

        Raises:
            ConfigError: There is no such kind, or the name cannot be that of a plugin.
        """
        names = cls(what=_known(what), name=name)
        prefix = f"cosmos-{names.kind}-"
        if not is_valid(name):
            example = nearest_valid(name)[:LONGEST].rstrip("-").removeprefix(prefix) or f"my-{what}"
            raise ConfigError(f"a plugin cannot be named {name!r}: {RULE}, such as {example}")
        if name.startswith(prefix):
            raise ConfigError(f"the distribution's name is made from the plugin's: leave {prefix} out of {name!r}")
        if len(name) > LONGEST:
            raise ConfigError(f"the name {name!r} has {len(name)} characters; take one of at most {LONGEST}")
        taken = _IMPORTED & {names.plugin_class, names.options_class}
        if taken:
            raise ConfigError(f"a plugin named {name!r} would have a class {min(taken)}, as the core has; take another")
        return names

    @property
    def kind(self) -> Kind:
        """The plugin's kind."""
        return KIND_OF[self.what]

    @property
    def distribution(self) -> str:
        """Name of the distribution: `cosmos-engine-slow-one`."""
        return f"cosmos-{self.kind}-{self.name}"

    @property
    def package(self) -> str:
        """Name of the import package: `cosmos_engine_slow_one`."""
        return self.distribution.replace("-", "_")

    @property
    def group(self) -> str:
        """The entry-point group of the kind."""
        return entry_point_group(self.kind)

    @property
    def plugin_class(self) -> str:
        """The class that does the work: `SlowOneEngine`."""
        what, stem = self.what.capitalize(), self._stem
        return stem if stem.endswith(what) and stem != what else stem + what

    @property
    def options_class(self) -> str:
        """The class of its options: `SlowOneOptions`."""
        return f"{self._stem}Options"

    @property
    def _stem(self) -> str:
        return "".join(word.capitalize() for word in self.name.split("-"))


def _known(typed: str) -> str:
    if typed in KIND_OF:
        return typed
    close = nearest(typed, KIND_OF)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ConfigError(f"{typed!r} is no kind of plugin{hint} (kinds: {', '.join(KIND_OF)})")


TEMPLATES: Final = Path(__file__).parent / "templates"
_COMMON: Final = "common"
_FUNCTION: Final = "function"
_SUFFIX: Final = ".j2"
_PACKAGE: Final = "package"
_LINE: Final = 120
"""Characters of a line, as the generated `pyproject.toml` tells the formatter."""
_LONGEST_DESCRIPTION: Final = 512
"""Characters that PyPI takes as a summary; a longer one fails at the upload, when all else is done."""


def render(names: Names, *, author: str = "", description: str = "", function: str = "") -> dict[PurePosixPath, str]:
    """The text of each file of a package, by its path.

    Args:
        names: What the package is called.
        author: Who makes it; left out of the metadata if empty.
        description: One line about it; a plain one is made up if empty.
        function: `PATH.py:NAME` of what it is to be made of; a small example if empty.

    Raises:
        PluginError: The function cannot be a plugin of the kind.
        ConfigError: The author or the description is not one line of text, or PyPI would refuse it.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701 - it makes no HTML
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # JSON's escapes are TOML's, too.
    quoted = functools.partial(json.dumps, ensure_ascii=False)
    environment.filters |= {"quoted": quoted, "imported_from": _imported_from}
    variables = _variables(names, _one_line("--author", author), _summary(description)) | _source(names, function)
    files = {}
    for path, template in _templates(environment, _FUNCTION if function else names.what).items():
        parts = [names.package if part == _PACKAGE else part for part in path.parts]
        files[PurePosixPath(*parts)] = _text(environment, template, variables)
    return files


def _source(names: Names, function: str) -> dict[str, str]:
    """The name and the file of a function, once it is known that it can be a plugin of the kind."""
    if not function:
        return {}
    found = split(str(Path(function).expanduser()))
    record = None if found is None else function_record(names.kind, function)
    if found is None or record is None:
        raise ConfigError(f"--from {function}: expected PATH.py:NAME, such as my_{names.what}.py:{names.name}")
    provider = getattr(import_function(record), f"cosmos_{names.kind}")()
    is_agent = getattr(provider.capabilities, "calls_model", False)
    if names.kind == "environment" and is_agent != (names.what == "agent"):
        found_as = "an agent, which calls the model" if is_agent else "an environment, which answers turns"
        what = "agent" if is_agent else "environment"
        raise ConfigError(f"--from {function}: it is {found_as}; make it with: cosmos plugins new {what} {names.name}")
    return {"function": found[1], "source": found[0].read_text(encoding="utf-8")}


def _templates(environment: jinja2.Environment, own: str) -> dict[PurePosixPath, str]:
    """The template of each file, those of its own folder after the common ones so that they replace these."""
    chosen = {}
    for part in (_COMMON, own):
        for template in environment.list_templates():
            path = PurePosixPath(template)
            if path.parts[0] == part:
                chosen[PurePosixPath(*path.parts[1:]).with_name(path.name.removesuffix(_SUFFIX))] = template
    return chosen


def _text(environment: jinja2.Environment, template: str, variables: Mapping[str, Any]) -> str:
    if template.endswith(_SUFFIX):
        return environment.get_template(template).render(variables)
    return (TEMPLATES / template).read_text(encoding="utf-8")


def _variables(names: Names, author: str, description: str) -> dict[str, Any]:
    release = Version(version(CORE))
    return {
        "kind": names.kind,
        "what": names.what,
        "What": names.what.capitalize(),
        "name": names.name,
        "distribution": names.distribution,
        "package": names.package,
        "group": names.group,
        "Class": names.plugin_class,
        "Options": names.options_class,
        "classes": sorted((names.plugin_class, names.options_class)),
        "author": author,
        "description": description or f"The {names.what} {names.name} for cosmos-core.",
        "protocol": PROTOCOL_VERSIONS[names.kind],
        "bound": f">={release.major}.{release.minor},<{release.major}.{release.minor + 1}",
    }


def _one_line(option: str, text: str) -> str:
    if not text.isprintable():
        raise ConfigError(f"{option} {text!r}: write it as one line of text")
    return text.strip()


def _summary(description: str) -> str:
    text = _one_line("--description", description)
    if len(text) > _LONGEST_DESCRIPTION:
        raise ConfigError(
            f"--description has {len(text)} characters, and PyPI takes at most {_LONGEST_DESCRIPTION}; "
            "shorten it, and tell the rest in README.md"
        )
    return text


def _imported_from(names: Sequence[str], module: str) -> str:
    """An import statement, laid out as a formatter would."""
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= _LINE:
        return line
    return "\n".join([f"from {module} import (", *(f"    {name}," for name in names), ")"])


def new_package(
    what: str, name: str, *, into: Path, author: str = "", description: str = "", function: str = ""
) -> Path:
    """Write a complete package with a working minimal plugin.

    Args:
        what: What it is: a kind of plugin, or `agent`.
        name: What recipes will call it.
        into: The folder in which the package's own folder is made.
        author: Who makes it.
        description: One line about it.
        function: `PATH.py:NAME` of what it is to be made of; a small example if empty.

    Returns:
        The package's folder, `into/cosmos-<kind>-<name>`.

    Raises:
        ConfigError: An argument cannot be used, or the folder exists or cannot be made.
        PluginConflictError: Another plugin has the name.
    """
    names = Names.of(what, name)
    _check_free(names)
    files = render(names, author=author, description=description, function=function)
    if not into.is_dir():
        raise ConfigError(f"--into {into}: there is no such folder; make it first, or name another")
    target = into / names.distribution
    if os.path.lexists(target):
        raise ConfigError(f"{target} exists and is left as it is; remove it, or choose another name or --into folder")
    try:
        _write(target, files)
    except OSError as error:
        raise ConfigError(
            f"{target} cannot be written: {error.strerror or error}; name another folder with --into"
        ) from error
    return target


def _check_free(names: Names) -> None:
    """Two plugins of one kind and name cannot be told apart in a recipe, and confuse whoever reads it."""
    kind, name = names.kind, names.name
    owners = {
        f"{record.distribution} {record.version}"
        for record in discover(kind)
        if record.name == name and record.status != "invalid"
    }
    if not owners and (kind, name) in KNOWN:
        owners = {KNOWN[kind, name]}
    if owners:
        raise PluginConflictError(
            f"the {kind} {name!r} is provided by {' and by '.join(sorted(owners))}; choose another name"
        )


def _write(target: Path, files: Mapping[PurePosixPath, str]) -> None:
    """Write beside the target and rename: whoever interrupts this leaves nothing half made."""
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as beside:
        made = Path(beside) / target.name
        for path, text in files.items():
            file = made / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        made.rename(target)
