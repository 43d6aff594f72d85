"""`cosmos init`: what it writes plans, on each task, and what it cannot use it refuses in a sentence."""

import csv
import json

import pytest

from cosmos_core.config.loading import load_recipe
from cosmos_core.errors import ConfigError, PluginError
from cosmos_service_tools import questions
from cosmos_service_tools.checkpoint import look_at_model

QUESTIONS = [{"question": f"What is {n} + 1?", "answer": f"{n}+1={n + 1}\n#### {n + 1}"} for n in range(40)]
CAPITALS = [{"prompt": f"Capital {n}?", "label": "Paris"} for n in range(40)]
DEMONSTRATIONS = [{"instruction": f"Say {n}.", "input": "", "output": f"{n}"} for n in range(40)]
CHATS = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}."}]} for n in range(8)
]
PREFERENCES = [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(40)]


def written(cosmos, here, name="my.toml", **options):
    arguments = [part for key, value in options.items() for part in (f"--{key}", value)]
    said = cosmos("init", name, *arguments, "--yes")
    lines = (here / name).read_text().splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 120
    assert said.rstrip().endswith(f"Next: cosmos run {name}"), said
    return load_recipe(here / name)


def test_questions_with_answers_make_a_run_from_rewards(cosmos, here, rows):
    rows("questions.jsonl", *QUESTIONS)
    recipe = written(cosmos, here, "sub/my.toml", model="models/chat", data="questions.jsonl")
    assert (recipe.run.name, recipe.algorithm.plugin, recipe.model.plugin) == ("my", "grpo", "qwen")
    assert recipe.model.path == str(here / "models/chat"), "it is not below the recipe"
    assert recipe.dataset.options == {
        "train": str(here / "questions.jsonl"),
        "heldout_rows": 4,
        "prompt": "{question}",
        "chat": True,
        "reference": "answer",
        "reference_pattern": "#### (.+)",
    }
    assert [reward.plugin for reward in recipe.reward] == ["math"]
    assert (recipe.policy.precision, recipe.rollout.precision) == ("fp32", "fp32")

    # Short words are compared as they are; a model without a template gets plain text.
    rows("capitals.jsonl", *CAPITALS)
    recipe = written(cosmos, here, model="models/plain", data="capitals.jsonl", task="rloo")
    assert recipe.dataset.options["prompt"] == "{prompt}\n"
    assert [reward.plugin for reward in recipe.reward] == ["exact"]


def test_the_export_of_a_run_of_plain_prompts_goes_on_with_them(cosmos, here, rows, plain_export):
    rows("capitals.jsonl", *CAPITALS)
    recipe = written(cosmos, here, model=plain_export, data="capitals.jsonl")
    assert (recipe.dataset.options["prompt"], recipe.dataset.options.get("chat")) == ("{prompt}\n", None)
    assert "the model learned from plain prompts" in (here / "my.toml").read_text()


def test_each_task_and_kind_of_file_plans(cosmos, here, rows):
    rows("chats.jsonl", *CHATS)
    recipe = written(cosmos, here, "chats.toml", model="models/chat", data="chats.jsonl")
    assert (recipe.algorithm.plugin, recipe.dataset.options["messages"]) == ("sft", "messages")
    assert "heldout_rows" not in recipe.dataset.options, "of eight rows none is spared"
    assert "# No [evaluation]: 8 rows are too few to hold a tenth out" in (here / "chats.toml").read_text()
    recipe = written(cosmos, here, "plain.toml", model="models/plain", data="chats.jsonl")
    assert recipe.model.path == "models/plain"
    assert "{{ turn.content }}" in recipe.model.options["chat_template"]

    rows("pairs.jsonl", *PREFERENCES)
    recipe = written(cosmos, here, "pairs.toml", model="models/plain", data="pairs.jsonl", hardware="2")
    assert recipe.algorithm.plugin == "dpo"
    assert recipe.reference is not None
    assert recipe.policy.mesh.dp_shard == 2
    assert (recipe.dataset.options["demonstration"], recipe.dataset.options["rejected"]) == ("{chosen}", "{rejected}")

    # A folder with a held-out file.
    (here / "split").mkdir()
    rows("split/train.jsonl", *DEMONSTRATIONS)
    rows("split/test.jsonl", *DEMONSTRATIONS[:4])
    recipe = written(cosmos, here, "split.toml", model="models/chat", data="split")
    assert recipe.dataset.options["train"] == "split/train.jsonl"
    assert recipe.dataset.options["heldout"] == "split/test.jsonl"
    assert recipe.dataset.options["prompt"] == "{instruction}\n{input}"


