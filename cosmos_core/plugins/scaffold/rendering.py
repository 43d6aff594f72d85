"""The files of a package, from templates.

`templates/common` holds what every package has, `templates/<kind>` what is special to a kind. Where both have a file,
the kind's is taken; it usually extends the common one. A folder called `package` stands for the Python package. Files
that end in `.j2` are rendered, others are copied.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

import jinja2
from packaging.version import Version

from cosmos_core import __version__
from cosmos_core.errors import ConfigError
from cosmos_core.plugins.scaffold.naming import Names
from cosmos_core.protocols import PROTOCOL_VERSIONS

TEMPLATES: Final = Path(__file__).parents[1] / "templates"
_COMMON: Final = "common"
_SUFFIX: Final = ".j2"
_PACKAGE: Final = "package"
_LINE: Final = 120
"""Characters of a line, as the generated `pyproject.toml` tells the formatter."""
_LONGEST_DESCRIPTION: Final = 512
"""Characters that PyPI takes as a summary; a longer one fails at the upload, when all else is done."""


def render(names: Names, *, author: str = "", description: str = "") -> dict[PurePosixPath, str]:
    """The text of each file of a package, by its path.

    Args:
        names: What the package is called.
        author: Who makes it; left out of the metadata if empty.
        description: One line about it; a plain one is made up if empty.

    Raises:
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
    environment.filters |= {"quoted": _quoted, "imported_from": _imported_from}
    variables = _variables(names, _one_line("--author", author), _summary(description))
    files = {}
    for path, template in _templates(environment, names).items():
        parts = [names.package if part == _PACKAGE else part for part in path.parts]
        files[PurePosixPath(*parts)] = _text(environment, template, variables)
    return files


def _templates(environment: jinja2.Environment, names: Names) -> dict[PurePosixPath, str]:
    """The template of each file, a kind's own after the common ones so that it replaces them."""
    chosen = {}
    for part in (_COMMON, names.kind):
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
    release = Version(__version__)
    return {
        "kind": names.kind,
        "Kind": names.kind.capitalize(),
        "name": names.name,
        "distribution": names.distribution,
        "package": names.package,
        "group": names.group,
        "Class": names.plugin_class,
        "Options": names.options_class,
        "classes": sorted((names.plugin_class, names.options_class)),
        "author": author,
        "description": description or f"The {names.kind} {names.name} for cosmos-core.",
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


def _quoted(text: str) -> str:
    """A TOML string; JSON's escapes are TOML's, too."""
    return json.dumps(text, ensure_ascii=False)
