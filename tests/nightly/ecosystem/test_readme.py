"""The commands of the README, run as they are printed, from top to bottom, in one copy of the checkout.

What differs from a reader's terminal, so that it takes minutes and changes nothing outside the copy:

- The copy's `.venv` lends the packages of the environment that runs the tests: `pip install` finds most of what it
  needs there, and what it adds goes into the copy. `make` finds `.venv` made.
- Recipes, also those that commands write, have few steps and few held-out prompts.
- `make test` and `make test-all`, which run this test, only say what they would do.
- A command that asks is answered. One that goes on until Ctrl-C gets it after a while; one in the background is waited
  for until it is at work, as a reader would.
- A command whose comment says that it `needs` something is not run. GSM8K's files, which need the hub, are rows of the
  same fields.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import attrs
import pytest

from tests.commandline import CommandLine
from tests.nightly.ecosystem.environment import CleanEnvironment
from tests.nightly.ecosystem.follow import Command, File, Step, perform
from tests.nightly.ecosystem.wheels import ROOT, Wheelhouse

PAGE: Final = ROOT / "README.md"
NEEDS: Final = ("a GPU", "vLLM", "Slurm", "the hub")

_COMMENT: Final = re.compile(r"(?:^|\s)# (?P<text>.*)$")
_FILE: Final = re.compile(r"```python\n# (?P<path>\w+\.py)\n")
_WORK: Final = "recipes/data/word-problems.jsonl"
_ANSWERS: Final = f"runs/arithmetic/export\n{_WORK}\n\n\n\n\n"
_CUT: Final = {"steps": 4, "prompts": 8, "interval": 2}
_CTRL_C_AFTER_S: Final = 20
_AT_WORK_WITHIN_S: Final = 120


def read(text: str) -> list[Step]:
    """The files and the commands that the page prints, in order; a command is an indented line."""
    found: list[Step] = []
    fenced, path, body = False, "", list[str]()
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if line.startswith("```"):
            if path:
                found.append(File(line=number, path=path, text="".join(f"{each}\n" for each in body)))
            named = _FILE.match("\n".join([line, *lines[number : number + 1], ""]))
            fenced, path, body = not fenced, named["path"] if named else "", []
        elif fenced:
            body.append(line)
        elif line.startswith("    "):
            found.append(Command(line=number, text=line.strip(), printed=None))
    return found


def comment(command: Command) -> str:
    found = _COMMENT.search(command.text)
    return found["text"] if found else ""


def needs(command: Command) -> str | None:
    """What a command's comment says that it needs."""
    found = re.search(r"\bneeds (.+)", comment(command))
    return found[1] if found else None


def in_minutes(step: Step) -> Step:
    """The step as the copy takes it: see the module's list."""
    if isinstance(step, File):
        return step
    said, bare = comment(step), _COMMENT.sub("", step.text).strip()
    if needs(step):
        text = f"echo not run: {shlex.quote(bare)}"
        if (made := Path(bare.split()[-1])).name == "gsm8k":
            copies = "; ".join(f"cp {_WORK} {made}/{name}.jsonl" for name in ("train-2000", "test"))
            text = f"mkdir -p {made}; {copies}"
    elif bare in ("make test", "make test-all"):
        text = bare.replace("make", "make --dry-run") + " >dry-run.txt"
    elif said.startswith("asks"):
        text = f"printf {shlex.quote(_ANSWERS)} | script --quiet --return --command {shlex.quote(bare)} /dev/null"
    elif said.startswith("until Ctrl-C"):
        text = f"timeout --signal=INT --kill-after=60 {_CTRL_C_AFTER_S} {bare} || test $? = 124"
    elif bare.endswith("&"):
        seen = "for _ in $(seq {0}); do grep -q training background.txt && break; sleep 1; done"
        text = f"{bare[:-1]} >background.txt 2>&1 &\n{seen.format(_AT_WORK_WITHIN_S)}\ngrep training background.txt"
    else:
        text = bare
    return attrs.evolve(step, text=f"{text}\n{_cut_recipes()}")


def _cut_recipes() -> str:
    cuts = "; ".join(f"s/^({key}) = [0-9]+/\\1 = {value}/" for key, value in _CUT.items())
    return (
        f"sed -Ei '{cuts}' *.toml recipes/*.toml recipes/wfm/*-tiny-*.toml recipes/reason/*-tiny.toml 2>/dev/null || :"
    )


def copy_checkout(copy: Path) -> Path:
    """A checkout of what is to be tested, with an environment that lends the packages of this one; its commands."""
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
    ).stdout.decode()
    for name in filter(None, files.split("\0")):
        if (ROOT / name).exists() and not name.startswith(".venv"):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", copy / ".venv"], check=True)
    (site,) = (copy / ".venv" / "lib").glob("python*/site-packages")
    (lent,) = Path(sys.prefix, "lib").glob("python*/site-packages")
    ours = sorted(path.parent for path in [copy / "pyproject.toml", *copy.glob("plugins/*/*/pyproject.toml")])
    # Read in order, and before the lent packages: these are editable, and would bring the sources of their checkout.
    (site / "0.pth").write_text(
        "".join(f"{path}\n" for path in ours) + f"import site; site.addsitedir({str(lent)!r})\n"
    )
    commands = copy / ".venv" / "bin"
    for script in Path(sys.prefix, "bin").iterdir():
        if not (commands / script.name).exists() and script.is_file():
            text = script.read_bytes()
            old, new = f"#!{sys.prefix}/bin/".encode(), f"#!{commands}/".encode()
            if text.startswith(old):
                (commands / script.name).write_bytes(text.replace(old, new, 1))
                (commands / script.name).chmod(0o755)
    for mark in (".python", ".installed", ".developing"):
        (copy / ".venv" / mark).touch()
    return commands


def test_a_command_that_is_not_run_says_what_it_needs() -> None:
    text = PAGE.read_text(encoding="utf-8")
    steps = read(text)
    commands = [step for step in steps if isinstance(step, Command)]
    assert [step.path for step in steps if isinstance(step, File)] == ["my_rewards.py", "brief.py"]
    assert len(commands) > 60
    assert commands[0].text.startswith("pip install")
    told = [need for command in commands if (need := needs(command))]
    assert 0 < len(told) < 8
    assert [need for need in told if not need.startswith(NEEDS)] == []
    assert [need for need in NEEDS if f"`needs {need}`" not in text] == []


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_readme_runs_as_printed() -> None:
    steps = [in_minutes(step) for step in read(PAGE.read_text(encoding="utf-8"))]
    with tempfile.TemporaryDirectory(prefix="cosmos-readme-") as folder:
        copy = Path(folder, "cosmos-core")
        commands = copy_checkout(copy)
        variables = CleanEnvironment(folder=copy, wheels=Wheelhouse(folder=copy / "dist")).environment
        del variables["PIP_CONSTRAINT"]
        place = os.pathsep.join([str(commands), variables["PATH"]])
        settings = {"PATH": place, "TERM": "dumb"}
        try:
            begun = Command(line=0, text=_cut_recipes(), printed=None)
            perform(PAGE, [begun, *steps], copy, {**variables, **settings}, timeout_s=2300.0)
        finally:
            left = CommandLine(copy).left_behind()
            for process in left:
                process.kill()
        assert not left, f"processes left behind: {left}"
