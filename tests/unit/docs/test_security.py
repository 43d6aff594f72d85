"""What the security model says of the code holds for all of the core and of the first-party plugins."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[3]
SOURCES = [
    path
    for folder in (ROOT / "cosmos_core", *ROOT.glob("plugins/*/*/cosmos_*"))
    for path in sorted(folder.rglob("*.py"))
]
UNPICKLES = ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml")
RUNS = ("eval", "exec", "compile", "__import__")

ALLOWED = {
    # Writes a manifest, and reads none.
    ("plugins/launchers/kubernetes/cosmos_launcher_kubernetes/manifest.py", "import yaml"),
    # Reads the description of a checkpoint, with stand-ins only.
    ("cosmos_core/policy/checkpoints/reader.py", "import pickle"),
    # Runs what a model wrote, in a process that has given up everything else: it is what this reward is for.
    ("plugins/rewards/code/cosmos_reward_code/cases.py", "compile(…)"),
    ("plugins/rewards/code/cosmos_reward_code/confinement/program.py", "compile(…)"),
    ("plugins/rewards/code/cosmos_reward_code/confinement/program.py", "exec(…)"),
    # What processes that a test forked send it.
    ("cosmos_core/testing/worlds.py", "torch.load without weights_only"),
    # Makes stand-ins of what a pickle of an array names, and calls none of it.
    ("plugins/datasets/world/cosmos_dataset_world/clips/pickles.py", "import pickle"),
}


def name_of(node):
    """`a.b.c` of an expression; empty if it is none."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def sins(tree):
    """What in a module could make code of data, or of the files in the current folder."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (f"import {each.name}" for each in names if each.name.partition(".")[0] in UNPICKLES)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in UNPICKLES:
                yield f"import {module}"
            case ast.List(elts=[program, ast.Constant(value=first), *_]) if (
                name_of(program) == "sys.executable" and first != "-P"
            ):
                yield "a process that imports from the current folder"
            case ast.Call(func=ast.Name(id=name)) if name in RUNS:
                yield f"{name}(…)"
            case ast.Call(func=function, keywords=keywords):
                given = {each.arg: ast.unparse(each.value) for each in keywords}
                if name_of(function) == "torch.load" and given.get("weights_only") != "True":
                    yield "torch.load without weights_only"
                if given.get("shell") == "True" or name_of(function) in ("os.system", "os.popen"):
                    yield "a shell"
                if given.get("allow_pickle") == "True" or given.get("trust_remote_code") == "True":
                    yield "trust in what is loaded"


def test_data_never_becomes_code():
    found = {
        (path.relative_to(ROOT).as_posix(), sin) for path in SOURCES for sin in sins(ast.parse(path.read_text("utf-8")))
    }
    assert len(SOURCES) > 150
    assert found == ALLOWED


def test_each_way_is_noticed_and_what_only_looks_like_it_is_let_be():
    for code, sin in [
        ("import pickle", "import pickle"),
        ("from yaml import load", "import yaml"),
        ("eval(text)", "eval(…)"),
        ("torch.load(file)", "torch.load without weights_only"),
        ("torch.load(file, weights_only=False)", "torch.load without weights_only"),
        ("subprocess.run(line, shell=True)", "a shell"),
        ("os.system(line)", "a shell"),
        ('[sys.executable, "-m", "name"]', "a process that imports from the current folder"),
        ("AutoModel.from_pretrained(path, trust_remote_code=True)", "trust in what is loaded"),
    ]:
        assert list(sins(ast.parse(code))) == [sin]
    for code in ["module.eval()", "torch.load(file, weights_only=True)", "re.compile(text)", '[sys.executable, "-P"]']:
        assert list(sins(ast.parse(code))) == []
