"""Entry point of the reward `code`."""

from __future__ import annotations

import secrets
import signal
import time
from typing import Final, Literal

import attrs
from attrs import validators as check

from cosmos_core.config import option
from cosmos_core.protocols import Completion, Provider, Reward, RewardCapabilities, RewardContext, Score, hookimpl
from cosmos_core.types import Prompt
from cosmos_reward_code import sandbox
from cosmos_reward_code.cases import Asserts, Case, Dialogue, cases_of
from cosmos_reward_code.fences import program_in

_MEGABYTE: Final = 1 << 20
_SHOWN_CHARACTERS: Final = 200


@attrs.frozen(kw_only=True)
class CodeOptions:
    """Options of `code`."""

    credit: Literal["all", "fraction"] = option(
        "all", help="`all`: 1 where every test case passes, else 0; `fraction`: how many of them pass."
    )
    needs_fence: bool = option(
        True, help="Whether the program must stand between lines of ```; else a text without any is the program."
    )
    time_s: float = option(5.0, help="Seconds that one test case may take.", validator=check.gt(0.0))
    total_s: float = option(
        8.0,
        help="Seconds that all test cases of a row may take together, those that are left then count as failed; set it "
        "below `timeout_s` of the reward.",
        validator=check.gt(0.0),
    )
    cpu_s: float = option(
        5.0, help="Seconds of processor that one test case may take, rounded up.", validator=check.gt(0.0)
    )
    memory_mb: int = option(512, help="MiB of address space of a program.", validator=check.ge(64))
    output_kb: int = option(64, help="KiB that a program may print.", validator=check.ge(1))


class CodeReward:
    """The program of a completion is run against the test cases of its row."""

    def __init__(self, options: CodeOptions, context: RewardContext) -> None:  # noqa: ARG002 - the kind's signature
        self._options: Final = options
        self._limits: Final = sandbox.Limits(
            time_s=options.time_s,
            cpu_s=options.cpu_s,
            memory_bytes=options.memory_mb * _MEGABYTE,
            output_bytes=options.output_kb * 1024,
        )

    def load(self) -> None:
        """Find out whether programs can be confined here.

        Raises:
            ConfigError: They cannot.
        """
        sandbox.check(self._limits)

    def vet(self, prompt: Prompt) -> None:
        """Look at the test cases.

        Raises:
            DataError: The reference is none.
        """
        cases_of(prompt.reference)

    def score(self, completion: Completion) -> Score:
        """Run the program against each test case; against none after one that failed, if all must pass.

        Raises:
            DataError: The reference is no test case.
            PluginError: The program could not be confined, and was not run.
        """
        cases = cases_of(completion.prompt.reference)
        program = program_in(completion.own, needs_fence=self._options.needs_fence)
        if program is None:
            return Score(value=0.0, details={"passed": 0, "of": len(cases), "why": "no program"})
        passed, why = 0, ""
        end = time.monotonic() + self._options.total_s
        for case in cases:
            failure = self._failure(program, case, end - time.monotonic())
            passed += not failure
            why = why or failure
            if failure and self._options.credit == "all":
                break
        value = passed / len(cases) if self._options.credit == "fraction" else float(passed == len(cases))
        return Score(value=value, details={"passed": passed, "of": len(cases)} | ({"why": why} if why else {}))

    def _failure(self, program: str, case: Case, left_s: float) -> str:
        """The reason why the program fails the test case, with so many seconds left for all; empty if it passes."""
        if left_s <= 0.0:
            return "time limit of all test cases"
        limits = attrs.evolve(self._limits, time_s=min(self._limits.time_s, left_s))
        if isinstance(case, Dialogue):
            ran = sandbox.run(program, case.given, limits, name="__main__")
            if ran.ending != "finished":
                return _told(ran)
            is_right = _lines(ran.output) == _lines(case.expected)
            return "" if is_right else f"printed {ran.output!r:.{_SHOWN_CHARACTERS}}"
        # A program that ends on its own account has passed nothing: the end is reached by way of the asserts.
        reached = secrets.token_hex(16)
        ran = sandbox.run(_with_asserts(program, case, reached), "", limits, name="solution")
        if ran.ending == "finished" and ran.output.endswith(reached):
            return ""
        return "ended before the asserts" if ran.ending == "finished" else _told(ran)


def _with_asserts(program: str, case: Asserts, reached: str) -> str:
    return f"{program}\n{case.source}\n__import__('sys').stdout.write({reached!r})\n"


def _told(ran: sandbox.Ran) -> str:
    if ran.ending != "failed":
        return ran.ending
    if ran.code < 0:
        return f"signal {_named(-ran.code)}"
    lines = ran.errors.strip().splitlines()
    return lines[-1][-_SHOWN_CHARACTERS:] if lines else f"exit code {ran.code}"


def _named(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # signals of real time have names at both ends alone
        return str(number)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


@hookimpl
def cosmos_reward() -> Provider[Reward]:
    """Provide the code reward."""
    # Programs may draw random numbers, and come close to their time limit.
    return Provider(create=CodeReward, options=CodeOptions, capabilities=RewardCapabilities(deterministic=False))
