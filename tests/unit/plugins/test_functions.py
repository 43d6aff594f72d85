import asyncio
import re
from pathlib import Path

import attrs
import pytest

from cosmos_core.config.job import Job
from cosmos_core.config.loading import load_job, load_recipe
from cosmos_core.data import function
from cosmos_core.errors import ConfigError, DataError, PluginBrokenError, PluginNotFoundError
from cosmos_core.plugins.choice import choose
from cosmos_core.plugins.manifest import manifest
from cosmos_core.plugins.recipe import load_dataset, planned_dataset
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import Completion, DatasetContext, RewardContext, Score
from cosmos_core.rollout.rewards.worker import raised
from cosmos_core.run import folder
from cosmos_core.types import Array, Message, Payload, Prompt

REWARDS = """from __future__ import annotations
from cosmos_core.protocols import Provider, RewardCapabilities, hookimpl

def brevity(prompt, completion, reference, *, longest: int = 10):
    assert prompt == "Say it." and reference == "x"
    return 1 - len(completion) / longest

async def level(completion, difficulty, bonus=0.5):
    return {"score": difficulty + bonus, "level": difficulty}

def many(prompts, completions, difficulty):
    assert len(prompts) == len(completions) == len(difficulty)
    return [10.0 * len(completions) + each for each in difficulty]

def short_list(completions):
    return [1.0]

def leaves(completions): raise SystemExit(3)
def runs_out(completions): return next(each for each in completions if each == "there is none")
def nothing(completion): return None
def unnamed(completion): return {"value": 1.0}
def everything(completion, **columns): return {"score": 1.0, **columns}
def light(frames): return float(frames.mean())
def defaulted(completions, level=7): return [float(each) for each in level]
def as_array(completions): import numpy; return numpy.ones(len(completions))
def typed(completion: Unknown, *, longest: "int" = 3) -> Unknown: return float(longest)
def positional(*texts): return 1.0
def blind(prompt): return 1.0
def of_verl(data_source, solution_str, ground_truth, extra_info=None): return 1.0
def mixed(prompt, completions): return [1.0]
number = 3

class Longest:
    def __init__(self, context, *, most: int):
        self.name, self.most = context.name, most
    def score(self, completion):
        return min(len(completion.text), self.most)

class Empty:
    pass

class Own:
    def __init__(self, options, context): pass
    def score(self, completion): return 2.0

@hookimpl
def cosmos_reward():
    return Provider(create=Own, capabilities=RewardCapabilities(deterministic=False))
"""
PROMPT = Prompt(text="Say it.", reference="x", metadata={"difficulty": 2})
COMPLETION = Completion(prompt=PROMPT, text="hello")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(REWARDS)
    return path


def made(path, name, options=None, kind="reward", context=None):
    selection = f"{path}:{name}"
    plugins = PluginSet.load([(kind, selection)])
    return plugins.create(kind, selection, options or {}, context or RewardContext(name=name, seed=0))


def test_a_function_scores_by_the_names_it_takes(file):
    assert made(file, "brevity").score(COMPLETION) == 0.5
    assert made(file, "brevity", {"longest": 50}).score(COMPLETION) == 0.9
    assert asyncio.run(made(file, "level").score(COMPLETION)) == Score(value=2.5, details={"level": 2})
    everything = made(file, "everything").score(COMPLETION)
    assert everything.details == {"difficulty": 2, "prompt": "Say it.", "reference": "x"}
    frames = Payload(kind="media", arrays={"frames": Array(dtype="uint8", shape=(1, 2, 2, 3), data=bytes([7] * 12))})
    assert made(file, "light").score(Completion(prompt=PROMPT, text="", media=frames)) == 7.0
    assert made(file, "Longest", {"most": 3}).score(COMPLETION) == 3
    assert made(file, "cosmos_reward").score(COMPLETION) == 2.0
    assert made(file, "typed").score(COMPLETION) == 3.0  # what only a type checker knows is left alone


def test_a_function_of_lists_scores_what_arrives_together(file):
    async def scores(name, number):
        reward = made(file, name)
        return await asyncio.gather(*(reward.score(COMPLETION) for _ in range(number)), return_exceptions=True)

    assert asyncio.run(scores("many", 3)) == [32.0, 32.0, 32.0]
    assert asyncio.run(scores("defaulted", 2)) == [7.0, 7.0]
    assert asyncio.run(scores("as_array", 2)) == [1.0, 1.0]
    (first, _) = asyncio.run(scores("short_list", 2))
    assert "returned [1.0] for 2 completions" in str(first)
    (first,) = asyncio.run(scores("leaves", 1))
    assert isinstance(first, DataError)
    assert "the function raised SystemExit: 3" in str(first)
    (first,) = asyncio.run(asyncio.wait_for(scores("runs_out", 1), 5))
    line = next(number for number, text in enumerate(REWARDS.splitlines(), 1) if "runs_out" in text)
    assert raised(first).detail == f"RuntimeError: the call raised StopIteration (my_rewards.py:{line})"
    assert "return next(" in raised(first).trace


