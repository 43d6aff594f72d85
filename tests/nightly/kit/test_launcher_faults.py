"""Wrong launchers, each of which the kit must name."""

import pytest

from tests.nightly.kit.outcomes import unnamed, wrong

LAUNCHER = """
import os, random, shlex, signal, subprocess, sys, time
from cosmos_core.errors import ConfigError
from cosmos_core.protocols import Exit, LauncherCapabilities, Provider, hookimpl
from cosmos_core.protocols.launcher import Submission

class Launcher:
    def __init__(self, options, context):
        self.context, self.processes, self.told = context, {{}}, set()

    def check(self):
        {check}

    def command(self, spec):
        return [sys.executable, "-m", spec.module, *spec.arguments]

    def start(self, spec):
        self.context.logs.mkdir(parents=True, exist_ok=True)
        with self.log(spec.name).open("ab") as output:
            environment = {{**os.environ, **spec.environment}}
            {start}
        self.told.discard(spec.name)

    def log(self, name):
        return self.context.logs / f"{{name}}.log"

    def running(self):
        return [name for name, process in self.processes.items() if process.poll() is None]

    def exits(self):
        found = []
        for name, process in self.processes.items():
            code = process.poll()
            if code is not None and name not in self.told:
                {told}
                words = self.log(name).read_text().splitlines()
                found.append(Exit(name=name, code={code}, error=words[-1] if words else ""))
        return found

    def kill(self, name):
        {kill}

    def signal_stop(self):
        for process in self.processes.values():
            {ask}

    def stop(self, grace_s):
        self.signal_stop()
        deadline = time.monotonic() + grace_s
        while {wait} time.monotonic() < deadline:
            time.sleep(0.01)
        for process in self.processes.values():
            {end}
            process.wait(30)
{more}
@hookimpl
def cosmos_launcher():
    return Provider(create=Launcher, capabilities=LauncherCapabilities({capabilities}))
"""
RENDER = """
    def ready(self):
        raise ConfigError("there is no scheduler here")

    def submit(self, file):
        return "never"

    def render(self):
        {render}
        return Submission(name={name}, text={text})
"""
DEFAULTS = {
    "check": "pass",
    "start": "self.processes[spec.name] = subprocess.Popen("
    "self.command(spec), env=environment, stdout=output, stderr=subprocess.STDOUT)",
    "told": "self.told.add(name)",
    "code": "code",
    "kill": "self.processes[name].kill()",
    "ask": "process.terminate()",
    "wait": "self.running() and",
    "end": "process.kill()",
    "more": "",
    "capabilities": "",
}
SUBMITS = {"capabilities": "submits=True", "check": "raise ConfigError('not here')"}


def launcher(**lines):
    """A launcher with these lines instead of its own."""
    return LAUNCHER.format(**{**DEFAULTS, **lines})


def submitting(render="pass", name="'job.sh'", text="'run ' + shlex.quote(str(self.context.directory))", **lines):
    """One that renders with these lines."""
    return launcher(more=RENDER.format(render=render, name=name, text=text), **{**SUBMITS, **lines})


