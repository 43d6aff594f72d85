"""`cosmos recipes`: listed, shown, copied, and what was copied plans."""

from pathlib import Path

import pytest

from cosmos_core.config.loading import load_recipe
from cosmos_core.errors import ConfigError
from cosmos_core.plugins.discovery import discover
from cosmos_core.run.planning.plan import make_plan
from cosmos_service_tools.missing import missing_from
from cosmos_service_tools.shipped import find, folder, shipped


def test_they_are_listed_with_what_they_train_and_need(cosmos, monkeypatch):
    listed = cosmos("recipes", "list")
    assert "arithmetic  (a CPU)\n    The demo: a tiny language model learns two-step arithmetic" in listed
    assert "gsm8k  (a CPU)\n" in listed
    assert "grpo-deepseek-v3  (320 GPUs)\n" in listed
    assert "grpo-qwen3-8b-one-gpu  (1 GPU)\n" in listed
    assert "wfm/rewards" not in listed, "a file of a reward service is no recipe"
    assert (Path(__file__).parents[4] / "recipes").samefile(folder()), "a checkout's own are found"
    assert len(shipped()) > 30
    assert all(recipe.title and not recipe.title.endswith((".", ":")) for recipe in shipped())
    assert cosmos("recipes", "show", "arithmetic") == find("arithmetic").text

    # Without any plugin each says the one line that installs all that it names.
    monkeypatch.setenv("COSMOS_DISABLE_PLUGIN_AUTOLOAD", "1")
    needs = "cosmos-model-qwen cosmos-algorithm-grpo cosmos-dataset-arithmetic cosmos-reward-math cosmos-algorithm-sft"
    assert f"    missing here: pip install {needs}\n" in cosmos("recipes", "list")
    strange = load_recipe(find("sft-arithmetic").path, overrides=["dataset.plugin='my-own'"])
    (told,) = missing_from(strange, discover()).unknown
    assert "no dataset plugin named 'my-own' is installed" in told
    assert "my-own" not in missing_from(strange, discover()).install


@pytest.mark.parametrize(
    ("name", "files"),
    [
        (
            "grpo-qwen2.5-vl-7b",
            {"data/pictures.jsonl", "data/images/squares-1.png", "configs/Qwen2.5-VL-7B-Instruct/config.json"},
        ),
        ("reason/cosmos-reason1-7b", {"data/reasoning.jsonl", "data/clips/videos/ball.mp4"}),
    ],
)
def test_a_copy_plans_with_the_files_that_it_refers_to(cosmos, here, name, files):
    said = cosmos("recipes", "copy", name, "sub/my.toml")
    assert said.startswith(f"Copied {name} to sub/my.toml, and beside it what it refers to (")
    copied = {path.relative_to(here / "sub").as_posix() for path in (here / "sub").rglob("*") if path.is_file()}
    assert copied >= files
    path = here / "sub/my.toml"
    assert "cosmos plan sub/my.toml" in path.read_text()
    assert "../" not in path.read_text()
    assert make_plan(load_recipe(path), path, here / "staging").job.num_train_rows > 0

    # Nothing is overwritten unless that is asked for; files that are the same do not count.
    assert cosmos("recipes", "copy", name, "sub/my.toml").startswith("sub/my.toml is there already, as cosmos-core has")
    path.write_text("")
    with pytest.raises(ConfigError, match=r"^sub/my.toml: there already, with other content; .* with --overwrite$"):
        cosmos("recipes", "copy", name, "sub/my.toml")
    cosmos("recipes", "copy", name, "sub/my.toml", "--overwrite")
    assert load_recipe(path).run.name == name.rpartition("/")[2]


def test_paths_of_a_copy_lead_to_where_the_commands_of_its_comment_put_things(cosmos, here):
    cosmos("recipes", "copy", "distill-arithmetic")
    assert load_recipe(here / "distill-arithmetic.toml").teacher.path == "runs/sft-arithmetic/export"
    cosmos("recipes", "copy", "wfm/wan-tiny-grpo-fast")
    assert (here / "wfm/rewards.toml").is_file(), "its comment says to serve it"
    assert "cosmos reward-service --config" in (here / "wfm/rewards.toml").read_text()


def test_what_cannot_be_copied_is_refused(cosmos, here):
    (here / "file").write_text("")
    for arguments, message in [
        (("show", "aritmetic"), "no recipe 'aritmetic' ships with cosmos-core; did you mean arithmetic"),
        (("show", "wan-tiny-nft"), "did you mean wfm/wan-tiny-nft?"),
        (("show", "zzz"), "`cosmos recipes list` prints the names"),
        (("copy", "arithmetic", "."), "give the copy's file, such as arithmetic.toml"),
        (("copy", "arithmetic", "file/x.toml"), "file: cannot be written: "),
    ]:
        with pytest.raises(ConfigError) as caught:
            cosmos("recipes", *arguments)
        assert message in str(caught.value)
