"""What a plan says and keeps of its data: rows left out, lengths, parts, pace."""

import io
import json
import re

import pytest
from rich.console import Console

from cosmos_core.config.loading import load_recipe
from cosmos_core.errors import ConfigError, DataError
from cosmos_core.protocols.dataset import Window
from cosmos_core.run.planning.parts import texts
from cosmos_core.run.planning.plan import make_plan
from cosmos_core.run.planning.tables import print_plan
from cosmos_core.types import Prompt

RECIPE = """
[run]
name = "data"
steps = 4

[model]
plugin = "qwen"
[model.config]
model_type = "qwen3"
hidden_size = 16
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 8
intermediate_size = 16
max_position_embeddings = 128
[model.tokenizer]
build = "byte-bpe"
vocab_size = 260

[algorithm]
plugin = "sft"

[policy]
prompts_per_step = 10
micro_batch_units = 128
optimizer = { lr = 1e-6 }

[evaluation]
prompts = 0

[dataset]
plugin = "curriculum"
LENGTHS
[dataset.options]
difficulty = "level"
start = 0.25
over = 0.5
pacing = "linear"
num_windows = 2
[dataset.options.part]
plugin = "jsonl"
[dataset.options.part.options]
train = "rows.jsonl"
prompt = "{q}"
demonstration = "{a}"
metadata = ["level"]
on_bad_row = "skip"
"""


@pytest.fixture
def plan(tmp_path):
    rows = [{"q": "abcdefgh"[: 1 + n], "a": "y", "level": n} for n in range(8)]
    lines = [json.dumps(row) for row in [*rows, {"q": None}, {"q": None}]]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")

    def make(lengths="", algorithm="sft"):
        path = tmp_path / "recipe.toml"
        path.write_text(RECIPE.replace("LENGTHS", lengths).replace('"sft"', f'"{algorithm}"'))
        return make_plan(load_recipe(path), path, tmp_path / f"staging{len(lengths)}")

    return make


def printed(plan):
    console = Console(file=io.StringIO(), width=300)
    print_plan(plan, console)
    return " ".join(console.file.getvalue().split())


def test_the_plan_keeps_the_pace_and_names_every_part(plan):
    made = plan()
    assert made.job.is_plain
    # 40 prompts: the schedule has 20, in two windows of a quarter and of 5 eighths of 8 rows.
    assert made.job.stages[0].windows == (Window(num_prompts=10, num_rows=2), Window(num_prompts=10, num_rows=5))
    assert [record.name for record in made.plugins if record.kind == "dataset"] == ["curriculum", "jsonl"]
    assert re.search(
        r"8 train rows, 0 held out; 2 left out of train: field 'q' is null, not text \(first: .*:9", printed(made)
    )
    assert [(each.reason, each.num_rows) for each in made.job.omitted["train"]] == [("field 'q' is null, not text", 2)]


def test_prompts_of_other_lengths_are_told_and_do_not_count(plan, tmp_path):
    whole = plan()
    made = plan("max_prompt_units = 1")
    unfit = made.parts.measured.num_unfit
    assert 0 < unfit < 8
    assert made.parts.measured.longest_prompt == 1 < whole.parts.measured.longest_prompt
    assert f"{unfit} of 8 looked at are too short or too long for [dataset]" in printed(made)

    # Prompts that do not fit are told.
    assert "not fit" not in printed(plan())
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write(json.dumps({"q": "x" * 300, "a": "y", "level": 9}) + "\n")
    told = printed(plan("min_prompt_units = 1"))
    assert "1 of 9 looked at does not fit the context of 128 with a demonstration" in told


def test_lengths_that_leave_nothing_are_refused(plan, tmp_path):
    with pytest.raises(
        ConfigError, match="none of the 8 train rows of 'curriculum' that were looked at is of a length"
    ):
        plan("min_prompt_units = 100")

    # Lengths that contradict one another are refused.
    with pytest.raises(ConfigError, match="min_prompt_units is 9, more than max_prompt_units, 8"):
        plan("min_prompt_units = 9\nmax_prompt_units = 8")

    # A dataset without rows is told before anything is made of them.
    (tmp_path / "none.py").write_text("class Empty:\n    def size(self, split): return 0\n    def row(self): ...\n")
    empty = load_recipe(tmp_path / "recipe.toml", overrides=[f"dataset={{plugin='{tmp_path}/none.py:Empty'}}"])
    with pytest.raises(ConfigError, match="dataset: 'Empty' has no train rows"):
        make_plan(empty, None, tmp_path / "none")

    # An algorithm of other payloads is told before what it asks for itself.
    with pytest.raises(ConfigError) as caught:
        plan(algorithm="diffusion-nft")
    assert str(caught.value) == (
        "algorithm.plugin: 'diffusion-nft' prices payloads of kind latents, and model plugin 'qwen' makes tokens; take "
        "another algorithm, or another model: recipes of latents are in recipes/wfm"
    )


class Holed:
    """Rows of which some cannot be used."""

    def __init__(self, *rows):
        self.rows = rows

    def row(self, split, index):
        if self.rows[index] is None:
            raise DataError(f"row {index} is bad")
        return Prompt(text=self.rows[index])


def test_a_tokenizer_is_made_from_the_rows_that_can_be_used():
    assert list(texts(Holed("a", None, "b", "c"), 3)) == ["a", "b"]
    with pytest.raises(DataError, match="none of 2 train rows can be used to make a tokenizer from; the first: row 0"):
        list(texts(Holed(None, None, "c"), 2))
