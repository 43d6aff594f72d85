"""Functions and classes of a Python file as plugins: `./my_rewards.py:brevity` in a recipe, without a package.

What takes part by position is what the run gives; keyword-only parameters are the plugin's options. A function that
is itself the provider hook of the kind (`cosmos_reward`) is asked for its `Provider`, as a package's is.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import inspect
import sys
import traceback
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import attrs

from cosmos_core.config import option
from cosmos_core.config.problems import nearest
from cosmos_core.config.sources import is_copy, read, split, version_of
from cosmos_core.data.function import GIVEN, FunctionDataset
from cosmos_core.data.options import RowsOptions
from cosmos_core.errors import CosmosError, PluginBrokenError, PluginNotFoundError
from cosmos_core.plugins.discovery import PluginRecord
from cosmos_core.plugins.reward_function import capabilities_of, reward_of
from cosmos_core.protocols import (
    DatasetCapabilities,
    EnvironmentCapabilities,
    EnvironmentContext,
    Kind,
    NoOptions,
    Provider,
    hookimpl,
)
from cosmos_core.types import JSON

_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_METHODS: Final[Mapping[str, tuple[str, ...]]] = {
    "reward": ("score",),
    "dataset": ("size", "row"),
    "algorithm": ("advantages", "loss"),
    "environment": ("reset", "step", "close"),
}
"""The kinds of such plugins, each with methods by which a class of the kind is known."""


def function_record(kind: Kind, selection: str) -> PluginRecord | None:
    """The record of a function: its distribution is the file, its version the file's SHA-256; None for other names.

    Raises:
        PluginNotFoundError: Plugins of the kind come in packages only, or there is no such file.
    """
    found = split(selection)
    if found is None:
        if kind in _METHODS and selection.endswith(".py"):
            told = f"name a function or class of the file, {selection}:NAME{_names(selection)}"
            raise PluginNotFoundError(f"{kind} plugin {selection!r}: {told}")
        return None
    path, name = found
    if kind not in _METHODS:
        raise PluginNotFoundError(
            f"{kind} plugin {selection!r}: a {kind} comes in a package (cosmos plugins new {kind} NAME); "
            f"of a file may be a {', a '.join(_METHODS)}"
        )
    if not path.is_file():
        close = nearest(path.stem, [each.stem for each in path.parent.glob("*.py")]) if path.parent.is_dir() else []
        starts = "relative paths start at the recipe's folder, and on the command line at the current one"
        hint = f"did you mean {path.with_name(close[0])}.py?" if close else starts
        raise PluginNotFoundError(f"{kind} plugin {name!r}: no such file {path}; {hint}")
    version = version_of(read(path))
    if is_copy(path) and path.parent.name != version:
        raise PluginBrokenError(
            f"{kind} plugin {name!r}: {path} is not what the run was made with (SHA-256 {version}…); restore it"
        )
    return PluginRecord(kind=kind, name=name, distribution=path.name, version=version, module=selection)


def _names(file: str) -> str:
    """The functions and classes that a file has, as the end of a hint; nothing where it cannot be read."""
    try:
        found = ast.parse(Path(file).expanduser().read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return f" (it has {', '.join(each.name for each in found if isinstance(each, kinds)) or 'none'})"


def import_function(record: PluginRecord) -> Any:
    """An object with the provider hook of the record's kind, made of what the file has by that name.

    Raises:
        PluginBrokenError: The file is no Python, fails, has no such name, or what it names cannot be of the kind.
    """
    found = split(record.module)
    assert found is not None, record
    path, name = found
    where = f"{record.kind} plugin {name!r} of {path}"
    module = _module(path, record.version, where)
    try:
        target = getattr(module, name)
    except AttributeError:
        close = nearest(name, [each for each in vars(module) if not each.startswith("_")])
        hint = f"; did you mean {close[0]}?" if close else ""
        raise PluginBrokenError(f"{where}: the file has nothing of that name{hint}") from None
    if not (inspect.isfunction(target) or inspect.isclass(target)):
        raise PluginBrokenError(f"{where}: it is {target!r:.100}; name a function or a class")
    hook = f"cosmos_{record.kind}"
    try:
        provider = None if name == hook else provider_of(record.kind, target)
    except Exception as error:  # an annotation of an option may be any expression
        raise PluginBrokenError(f"{where}: {error}") from error
    return type("Function", (), {hook: staticmethod(hookimpl(target if provider is None else lambda: provider))})()


def _module(path: Path, version: str, where: str) -> ModuleType:
    """The file as a module, run once in a process; two files of one name are two modules."""
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}_{version}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except CosmosError:
        del sys.modules[name]
        raise
    except SyntaxError as error:
        del sys.modules[name]
        line = f"line {error.lineno}: " if error.lineno else ""
        raise PluginBrokenError(f"{where}: it is no Python: {line}{error.msg}") from None
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        own = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        beside = isinstance(error, ImportError) and error.name and path.with_name(f"{error.name}.py").exists()
        hint = (
            f"; a run keeps {path.name} alone: put both into one file, or make a package with "
            f"cosmos plugins new --from {path.name}:NAME"
            if beside
            else ""
        )
        raise PluginBrokenError(
            f"{where}: line {own[-1] if own else 1} failed: {type(error).__name__}: {error}{hint}"
        ) from error
    return module


def provider_of(kind: Kind, target: Callable[..., Any]) -> Provider[Any]:
    """The provider of a function or a class, for the provider hook of a package; see the module.

    Raises:
        TypeError: It cannot be a plugin of the kind; the message says why.
    """
    parameters = inspect.signature(target).parameters.values()
    options = {each.name: each for each in parameters if each.kind is each.KEYWORD_ONLY}
    given = [each.name for each in parameters if each.kind in _POSITIONAL]

    def chosen(made: Any) -> dict[str, Any]:
        return {name: getattr(made, name) for name in options}

    is_agent = kind == "environment" and (not isinstance(target, type) or hasattr(target, "run"))
    if isinstance(target, type):
        needed = ("run",) if is_agent else _METHODS[kind]
        if lacking := [each for each in needed if not callable(getattr(target, each, None))]:
            raise TypeError(f"the class has no {' and no '.join(lacking)}, as a {kind} has")
        if len(given) > 1:
            raise TypeError(f"the class is made of {', '.join(given)}; it may take the context, and options after a *")
        return Provider(
            create=lambda made, context: target(*([context] if given else ()), **chosen(made)),
            options=_options(target, options),
            capabilities=_of_agent(target) if is_agent else getattr(target, "capabilities", None),
        )
    if is_agent:
        return _agent(target, given, options, chosen)
    if kind == "reward":
        return Provider(
            create=lambda made, context: reward_of(target, chosen(made), context.name),
            options=_options(target, options),
            capabilities=capabilities_of(target),
        )
    if kind == "dataset":
        if strange := [name for name in given if name not in GIVEN]:
            raise TypeError(f"it takes {', '.join(strange)}; it may take {', '.join(GIVEN)}, and options after a *")
        return Provider(
            create=lambda made, context: FunctionDataset(target, given, chosen(made), made, context),
            options=_options(target, options, RowsOptions),
            capabilities=DatasetCapabilities(demonstrations=True, references=True, preferences=True),
        )
    raise TypeError(f"it is a function, and of a file a {kind} is a class")


def _agent(
    target: Callable[..., Any],
    given: Sequence[str],
    options: Mapping[str, inspect.Parameter],
    chosen: Callable[[Any], dict[str, Any]],
) -> Provider[Any]:
    """The provider of an agent that is a function of a session and a task."""
    if len(given) != 2:
        raise TypeError(f"it takes {', '.join(given) or 'nothing'}; an agent takes a session and a task")

    def create(made: Any, context: EnvironmentContext) -> Any:  # noqa: ARG001 - a function is told of its session alone
        run = functools.partial(target, **chosen(made))
        # What is awaited is told from what is called in a thread.
        return type("AgentFunction", (), {"run": staticmethod(run)})()

    return Provider(create=create, options=_options(target, options), capabilities=_of_agent(target))


def _of_agent(target: Callable[..., Any]) -> EnvironmentCapabilities:
    """The capabilities of an agent, those that it declares among them."""
    told = getattr(target, "capabilities", None) or EnvironmentCapabilities(rewards=True, deterministic=False)
    return attrs.evolve(told, calls_model=True)


def _options(target: Callable[..., Any], parameters: Mapping[str, inspect.Parameter], base: type = NoOptions) -> type:
    """The options class of keyword-only parameters; one without an annotation is of its default's type."""
    fields: dict[str, Any] = {}
    annotations: dict[str, Any] = {}
    for name, each in parameters.items():
        is_plain = isinstance(each.default, bool | int | float | str)
        unsaid = type(each.default) if is_plain else JSON
        annotations[name] = unsaid if each.annotation is each.empty else each.annotation
        default = attrs.NOTHING if each.default is each.empty else each.default
        fields[name] = option(default, help=f"Parameter of {target.__name__}.")
    # Of these alone: what else the function annotates may be imported for a type checker only.
    said = type("Annotated", (), {"__annotations__": annotations})
    hints = typing.get_type_hints(said, vars(sys.modules[target.__module__]))
    made = type(f"{target.__name__}_options", (base,), {"__annotations__": hints, **fields})
    return attrs.frozen(kw_only=True)(made)
