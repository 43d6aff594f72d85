"""Every hook is documented with its exact signature, which is read here from the source of the specifications."""

import ast
import inspect
import re
from pathlib import Path

import attrs
import pluggy
from reference import hooks as hooks_reference
from reference import kinds as kinds_reference

from cosmos_core.control.machine.records import EvaluationRecord, StepRecord
from cosmos_core.protocols import KINDS, hooks
from cosmos_core.protocols.hooks import PROJECT
from cosmos_core.run.follower import evaluation_metrics, step_metrics

DOCS = Path(__file__).parents[3] / "docs"
PROVIDERS = {f"cosmos_{kind}": kind for kind in KINDS}
SPECS = {
    node.name: node
    for node in ast.parse(inspect.getsource(hooks)).body
    if isinstance(node, ast.FunctionDef) and any("hookspec" in ast.unparse(each) for each in node.decorator_list)
}
LIFECYCLE = sorted(SPECS.keys() - PROVIDERS.keys())
SNIPPET = re.compile(r"^% tested\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def signature(node):
    return f"def {node.name}({ast.unparse(node.args)}) -> {ast.unparse(node.returns)}"


def test_every_specification_is_one_of_both_sorts():
    assert len(LIFECYCLE) == 9
    assert PROVIDERS.keys() <= SPECS.keys()
    assert set(hooks_reference.lifecycle_hooks()) == set(LIFECYCLE)


def test_every_lifecycle_hook_has_a_page_with_its_signature_and_arguments():
    for name in LIFECYCLE:
        page = (DOCS / "plugins" / "hooks" / f"{name}.md").read_text()
        assert f"```{{lifecycle-hook}} {name}\n```" in page
        text = hooks_reference.one(name)
        assert f"```python\n{signature(SPECS[name])}\n```" in text
        assert ast.get_docstring(SPECS[name]) in text
    for name in LIFECYCLE:
        page = (DOCS / "plugins" / "hooks" / f"{name}.md").read_text()
        table = page.partition("| argument | what |")[2].partition("\n\n")[0]
        assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [each.arg for each in SPECS[name].args.args]


def test_every_page_shows_a_plugin_that_implements_its_hook():
    for name in LIFECYCLE:
        page = (DOCS / "plugins" / "hooks" / f"{name}.md").read_text()
        namespace = {"__name__": "docs"}
        exec(SNIPPET.findall(page)[0], namespace)
        (cls,) = (each for each in namespace.values() if inspect.isclass(each) and each.__module__ == "docs")
        manager = pluggy.PluginManager(PROJECT)
        manager.add_hookspecs(hooks)
        manager.register(object.__new__(cls), name="page")
        manager.check_pending()
        assert getattr(manager.hook, name).get_hookimpls()


def test_the_index_and_the_table_name_every_page_and_no_other():
    folder = DOCS / "plugins" / "hooks"
    index = (folder / "index.md").read_text()
    listed = index.partition("```{toctree}")[2].partition("```")[0].split()[1:]
    assert sorted(listed) == LIFECYCLE == sorted(page.stem for page in folder.glob("cosmos_*.md"))
    text = hooks_reference.reference()
    for name, node in SPECS.items():
        arguments = ", ".join(each.arg for each in node.args.args)
        row = f"| [`{name}`](/plugins/hooks/{name}.md) | `{arguments}` | {ast.get_docstring(node)} |"
        assert (row in text) == (name in LIFECYCLE)


def test_every_provider_hook_is_on_the_page_of_its_kind():
    for name, kind in PROVIDERS.items():
        assert f"```{{kind-reference}} {kind}\n```" in (DOCS / "plugins" / f"{kind}.md").read_text()
        assert f"```python\n@hookimpl\n{signature(SPECS[name])}\n```" in kinds_reference.reference(kind)


def test_the_metrics_of_an_evaluation_are_those_that_the_page_names():
    scored = EvaluationRecord(
        version=1, accuracy=0.5, reward=0.5, num_prompts=2, num_unscored=0, num_truncated=0, completions=()
    )
    measured = attrs.evolve(scored, accuracy=None, reward=None, loss=0.5, num_units=9)
    page = (DOCS / "plugins" / "hooks" / "cosmos_evaluation_finished.md").read_text()
    assert set(re.findall(r"`(heldout/\w+)`", page)) == {
        *evaluation_metrics(scored, "token"),
        *evaluation_metrics(measured, "token"),
    }
    assert '"heldout/accuracy"' in (DOCS / "plugins" / "hook.md").read_text()


def test_the_metrics_of_a_step_are_those_that_the_page_names():
    record = StepRecord(
        step=1,
        stage=0,
        attempt=1,
        skipped=False,
        num_groups=1,
        num_samples=2,
        num_units=9,
        reward=0.5,
        rewards={"NAME": 0.5},
        truncated=0.0,
        failed={"STATUS": 1},
        staleness_mean=0.0,
        staleness_max=0,
        metrics={"loss": 1.0, "grad_norm": 1.0, "lr": 1.0},
        dropped={"REASON": 1},
        settings={"KEY": 0.5, "TEXT": "no number"},
    )
    page = (DOCS / "plugins" / "hooks" / "cosmos_step_finished.md").read_text()
    table = page.partition("| metrics | what |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+/\w+)`", table)) == set(step_metrics(record))