@pytest.mark.parametrize("kind", ["csv", "json", "parquet", "saved"])
def test_tables_of_other_kinds_plan(cosmos, here, kind, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(here / "cache"))
    path = here / f"table.{kind}"
    if kind == "json":
        path.write_text(json.dumps(DEMONSTRATIONS, indent=1))
    elif kind == "saved":
        pytest.importorskip("datasets").Dataset.from_list(DEMONSTRATIONS).save_to_disk(path)
    elif kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(DEMONSTRATIONS), path)
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["prompt", "completion"])
            writer.writeheader()
            writer.writerows({"prompt": f"{n}?", "completion": f"{n}, then"} for n in range(40))
    recipe = written(cosmos, here, model="models/chat", data=path.name)
    assert recipe.algorithm.plugin == "sft"
    assert recipe.dataset.plugin == ("jsonl" if kind == "parquet" else "huggingface")


def test_it_asks_at_a_terminal(cosmos, here, rows, monkeypatch):
    monkeypatch.setattr(questions, "is_terminal", lambda: True)
    rows("capitals.jsonl", *CAPITALS)
    keys = "models/none\nmodels/chat\ncapitals.jsonl\n\n0\n\nregx\nlength\n"
    with pytest.raises(ConfigError, match="does not plan yet") as caught:
        cosmos("init", "my.toml", keys=keys)
    assert "my.toml is written" in str(caught.value)
    assert load_recipe(here / "my.toml").reward[0].plugin == "length", "its options are the user's to give"


def test_a_model_that_cannot_be_reached_is_assumed(cosmos, here, rows, monkeypatch):
    rows("questions.jsonl", *QUESTIONS)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    said = cosmos(
        "init", "my.toml", "--model", "nobody/none-8b", "--data", "questions.jsonl", "--hardware", "8", "--yes"
    )
    assert "Not planned: HF_HUB_OFFLINE is set, and it is not in the cache. Assumed of the model:" in said
    assert "about 8 billion parameters" in said
    recipe = load_recipe(here / "my.toml")
    assert (recipe.model.path, recipe.model.plugin) == ("nobody/none-8b", "hf")
    assert (recipe.policy.mesh.dp_shard, recipe.rollout.replicas) == (4, 4)
    assert recipe.policy.precision == "bf16"


def test_a_model_too_large_for_its_hardware_gets_adapters(here):
    from cosmos_service_tools.columns import Columns
    from cosmos_service_tools.draft import Choice, Hardware
    from cosmos_service_tools.rows import Data

    (here / "8b").mkdir()
    config = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
    config |= {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}
    (here / "8b/config.json").write_text(json.dumps(config))
    checkpoint = look_at_model("8b")
    assert checkpoint.num_parameters == pytest.approx(8.03e9, rel=0.01)
    assert not checkpoint.has_tokenizer
    for gpus, adapts in [(1, True), (2, False)]:
        choice = Choice(
            path=here / "x.toml",
            checkpoint=checkpoint,
            data=Data(plugin="jsonl", options={}, rows=[{}], num_rows=100_000),
            columns=Columns(),
            task="sft",
            source="demonstrations",
            hardware=Hardware(num_gpus=gpus, gpu_bytes=141 << 30),
        )
        assert choice.adapts is adapts
        assert choice.lr == pytest.approx(1e-4 if adapts else 1e-5)


