import io
import subprocess
import sys

import pytest

from cosmos_core.cli import main as cli
from cosmos_core.config.loading import load_recipe
from cosmos_core.errors import (
    ConfigError,
    DamagedCheckpointError,
    DataError,
    PluginNotFoundError,
    StorageError,
    TransportError,
)
from cosmos_core.observe import output
from cosmos_core.plugins.recipe import load_plugins

COMMANDS = (
    "run",
    "plan",
    "export",
    "status",
    "plugins",
    "version",
)


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    shown = capsys.readouterr()
    return ended.value.code, shown.out, shown.err


def test_help_imports_neither_torch_nor_anything_slow():
    code = (
        "import sys\nfrom cosmos_core.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "slow = {'torch', 'transformers', 'mlflow', 'rich', 'zmq', 'cattrs', 'matplotlib', 'packaging'}\n"
        "assert not slow & set(sys.modules), slow & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, done.stderr
    for command in COMMANDS:
        assert f"  {command} " in done.stdout


def test_every_command_teaches_by_example(capsys):
    for command in [name for name in COMMANDS if name not in ("plugins", "version")]:
        code, out, _ = call(capsys, command, "--help")
        assert code == 0
        assert f"  cosmos {command} " in out

    # The version is printed.
    from cosmos_core import __version__

    assert call(capsys, "version") == (0, f"{__version__}\n", "")


def test_an_error_is_one_message_and_a_code(capsys, monkeypatch):
    for error, code in [
        (ConfigError("a.b: bad"), 2),
        (PluginNotFoundError("no x"), 2),
        (DataError("rows.jsonl:3: no prompt"), 3),
        (StorageError("s3://x: refused"), 3),
        (DamagedCheckpointError("step-3"), 3),
        (TransportError("port"), 1),
    ]:

        def fail(*_arguments, error=error, **_options):
            raise error

        monkeypatch.setattr("cosmos_core.config.loading.load_recipe", fail)
        assert call(capsys, "plan", "x.toml") == (code, "", f"cosmos: {error}\n")

    # Debug shows the traceback, of every command and wherever it is asked for.
    def fail(*_arguments, **_options):
        raise ConfigError("a.b: bad")

    monkeypatch.setattr("cosmos_core.config.loading.load_recipe", fail)
    monkeypatch.setattr("cosmos_core.plugins.discovery.discover", fail)
    for arguments in (["plan", "x.toml", "--debug"], ["--debug", "plan", "x.toml"], ["plugins", "list", "--debug"]):
        monkeypatch.setenv("COSMOS_DEBUG", "")
        with pytest.raises(ConfigError):
            cli.main(arguments)


def test_ctrl_c_before_anything_runs_is_one_line(capsys, monkeypatch):
    def interrupt(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr("cosmos_core.config.loading.load_recipe", interrupt)
    assert call(capsys, "run", "x.toml") == (130, "", "cosmos: stopped by Ctrl-C\n")


def test_ctrl_c_while_it_is_imported_is_one_line():
    program = """
import signal, sys
class Dying:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
class Interrupt:
    def find_spec(self, name, *_):
        if name == "typer":
            Dying()
sys.meta_path.insert(0, Interrupt())
from cosmos_core.cli.main import main
main(["version"])
"""
    # Python makes a RuntimeError of what is raised while a class is made.
    making = program.replace("Dying()", "type('Made', (), {'x': type('N', (), {'__set_name__': Dying.__del__})()})")
    for each in (program, making.replace("__del__(self)", "__del__(*_)")):
        ended = subprocess.run([sys.executable, "-c", each], capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "cosmos: stopped by Ctrl-C\n")


def test_all_that_can_be_known_of_a_wrong_recipe_is_told_at_once(capsys, tmp_path):
    recipe = tmp_path / "wrong.toml"
    (tmp_path / "failing.py").write_text("import nothing_of_the_kind")
    plugins = """
        algorithm = { plugin = "grpoo", options = { clip = 1 } }
        dataset = { plugin = "mixture", options = { parts = [{ plugin = "arithmetic", options = { rows = 3 } }] } }
        reward = [{ plugin = "mathh" }, { plugin = "length", options = { targt = 4 } }]
        model = { plugin = "qwen", config = {} }
        launch = { launcher = "slrm" }
        tracking = { hooks = ["mlflw"] }
        policy = { prompts_per_step = 2, optimizer = { lr = 1e-3 } }
        """
    names = ["algorithm.plugin: no algorithm plugin named 'grpoo'", "reward.0.plugin: no reward plugin named 'mathh'"]
    names += ["tracking.hooks: no hook plugin named 'mlflw'"]
    more = ["run.stepz: unknown option", "run.steps: required", "tracking.hooks.1: expected a string, got {"]
    more += [
        "dataset.options.parts.0.options.rows: unknown option",
        "dataset.options.parts.1.plugin: no dataset plugin named",
    ]
    more += ["reward.1.options.targt: unknown option; did you", f"reward plugin 'x' of {tmp_path}/failing.py: line 1"]
    more += ["rollout.engine.options.slotz: unknown option", "launch.options.x: unknown option"]
    worse = f"{plugins}\n[run]\nname = 'a'\nstepz = 3\n[rollout.engine.options]\nslotz = 1"
    for good, bad in (
        ("}] } }", '}, { plugin = "jsnl" }] } }'),
        ('launcher = "slrm"', "options = { x = 1 }"),
        ('"mlflw"', '"mlflw", { name = "mlflow" }'),
        ("targt = 4 } }", 'targt = 4 } }, { plugin = "./failing.py:x" }'),
    ):
        worse = worse.replace(good, bad)
    recipe.write_text(worse)
    code, _, told = call(capsys, "plan", str(recipe))
    found = told.removeprefix("cosmos: ").splitlines()
    assert (code, len(found)) == (2, 12)
    for expected in (*names, *more):
        assert sum(line.startswith(expected) for line in found) == 1, expected

    # Where all keys are known, planning tells names with options, and options of known names together.
    plugins += "run = { name = 'a', steps = 3 }"
    for wrong, error, number in (("", PluginNotFoundError, 6), ("known", ConfigError, 3)):
        for typed, meant in (("grpoo", "grpo"), ("mathh", "math"), ("slrm", "local"), ("mlflw", "mlflow")):
            plugins = plugins.replace(typed, meant) if wrong else plugins
        recipe.write_text(plugins)
        with pytest.raises(error) as caught:
            load_plugins(load_recipe(recipe))
        assert len(str(caught.value).splitlines()) == number


def test_options_reach_the_recipe(capsys, monkeypatch):
    seen = {}

    def load(path, *, overrides, selections, refuse):
        seen.update(path=path, overrides=overrides, selections=selections)
        raise ConfigError("enough")

    monkeypatch.setattr("cosmos_core.config.loading.load_recipe", load)
    chosen = ("--algorithm", "grpo", "--reward", "math", "--environment", "e")
    call(capsys, "run", *chosen, "--set", "run.steps=3", "--name", "123")
    assert seen == {
        "path": None,
        "overrides": ["run.steps=3", 'run.name="123"'],
        "selections": {"algorithm": "grpo", "reward": "math", "environment": "e"},
    }


def test_what_is_asked_for_wrongly_is_said(capsys, tmp_path):
    # Nothing to run says what to give.
    code, _, err = call(capsys, "run")
    assert code == 2
    assert "give a recipe, or --model" in err

    # Resume takes no other argument.
    code, _, err = call(capsys, "run", "--resume", str(tmp_path), "--name", "other")
    assert code == 2
    assert "--resume goes on with the run's own recipe" in err
    code, _, err = call(capsys, "run", "--resume", str(tmp_path), "--reward", "./late.py:short")
    assert (code, "(a mended file: --set reward.N.plugin=FILE.py:NAME)" in err) == (2, True)
    code, _, err = call(capsys, "run", "--from", "previous")
    assert (code, "no run is given; add --resume RUN" in err) == (2, True)

    # Resuming what is no run says so.
    code, _, err = call(capsys, "run", "--resume", str(tmp_path))
    assert code == 2
    assert "not the folder of a run" in err

    # A wrong option is an error of usage.
    code, _, err = call(capsys, "run", "--sett", "a=1")
    assert code == 2
    assert "--sett" in err


def test_what_goes_to_a_pipe_is_not_folded_to_a_terminal(monkeypatch):
    for columns, width in [(None, 160), ("100", 100)]:
        monkeypatch.delenv("COLUMNS", raising=False)
        if columns is not None:
            monkeypatch.setenv("COLUMNS", columns)
        monkeypatch.setattr("sys.stdout", io.StringIO())
        assert output.console().width == width
