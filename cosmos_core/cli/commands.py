"""Commands that other distributions add to `cosmos`: entry points of the group `cosmos_core.commands`.

An entry point names a function as Typer takes it, or a `typer.Typer` application; one named `plugins.new` is
`cosmos plugins new`. Metadata is read only where a command is not one of the core's own, or where all are listed.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from glob import glob
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

import typer
from typer.core import TyperCommand, TyperGroup

from cosmos_core.errors import ConfigError, PluginError

GROUP: Final = "cosmos_core.commands"
_DEBUG: Final = "COSMOS_DEBUG"
_DISABLE: Final = "COSMOS_DISABLE_PLUGIN_AUTOLOAD"

RecipeFile = Annotated[Path | None, typer.Argument(metavar="[RECIPE]", help="A recipe, as a TOML file.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one key of the recipe; repeatable.")
]
RunName = Annotated[str | None, typer.Option("--name", metavar="NAME", help="Name of the run; short for run.name.")]


def refuse(data: Mapping[str, Any], error: ConfigError) -> None:
    """Refuse a recipe by what is wrong with its plugins, too."""
    from cosmos_core.plugins.recipe import check_plugins  # noqa: PLC0415 - where a recipe is refused

    check_plugins(data, error)


class OpenGroup(TyperGroup):
    """Commands of the core, and after them those that distributions add; a core command's name is never taken."""

    parent: ClassVar[str] = ""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of all commands, in the order of `--help`."""
        own = super().list_commands(ctx)
        added = {name.rpartition(".")[2] for name in installed_commands() if name.rpartition(".")[0] == self.parent}
        return [*own, *sorted(added - set(own))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a name, imported if a distribution adds it; None, or a PluginError that says how to get it."""
        if (own := super().get_command(ctx, cmd_name)) or "." in cmd_name:
            return own
        entry, typed = f"{self.parent}.{cmd_name}".strip("."), f"{self.parent} {cmd_name}".strip()
        if entries := installed_commands().get(entry):
            return _load(typed, entries)
        from cosmos_core.plugins.known import COMMANDS  # noqa: PLC0415 - where a command is missing

        if distribution := COMMANDS.get(entry):
            raise PluginError(f"cosmos {typed} comes with another distribution{_hidden()}: pip install {distribution}")
        return None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that arguments begin with, and they; of a name that is none, the nearest is told."""
        if args[0] not in self.commands and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            from cosmos_core.config.problems import nearest  # noqa: PLC0415 - where a command is missing
            from cosmos_core.plugins.known import COMMANDS  # noqa: PLC0415

            # Typer would look among the core's own alone.
            close = nearest(args[0], [*self.list_commands(ctx), *(() if self.parent else COMMANDS)])
            ctx.fail(f"No such command {args[0]!r}." + (f" Did you mean {close[0]!r}?" if close else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands with the first sentence of each."""
        described = {name: self.commands.get(name) or self.get_command(ctx, name) for name in self.list_commands(ctx)}
        TyperGroup(commands=described).format_commands(ctx, formatter)
        if not self.parent and "generate" not in described:
            formatter.write(f"\n  generate, chat, doctor and others: pip install cosmos-service-tools{_hidden()}\n")


class CommandGroup(OpenGroup):
    """All commands of `cosmos`."""

    core: ClassVar[Mapping[str, Callable[..., Any] | typer.Typer]] = {}

    def __init__(self, **arguments: Any) -> None:
        """Name and describe the core's commands; the options of one are read when it is called."""
        super().__init__(**arguments)
        _with_debug(self)
        for name, command in self.core.items():
            self.commands[name] = TyperCommand(name, help=_described(command), rich_markup_mode=None)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a name; one of the core's is built when it is asked for."""
        own = self.core.get(cmd_name)
        return _built(cmd_name, own) if own else super().get_command(ctx, cmd_name)


