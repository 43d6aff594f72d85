"""The questions of `cosmos init`: what is not given is asked for on a terminal, or detected."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import attrs
import typer
from rich.console import Console

from cosmos_core.config.loading import load_recipe
from cosmos_core.devices import gpus, visible_gpus
from cosmos_core.errors import ConfigError, CosmosError
from cosmos_core.plugins.choice import choose
from cosmos_core.plugins.discovery import discover
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import AlgorithmCapabilities, AlgorithmContext
from cosmos_service_tools.checkpoint import Checkpoint, look_at_model, relative
from cosmos_service_tools.columns import Columns, described, read_columns, reward_for
from cosmos_service_tools.draft import Choice, Hardware, write
from cosmos_service_tools.rows import Data, look_at_data

_T = TypeVar("_T")
_NEEDS: Final = {
    "rollouts": "a column of prompts (prompt, question, problem, instruction …) or of chats (messages)",
    "demonstrations": "a prompt and a completion (completion, response, output, answer …), or chats that end with the "
    "assistant's turn",
    "preferences": "`chosen` and `rejected`, beside a prompt",
}
_PIPE_COLUMNS: Final = 160
_FUNCTION: Final = re.compile(r".+\.py:\w+")


@attrs.frozen(kw_only=True)
class Answers:
    """What was given on the command line; None: not given."""

    model: str | None = None
    data: str | None = None
    task: str | None = None
    hardware: str | None = None
    reward: str | None = None


class _Questions:
    """Asks for what is not given, or takes defaults, or collects what is missing for one refusal."""

    def __init__(self, *, takes_defaults: bool, is_terminal: bool) -> None:
        self._takes_defaults = takes_defaults
        self.asks = is_terminal and not takes_defaults
        self.missing: list[str] = []

    def answer(
        self, option: str, question: str, given: str | None, default: str | None, use: Callable[[str], _T]
    ) -> _T | None:
        """Use what is given, the default, or what is typed, until it is usable; None if the option is missing."""
        if given is not None:
            return use(given)
        if not self.asks:
            if default is not None and self._takes_defaults:
                return use(default)
            self.missing.append(f"{option} (such as {default})" if default else option)
            return None
        while True:
            try:
                return use(typer.prompt(question, default=default))
            except CosmosError as error:
                typer.echo(str(error))

    def refuse_missing(self) -> None:
        """Raise a ConfigError that names the options without which nothing can be written, if there are any."""
        if self.missing:
            hint = "" if self._takes_defaults else ", or --yes for what is detected"
            raise ConfigError(f"no terminal to ask at; give {', '.join(self.missing)}{hint}")


def is_terminal() -> bool:
    """True if somebody can be asked."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def ask(path: Path, given: Answers, *, takes_defaults: bool) -> Choice:
    """Ask for everything that a recipe is written from.

    Raises:
        ConfigError: The file is there, an answer cannot be used, or is missing where nobody can be asked.
    """
    if path.suffix != ".toml" or path.exists():
        fault = "there already; choose another PATH, or remove it" if path.exists() else "a recipe's name ends in .toml"
        raise ConfigError(f"{path}: {fault}")
    asked = _Questions(takes_defaults=takes_defaults, is_terminal=is_terminal())
    checkpoint = asked.answer("--model", "Model (a folder, or a name on the Hub)", given.model, None, look_at_model)
    question = "Data (a file, a folder, or a name on the Hub)"
    data = asked.answer("--data", question, given.data, None, lambda name: look_at_data(name, path))
    if checkpoint is None or data is None:
        # They have defaults once there are rows; those who add one option should not be told of the next.
        both = {"--task": given.task, "--hardware": given.hardware}
        asked.missing += [option for option, answer in both.items() if answer is None and not takes_defaults]
        asked.refuse_missing()
    assert checkpoint is not None
    assert data is not None
    columns = read_columns(data.rows)
    number = "" if data.num_rows is None else f", {data.num_rows} rows"
    typer.echo(f"Columns: {described(data.rows)}{number}")
    task = asked.answer(
        "--task",
        "Task (an algorithm: sft, grpo, dpo, …)",
        given.task,
        _task(columns, data, given),
        lambda name: _Task.of(name, columns, data),
    )
    question = "Hardware (cpu, gpu, or a number of GPUs)"
    hardware = asked.answer("--hardware", question, given.hardware, _here(), _hardware)
    reward = None if task is None else _scored(asked, task, columns, data, given.reward)
    asked.refuse_missing()
    assert task is not None
    assert hardware is not None
    return Choice(
        path=path,
        checkpoint=_placed(checkpoint, path),
        data=data,
        columns=columns,
        task=task.name,
        source=task.capabilities.source,
        hardware=hardware,
        reward=reward,
        tables=task.tables,
    )


