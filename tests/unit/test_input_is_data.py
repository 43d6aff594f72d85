"""What comes from outside is data: nothing in the sources unpickles it, evaluates it, or hands it to a shell."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for folder in ("cosmos_core", "plugins", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
    if "tests" not in path.parts
)

IMPORTS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"}
CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "numpy.fromregex",
    "pandas.read_pickle",
}

ALLOWED = {
    (
        "cosmos_core/policy/checkpoints/reader.py",
        "import pickle",
    ): "makes stand-ins, and calls nothing",
    ("cosmos_core/testing/worlds.py", "torch.load without weights_only=True"): "results of a test's own children",
    (
        "cosmos_core/policy/trial.py",
        "torch.distributed.all_gather_object, which pickles",
    ): "ranks of a trial, forked from the planner",
    (
        "plugins/datasets/world/cosmos_dataset_world/clips/pickles.py",
        "import pickle",
    ): "makes stand-ins, and calls nothing",
    ("plugins/rewards/code/cosmos_reward_code/cases.py", "call compile"): "to see whether tests are Python; never run",
    (
        "plugins/rewards/code/cosmos_reward_code/confinement/program.py",
        "call compile",
    ): "in a process that has confined itself",
    (
        "plugins/rewards/code/cosmos_reward_code/confinement/program.py",
        "call exec",
    ): "in a process that has confined itself",
    ("benchmarks/weights.py", "dist.all_gather_object, which pickles"): "ranks of a benchmark",
}
"""What is found all the same, and why it does no harm."""


def name_of(node: ast.expr) -> str:
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            return f"{name_of(node.value)}.{node.attr}"
    return ""


def is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def problems(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from (f"import {alias.name}" for alias in node.names if alias.name.split(".")[0] in IMPORTS)
            case ast.ImportFrom() if node.module and node.module.split(".")[0] in IMPORTS:
                yield f"import {node.module}"
            case ast.Call():
                yield from called(name_of(node.func), {each.arg: each.value for each in node.keywords})


def called(name: str, given: dict[str | None, ast.expr]) -> Iterator[str]:
    if name in CALLS or name.removeprefix("builtins.") in CALLS:
        yield f"call {name}"
    if name.endswith(("torch.load", "torch.jit.load")) and not is_true(given.get("weights_only")):
        yield f"{name} without weights_only=True"
    if name.endswith((".load", ".fromfile")) and is_true(given.get("allow_pickle")):
        yield f"{name} with allow_pickle"
    if is_true(given.get("trust_remote_code")):
        yield f"{name} with trust_remote_code=True, which only a recipe may say"
    if is_true(given.get("shell")):
        yield f"{name} with a shell"
    if name.endswith(("send_pyobj", "recv_pyobj", "broadcast_object_list", "all_gather_object", "gather_object")):
        yield f"{name}, which pickles"


def test_the_sources_treat_input_as_data():
    found = {
        (str(path.relative_to(ROOT)), problem)
        for path in SOURCES
        for problem in problems(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert len(SOURCES) > 300
    assert found == ALLOWED.keys()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("import pickle", "import pickle"),
        ("from pickle import loads", "import pickle"),
        ("x = eval(text)", "call eval"),
        ("import yaml\nyaml.load(f)", "call yaml.load"),
        ("torch.load(f)", "torch.load without weights_only=True"),
        ("torch.load(f, weights_only=False)", "torch.load without weights_only=True"),
        ("np.load(f, allow_pickle=True)", "np.load with allow_pickle"),
        ("A.from_pretrained(x, trust_remote_code=True)", "A.from_pretrained with trust_remote_code=True"),
        ("subprocess.run(x, shell=True)", "subprocess.run with a shell"),
        ("socket.recv_pyobj()", "socket.recv_pyobj, which pickles"),
    ],
)
def test_the_scan_sees_what_it_looks_for(line, problem):
    assert any(each.startswith(problem) for each in problems(ast.parse(line)))


@pytest.mark.parametrize(
    "line", ["torch.load(f, weights_only=True)", "re.compile(x)", "yaml.safe_load(f)", "m.eval()", "np.load(f)"]
)
def test_the_scan_passes_what_is_fine(line):
    assert not list(problems(ast.parse(line)))