def _is_hiding() -> bool:
    return os.environ.get(_DISABLE, "") not in ("", "0")


def _hidden() -> str:
    return f" (unless {_DISABLE} hides it)" if _is_hiding() else ""


def is_debugging() -> bool:
    """True if tracebacks are wanted."""
    return os.environ.get(_DEBUG) == "1"


def _turn_on(is_wanted: bool) -> None:
    if is_wanted:
        os.environ[_DEBUG] = "1"


def _debug(
    debug: Annotated[
        bool,
        typer.Option(
            "--debug", callback=_turn_on, expose_value=False, help="Show tracebacks, here and in every process's log."
        ),
    ] = False,
) -> None:
    pass


@lru_cache(1)
def _debug_option() -> Any:
    application = typer.Typer(add_completion=False)
    application.command()(_debug)
    (option,) = typer.main.get_command(application).params
    return option


def _with_debug(command: Any) -> Any:
    """Give a command, and all below it, the option `--debug`: for this process and every one that it starts."""
    command.params.append(_debug_option())
    for each in getattr(command, "commands", {}).values():
        _with_debug(each)
    return command


def installed_commands() -> Mapping[str, tuple[tuple[str, str], ...]]:
    """Name of each added command, with the distributions that add it and the `module:object` that each names."""
    if _is_hiding():
        return {}
    return _added(tuple(dict.fromkeys(sys.path)))


@lru_cache(1)
def _added(folders: tuple[str, ...]) -> Mapping[str, tuple[tuple[str, str], ...]]:
    found: dict[str, tuple[tuple[str, str], ...]] = {}
    for distribution, name, value in _entries(folders):
        if distribution not in {known for known, _ in found.get(name, ())}:
            found[name] = (*found.get(name, ()), (distribution, value))
    return found


def _entries(folders: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    # `importlib.metadata` takes longer to import than `cosmos --help` may take.
    for folder in folders:
        # `Path.glob` takes three times as long.
        for file in glob("*.dist-info/entry_points.txt", root_dir=folder or "."):  # noqa: PTH207
            text = Path(folder, file).read_text(encoding="utf-8", errors="replace")
            _, _, section = text.partition(f"[{GROUP}]")
            for line in section.partition("\n[")[0].splitlines():
                name, equals, value = line.partition("=")
                if equals and not line.startswith(("#", ";")):
                    yield file.partition("-")[0].replace("_", "-"), name.strip(), value.strip()


def _load(name: str, entries: tuple[tuple[str, str], ...]) -> Any:
    try:
        command = _imported(name, entries)
    except PluginError as error:
        # The others are listed all the same; it fails when it is called.
        command = _failing(error)
    return _built(name, command)


def _described(command: Callable[..., Any] | typer.Typer) -> str | None:
    if isinstance(command, typer.Typer):
        return inspect.getdoc((command.registered_callback or command.registered_commands[0]).callback)
    return inspect.getdoc(command)


def _built(name: str, command: Callable[..., Any] | typer.Typer) -> Any:
    if isinstance(command, typer.Typer):
        return _with_debug(typer.main.get_command(command))
    application = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    application.command(name, context_settings={"help_option_names": ["-h", "--help"]})(command)
    return _with_debug(typer.main.get_command(application))


def _imported(name: str, entries: tuple[tuple[str, str], ...]) -> Any:
    if len(entries) > 1:
        rivals = " and by ".join(distribution for distribution, _ in entries)
        raise PluginError(f"cosmos {name}: provided by {rivals}; uninstall one of them")
    distribution, value = entries[0]
    module, _, attribute = value.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except Exception as error:
        raise PluginError(
            f"cosmos {name}: {value} of the distribution {distribution} cannot be imported: "
            f"{type(error).__name__}: {error}"
        ) from error


def _failing(error: PluginError) -> Callable[[], None]:
    def fail() -> None:
        raise error

    fail.__doc__ = str(error).partition(": ")[2]
    return fail