def _scored(asked: _Questions, task: _Task, columns: Columns, data: Data, given: str | None) -> str | None:
    """The reward, which is asked for where the task learns from one; None where it does not."""
    if task.capabilities.source != "rollouts" or not task.capabilities.needs_rewards:
        if given is not None:
            raise ConfigError(f"--reward {given}: {task.name} learns from no rewards; leave it out")
        return None
    likely = None if columns.reference is None else reward_for([row[columns.reference] for row in data.rows])
    if likely is None and given is None and not asked.asks:
        raise ConfigError(_no_reward(task.name, columns))
    return asked.answer("--reward", "Reward (a plugin)", given, likely, _reward)


def _placed(checkpoint: Checkpoint, path: Path) -> Checkpoint:
    local = Path(checkpoint.path).expanduser().is_dir()
    return attrs.evolve(checkpoint, path=relative(checkpoint.path, path)) if local else checkpoint


@attrs.frozen(kw_only=True)
class _Task:
    name: str
    capabilities: AlgorithmCapabilities
    tables: tuple[str, ...]

    @classmethod
    def of(cls, name: str, columns: Columns, data: Data) -> _Task:
        """Look at an algorithm; a CosmosError says that it is not installed, or that the rows do not feed it."""
        plugins = PluginSet.load([("algorithm", name)])
        capabilities: AlgorithmCapabilities = plugins.provider("algorithm", name).capabilities
        if "tokens" not in capabilities.payload_kinds:
            raise ConfigError(f"--task {name}: for world models; `cosmos recipes list` has recipes of them (wfm/…)")
        if not columns.feed(capabilities.source):
            raise ConfigError(
                f"--task {name}: learns from {capabilities.source}, which need {_NEEDS[capabilities.source]}; the rows "
                f"have {described(data.rows)}"
            )
        context = AlgorithmContext(group_size=8, temperature=1.0, max_units=64, max_staleness=2)
        algorithm: Any = plugins.create("algorithm", name, {}, context, "algorithm.options")
        roles = [role for role in algorithm.consults if role != "average"]
        if "teacher" in roles:
            raise ConfigError(
                f"--task {name}: needs a teacher, for which there is no question; start from "
                "`cosmos recipes show distill-arithmetic`"
            )
        return cls(
            name=name, capabilities=capabilities, tables=(*roles, *(["critic"] if algorithm.needs_critic else []))
        )


def _task(columns: Columns, data: Data, given: Answers) -> str | None:
    """The likeliest task; a ConfigError says that the columns fit none, unless one is given."""
    if columns.task is None and given.task is None and not (columns.has_prompt and given.reward):
        raise ConfigError(
            f"the columns fit no task: {described(data.rows)}; wanted are a prompt and a completion, or chats in "
            "messages (sft), a prompt and an answer (grpo), chosen and rejected, as whole chats or beside a prompt "
            "(dpo), or a prompt and --reward"
        )
    return columns.task or "grpo"


def _no_reward(task: str, columns: Columns) -> str:
    seen = (
        "the rows have no column of answers"
        if columns.reference is None
        else f"the answers in {columns.reference!r} are too long to be compared"
    )
    names = ", ".join(record.name for record in discover("reward"))
    return f"--reward: {task} learns from rewards, and {seen}; give one of {names or 'none that is installed'}"


def _reward(name: str) -> str:
    """A reward that is installed, or a function in a file, which the plan looks at."""
    if not _FUNCTION.fullmatch(name):
        choose("reward", name, discover("reward"))
    return name


def _here() -> str:
    return str(len(visible_gpus()) or "cpu")


def _hardware(text: str) -> Hardware:
    plain = text.strip().lower()
    match = re.fullmatch(r"(\d+)\s*(gpus?)?", "1" if plain == "gpu" else plain)
    if plain != "cpu" and (match is None or match[1] == "0"):
        raise ConfigError(f"--hardware {text}: give cpu, gpu, or a number of GPUs such as 8")
    number = int(match[1]) if match else 0
    # Where the driver says nothing their memory is assumed; `cosmos doctor` says why.
    here = gpus() if visible_gpus() else []
    least = min((gpu.memory_bytes for gpu in here), default=0)
    return Hardware(num_gpus=number, gpu_bytes=least, has_gpus=bool(visible_gpus()))


def make(choice: Choice, say: Callable[[str], None]) -> None:
    """Write the recipe and plan it; a model that cannot be reached is told, and nothing is planned then.

    Raises:
        ConfigError: The file cannot be written, or the recipe that was written does not plan.
    """
    from cosmos_core.run.plan import show_plan  # noqa: PLC0415 - what it needs takes a second to import

    path, text = choice.path, write(choice)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
    say(f"Wrote {path}: {choice.task} of {choice.checkpoint.path} on {choice.hardware}.\n\n{text}")
    if choice.checkpoint.unreached:
        say(
            f"Not planned: {choice.checkpoint.unreached}. Assumed of the model: about "
            f"{choice.checkpoint.num_parameters / 1e9:g} billion parameters, a chat template. Next, where it can be "
            f"reached: cosmos plan {path}"
        )
        return
    console = Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS)
    try:
        show_plan(load_recipe(path), path, console)
    except CosmosError as error:
        raise ConfigError(
            f"{path} is written, and does not plan yet; change it, then cosmos plan {path}\n{error}"
        ) from error
    say(f"Next: cosmos run {path}")