def test_bad_input_is_refused_in_a_sentence(cosmos, here, rows, monkeypatch):
    def unreachable(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", unreachable)
    (here / "broken").mkdir()
    (here / "broken/config.json").write_text('{"hidden_size": [], "num_hidden_layers": "two"}')
    rows("questions.jsonl", *QUESTIONS)
    rows("odd.jsonl", {"a": 1, "b": 2})
    rows("long.jsonl", *({"prompt": "?", "answer": "so " * 90} for _ in range(4)))
    rows("null.jsonl", {"prompt": "?", "answer": None}, {"prompt": "?", "answer": "3"})
    (here / "empty.jsonl").write_text("")
    (here / "bad.jsonl").write_text('{"a": 1}\n{oops\n')
    (here / "bad.json").write_text('[{"a": 1},\n {oops]')
    (here / "list.json").write_text("[1]")
    (here / "there.toml").write_text("")
    (here / "notes.txt").write_text("x")
    (here / "folder").mkdir()
    good = {"model": "models/chat", "data": "questions.jsonl"}
    (here / "run").mkdir()
    (here / "run/job.json").touch()
    cases = [
        ({"path": "there.toml"}, "there.toml: there already; choose another PATH, or remove it"),
        ({"path": "my"}, "my: a recipe's name ends in .toml"),
        ({"data": "none.jsonl"}, "data none.jsonl: no such file or folder"),
        ({"data": "empty.jsonl"}, "data empty.jsonl: empty: it has no rows"),
        ({"data": "bad.jsonl"}, "data bad.jsonl: line 2: no JSON: "),
        ({"data": "bad.json"}, "data bad.json: line 2: no JSON: "),
        ({"data": "list.json"}, "data list.json: row 1 is no object of named fields, but a int"),
        ({"data": "notes.txt"}, "data notes.txt: not a kind of file that is read: .jsonl, "),
        ({"data": "folder"}, "data folder: a folder of .jsonl, "),
        ({"data": "nobody/none:main"}, "its columns cannot be looked at on the Hub: no route to host; try again when"),
        ({"model": "broken"}, "model broken: config.json is no config of a model: "),
        ({"data": "odd.jsonl"}, "the columns fit no task: a (number), b (number); wanted are"),
        ({"data": "long.jsonl"}, "--reward: grpo learns from rewards, and the answers in 'answer' are too long"),
        ({"data": "null.jsonl"}, "the columns fit no task: prompt (text), answer (null or text); wanted are"),
        ({"model": "models/cht"}, "model models/cht: no such folder; did you mean models/chat?"),
        ({"model": "folder"}, "model folder: no language model of Hugging Face's: has no config.json"),
        ({"model": "run"}, "a run; `cosmos export run` writes its model, to run/export"),
        ({"model": "notes.txt"}, "model notes.txt: a file; give the folder"),
        ({"task": "dpo"}, "--task dpo: learns from preferences, which need `chosen` and `rejected`, beside a prompt; "),
        ({"task": "grpq"}, "no algorithm plugin named 'grpq' is installed; did you mean"),
        ({"task": "flow-grpo"}, "--task flow-grpo: for world models"),
        ({"task": "distill"}, "--task distill: needs a teacher"),
        ({"task": "sft", "reward": "math"}, "--reward math: sft learns from no rewards"),
        ({"hardware": "0"}, "--hardware 0: give cpu, gpu, or a number of GPUs such as 8"),
        ({"reward": "mth"}, "no reward plugin named 'mth' is installed; did you mean math"),
    ]
    for changes, message in cases:
        options = {**good, **changes}
        path = options.pop("path", "my.toml")
        arguments = [part for key, value in options.items() for part in (f"--{key}", value)]
        with pytest.raises((ConfigError, PluginError)) as caught:
            cosmos("init", path, *arguments, "--yes")
        assert message in str(caught.value)
        assert not (here / "my.toml").exists()


def test_what_is_missing_is_named_where_there_is_no_terminal(cosmos, here, rows):
    rows("questions.jsonl", *QUESTIONS)
    for arguments, message in [
        ((), "no terminal to ask at; give --model, --data, --task, --hardware, or --yes for what is detected"),
        (("--yes",), "no terminal to ask at; give --model, --data"),
        (
            ("--model", "models/chat", "--data", "questions.jsonl"),
            (
                "no terminal to ask at; give --task (such as grpo), --hardware (such as cpu), or --yes for what is "
                "detected"
            ),
        ),
    ]:
        with pytest.raises(ConfigError) as caught:
            cosmos("init", "my.toml", *arguments)
        assert str(caught.value) == message