GOOD = {
    "starts-here": launcher(),
    "submits": submitting(),
    "does-both": submitting(check="pass"),
    "refuses-odd-names": submitting(
        render="if not self.context.name.isalpha(): raise ConfigError('a name of letters')",
        text="str(self.context.directory)",
    ),
}
PLANTED = {
    "splits-words": (
        launcher(
            start="self.processes[spec.name] = subprocess.Popen("
            "' '.join(self.command(spec)[:-2]), shell=True, env=environment, stdout=output)"
        ),
        "test_a_process_gets_its_words_and_its_end_is_told_once",
        "the process got the arguments ['a', 'b']; it should be ['a b', '', ",
    ),
    "forgets-the-environment": (
        launcher(start="self.processes[spec.name] = subprocess.Popen(self.command(spec), stdout=output)"),
        "test_a_process_gets_its_words_and_its_end_is_told_once",
        "the process got in its environment ''; it should be 'two words; $HOME'",
    ),
    "tells-twice": (
        launcher(told="pass"),
        "test_a_process_gets_its_words_and_its_end_is_told_once",
        "exits() tells each end once, and told again of ['rollout-0']",
    ),
    "hides-codes": (
        launcher(code="0"),
        "test_a_process_gets_its_words_and_its_end_is_told_once",
        "of a process that ended with code 7, exits() told 0",
    ),
    "keeps-no-output": (
        launcher(start=DEFAULTS["start"].replace("stdout=output", "stdout=subprocess.DEVNULL")),
        "test_a_process_gets_its_words_and_its_end_is_told_once",
        "of the process's last words, exits() told ''; it should be 'the probe was told to end so'",
    ),
    "kills-none": (
        launcher(kill="self.processes[name].terminate()"),
        "test_what_runs_is_listed_and_a_killed_one_is_told",
        "exits() did not tell within 3 s that rollout-0 had ended",
    ),
    "leaves-some": (
        launcher(end="return"),
        "test_stop_leaves_nothing_behind",
        "stop() left policy-0, rollout-0 alive",
    ),
    "never-asks": (
        launcher(ask="process.kill()"),
        "test_a_process_may_end_by_itself_when_it_is_asked_to",
        "stop() killed a process without asking it to end first (SIGTERM)",
    ),
    "waits-too-long": (
        launcher(wait=""),
        "test_a_process_may_end_by_itself_when_it_is_asked_to",
        "stop() waited for the whole grace although the process had ended",
    ),
    "gives-what-it-does-not-name": (
        submitting(name="'job.sh', variables=frozenset(['TOKEN'])"),
        "test_a_submission_brings_the_variables_that_it_says",
        "the submission says that it gives TOKEN, which its text does not name",
    ),
    "fails-to-check": (
        launcher(check="raise OSError('no cluster')"),
        "test_it_says_from_where_it_starts_or_submits",
        "check() raised OSError: no cluster; refuse with a ConfigError",
    ),
    "submits-in-secret": (
        submitting(capabilities="", check="pass"),
        "test_it_says_from_where_it_starts_or_submits",
        "it declares submits=False and has render(), ready() and submit()",
    ),
    "draws-lots": (
        submitting(text="f'{self.context.directory} {random.random()}'"),
        "test_a_submission_is_repeatable_and_finds_the_run",
        "render() gave another submission the second time",
    ),
    "writes": (
        submitting(render="self.context.logs.mkdir(parents=True, exist_ok=True)"),
        "test_a_submission_is_repeatable_and_finds_the_run",
        "the run's folder is made when it is submitted",
    ),
    "forgets-the-run": (
        submitting(text="'run it'"),
        "test_a_submission_is_repeatable_and_finds_the_run",
        "the submission does not mention the run's folder",
    ),
    "quotes-nothing": (
        submitting(text="f'cosmos run --resume {self.context.directory}'"),
        "test_a_submission_is_repeatable_and_finds_the_run",
        "is not quoted in the line 'cosmos run --resume ",
    ),
    **{
        f"quotes-{name}": (
            submitting(text=text),
            "test_a_submission_is_repeatable_and_finds_the_run",
            "is not quoted in the line ",
        )
        for name, text in {
            "spaces-alone": "'run ' + str(self.context.directory).replace(' ', chr(92) + ' ')",
            "all-but-line-breaks": "'run ' + ''.join("
            "each if each in '/' + chr(10) or each.isalnum() else chr(92) + each "
            "for each in str(self.context.directory))",
            "not-after-an-equals-sign": "f'cosmos run --run={self.context.directory}'",
            "once-of-two-times": "f'cp {shlex.quote(str(self.context.directory))} {self.context.directory}'",
            "in-double-quotes": "'run ' + chr(34) + str(self.context.directory).replace(chr(34), chr(92) + chr(34))"
            " + chr(34)",
            "nothing-of-a-comment": "f'#SBATCH --output={self.context.directory}' + chr(10)"
            " + f'run {shlex.quote(str(self.context.directory))}'",
        }.items()
    },
}


HANGING = ("kills-none", "waits-too-long")
SOON = """
@pytest.fixture(autouse=True)
def soon(self, monkeypatch):
    from cosmos_core.testing.conformance.launcher import Started
    begin = Started.start
    def start(self, *arguments):
        began = begin(self, *arguments)
        self.timeout_s = 3.0  # which the fault makes it wait for
        return began
    monkeypatch.setattr(Started, "start", start)
"""


@pytest.fixture(scope="module")
def outcomes(run_kit):
    modules = GOOD | {name: source for name, (source, *_) in PLANTED.items()}
    return run_kit("launcher", modules, body="grace_s = 0.2", bodies=dict.fromkeys(HANGING, SOON))


def test_good_launchers_pass(outcomes):
    assert wrong(outcomes, GOOD) == {}


def test_each_fault_is_named(outcomes):
    assert unnamed(outcomes, PLANTED) == {}