def test_what_a_function_lacks_is_said(file):
    with pytest.raises(
        DataError, match=r"takes 'difficulty', a column that the row does not have \(it has none\)"
    ) as lacking:
        made(file, "level").vet(Prompt(text="Say it."))
    assert "(a dataset function gives it as a key of the row)" in str(lacking.value)
    with pytest.raises(DataError, match="returned None: no score"):
        made(file, "nothing").score(COMPLETION)
    with pytest.raises(DataError, match=r"returned \{'value': 1.0\}, which has no 'score'"):
        made(file, "unnamed").score(COMPLETION)
    with pytest.raises(ConfigError, match="longst: unknown option; did you mean longest"):
        made(file, "brevity", {"longst": 3})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("brevty", "the file has nothing of that name; did you mean brevity?"),
        ("positional", r"it takes \*texts; a reward is called by names"),
        ("blind", "it takes prompt; a reward takes completion"),
        ("mixed", "names of one completion and of many"),
        ("number", "it is 3; name a function or a class"),
        ("Empty", "the class has no score, as a reward has"),
        ("Own", "the class is made of options, context"),
        ("of_verl", r"takes solution_str, as verl's rewards do; wrap it as docs/guides/from-verl\.md shows"),
    ],
)
def test_what_cannot_be_a_reward_is_refused(file, name, said):
    with pytest.raises(PluginBrokenError, match=said):
        made(file, name)


def test_a_file_that_is_no_module_is_refused(file):
    with pytest.raises(PluginNotFoundError, match=r"no such file .*my_reward\.py; did you mean .*my_rewards\.py\?"):
        made(file.with_name("my_reward.py"), "brevity")
    with pytest.raises(PluginNotFoundError, match="a model comes in a package"):
        made(file, "brevity", kind="model")
    with pytest.raises(
        PluginNotFoundError, match="start at the recipe's folder, and on the command line at the current"
    ):
        made(file.with_name("unlike.py"), "brevity")
    with pytest.raises(PluginNotFoundError, match=r"my_rewards\.py:NAME \(it has brevity, "):
        choose("reward", str(file), [])
    with pytest.raises(PluginNotFoundError, match=r"'\./notes\.txt:f': functions and classes are of a Python file, PA"):
        choose("reward", "./notes.txt:f", [])
    with pytest.raises(PluginNotFoundError, match=r"\./none\.py:NAME$"):
        choose("reward", "./none.py", [])
    for source, said in (
        ("x = = 1", "it is no Python: line 1"),
        ("\0", "it is no Python: source code string cannot contain null bytes"),
        ("\n1 / 0", "line 2 failed: ZeroDivisionError: division by zero"),
        ("import my_rewards", "a run keeps other.py alone: put both into one file"),
    ):
        other = file.with_name("other.py")
        other.write_text(source)
        with pytest.raises(PluginBrokenError, match=said):
            made(other, "brevity")


DATASETS = """import time
def pairs(*, number: int = 4):
    for each in range(number):
        yield {"prompt": f"What is {each}?", "reference": each, "level": each % 2}

def split(split, seed, directory):
    name = f"{split} {seed} {directory.name}"
    return [name, {"prompt": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}]

def bad():
    return [{"prompt": "a"}, {"question": "b"}]

def failing():
    yield "a"
    raise KeyError("b")

def numbers(): return [{"prompt": 3}]
def nothing(): pass
def endless(): return iter(lambda: time.sleep(0.001) or "a", None)
def strange(rows): return []
"""


def test_a_function_of_rows_is_a_dataset(tmp_path, monkeypatch, caplog):
    path = tmp_path / "rows.py"
    path.write_text(DATASETS)
    context = DatasetContext(seed=5, directory=tmp_path)

    def dataset(name, **options):
        return made(path, name, options, kind="dataset", context=context)

    rows = dataset("pairs", number=10, heldout_rows=2)
    assert (rows.size("train"), rows.size("heldout")) == (8, 2)
    assert rows.row("train", 0).metadata.keys() == {"level"}
    both = dataset("split")
    assert both.row("heldout", 0).text == f"heldout 5 {tmp_path.name}"
    assert both.row("train", 1) == Prompt(text=(Message(role="user", content="Hi"),), demonstration="Ho")
    with pytest.raises(DataError, match="bad:2: no field 'prompt'; it has 'question'"):
        dataset("bad")
    with pytest.raises(DataError, match=r"dataset function failing \(rows\.py:13\) failed: KeyError: 'b'"):
        dataset("failing")
    with pytest.raises(DataError, match="numbers:1: the prompt is 3, neither a text nor the turns of a chat"):
        dataset("numbers")
    with pytest.raises(
        DataError, match=r"dataset function nothing \(rows\.py:18\) returned None; it yields rows, or returns a list"
    ):
        dataset("nothing")
    monkeypatch.setattr(function, "_MOST", 100)
    monkeypatch.setattr(function, "_SILENT_S", 0.01)
    with pytest.raises(DataError, match=r"function endless \(rows\.py:19\) gives more than 100 rows, or never ends"):
        dataset("endless")
    told = r"reading rows of dataset function endless \(rows\.py:19\): \d+ so far, of 100 at most"
    assert re.search(told, caplog.text)
    with pytest.raises(DataError, match="gives the held-out rows itself"):
        dataset("split", heldout_rows=1)
    with pytest.raises(PluginBrokenError, match="it takes rows; it may take split, seed, directory"):
        dataset("strange")


UNSTEADY = """
import random, time
def drawn():
    yield from ("same", {"prompt": "same", "reference": random.random()})
def read(directory):
    yield (directory / "data").read_text()
ROWS = iter("ab")
def once(): return ROWS
def shared():
    row = {}
    for row["prompt"] in ("a", "b"):
        time.sleep(0.03)
        yield row
"""


def test_other_rows_in_a_second_call_or_in_another_process_are_refused(tmp_path, monkeypatch, caplog):
    (tmp_path / "rows.py").write_text(UNSTEADY)
    (tmp_path / "data").write_text("a")

    def job_of(*names):
        parts = ", ".join(f'{{plugin = "./rows.py:{name}", name = "{i}"}}' for i, name in enumerate(names))
        (tmp_path / "r.toml").write_text(RECIPE.replace('"jsonl"', f'"mixture"\noptions = {{parts = [{parts}]}}'))
        recipe = load_recipe(tmp_path / "r.toml")
        job = Job(run_id="r", directory=tmp_path, recipe_directory=tmp_path, recipe=recipe)
        return job, PluginSet.load([("dataset", "mixture")])

    second = r"drawn \(rows\.py:3\): its row 2 was .*reference=0\.\d+.*, and is .* called again"
    with pytest.raises(DataError, match=second):
        planned_dataset(*job_of("read", "drawn"))
    with pytest.raises(DataError, match=r"once \(rows\.py:8\): its row 1 was Prompt\(text='a', .*, and is no row"):
        planned_dataset(*job_of("once"))
    monkeypatch.setattr(function, "_SILENT_S", 0.01)
    with pytest.raises(DataError, match=r"shared \(rows\.py:9\) changes rows after it has given them, as one does"):
        planned_dataset(*job_of("shared"))
    told = [each for each in caplog.messages if "reading rows of dataset function shared" in each]
    assert len(told) == 2, "the second call is told, too"
    job, plugins = job_of("read", "read")
    dataset, digests = planned_dataset(job, plugins)
    planned = attrs.evolve(job, row_digests=digests)
    assert load_dataset(planned, plugins).size("train") == dataset.size("train") == 2
    with pytest.raises(DataError, match=r"^dataset: its rows are not those"):
        load_dataset(attrs.evolve(job, row_digests=(*digests, "more")), plugins)
    (tmp_path / "data").write_text("b")
    with pytest.raises(
        DataError, match=r"read \(rows\.py:5\): its rows are not those that the run was planned with: w"
    ):
        load_dataset(planned, plugins)


RECIPE = """
[run]
name = "r"
steps = 1
[model]
path = "m"
[algorithm]
plugin = "grpo"
[policy.optimizer]
lr = 1e-6
[dataset]
plugin = "jsonl"
[[reward]]
plugin = "./my_rewards.py:brevity"
[[reward]]
plugin = "./other/my_rewards.py:brevity"
name = "other"
"""


def test_a_run_keeps_copies_of_the_files_and_may_move(file, tmp_path):
    other = tmp_path / "other" / file.name
    other.parent.mkdir()
    other.write_text(f"{REWARDS}\ndef added(completion): return 1\n")
    (tmp_path / "r.toml").write_text(RECIPE)
    recipe = load_recipe(tmp_path / "r.toml")
    assert [each.label for each in recipe.reward] == ["brevity", "other"]
    job = Job(run_id="r", directory=tmp_path / "runs" / "r", recipe_directory=tmp_path, recipe=recipe)
    folder.create(job, tmp_path / "no-assets", {}, overwrite=False)
    file.unlink()
    other.unlink()
    moved = job.directory.rename(tmp_path / "moved")
    loaded = load_job(moved)
    plugins = PluginSet.load([("reward", each.plugin) for each in loaded.recipe.reward])
    assert len({entry["sha256"] for entry in manifest(plugins)}) == 2
    assert all(Path(each.plugin.rpartition(":")[0]).is_relative_to(moved) for each in loaded.recipe.reward)
    kept = Path(loaded.recipe.reward[0].plugin.rpartition(":")[0])
    source = kept.read_bytes()
    kept.write_text("def brevity(completion): return 1.0")
    with pytest.raises(PluginBrokenError, match="is not what the run was made with"):
        PluginSet.load([("reward", loaded.recipe.reward[0].plugin)])
    kept.write_bytes(source)
    folder.save(loaded)
    assert str(moved) not in (moved / "recipe.resolved.toml").read_text()
    assert load_recipe(moved / "recipe.resolved.toml").reward == loaded.recipe.reward
