"""Samples as the report and the live page show them: bounded, with the texts of tokens where there is a tokenizer."""

import json
import math
import subprocess
import sys

import huggingface_hub
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cosmos_core.config.job import Job
from cosmos_core.config.loading import recipe_from, save_job
from cosmos_core.errors import ConfigError
from cosmos_core.observe import samples as shown
from cosmos_core.observe.samples import SampleBrowser, encoded
from cosmos_core.storage.parts import FOLDER
from tests.kept_samples import RECIPE, group, keep, payload, trained

HUB = {"plugin": "hf", "path": "some/model"}
EVIL = "</script><b>\u2028"


@pytest.fixture
def run(tmp_path):
    recipe = recipe_from(RECIPE)
    job = Job(run_id="demo-1", directory=tmp_path, recipe_directory=tmp_path, recipe=recipe, uses_rollouts=True)
    save_job(job)
    spoken = payload([True, False, True], units=(0, 1, 2))
    rows = [
        *group(1, 1.0, 0.0, text=EVIL),
        *group(2, 0.25, held=spoken, kept="media/step-0/row-0.mp4"),
        *group(3, None),
    ]
    keep(tmp_path, "samples", "rollout-0", rows)
    late = group(4, 0.5, purpose="evaluation", version=1, text="x" * 30_000)
    keep(tmp_path, "samples", "rollout-0", late)
    keep(tmp_path, "steps", "policy-0", [trained(1, 1, 1, 0.5, -0.5), trained(1, 1, 2, 0.1, ratios=[[0.5, 2.0]])])
    return tmp_path


def leases(found):
    return [each["lease"] for each in found["groups"]]


def test_groups_are_found_page_by_page(run, monkeypatch):
    browser = SampleBrowser(run)
    found = browser.groups(order="worst")
    assert (leases(found), found["total"], found["note"]) == ([2, 4, 1], 3, "")
    assert {name: found["groups"][2][name] for name in ("prompt", "reward", "step", "num_samples", "fates")} == {
        "prompt": "prompt of 1?",
        "reward": 0.5,
        "step": 1,
        "num_samples": 2,
        "fates": {"trained": 2},
    }
    monkeypatch.setattr(shown, "COUNT", 2)
    assert [leases(browser.groups(order="worst", first=first)) for first in (0, 2, 4)] == [[2, 4], [1], []]
    assert leases(browser.groups(purpose="evaluation")) == [4]
    # It is no regular expression, which may take for ever.
    assert (leases(browser.groups(text="OF 3?")), leases(browser.groups(text="of [23]"))) == ([3], [])
    assert browser.groups(step=7)["note"] == "no kept sample is as asked for; steps 1 to 1 were trained"
    # Of very many samples, the newest are looked at.
    monkeypatch.setattr(shown, "_NEWEST", 1)
    found = browser.groups()
    assert (leases(found), found["note"]) == ([4], "of the newest 1 of 5 samples that are kept")


def test_a_group_and_the_tokens_of_its_samples_are_told(run):
    browser = SampleBrowser(run)
    found = browser.group(1)
    assert (found["prompt"], found["reference"], found["step"]) == ("prompt of 1?", {"answer": 1}, 1)
    assert [(each["index"], each["advantage"], each["fate"]) for each in found["samples"]] == [
        (0, 0.5, "trained"),
        (1, -0.5, "trained"),
    ]
    assert found["samples"][0]["completion"] == EVIL
    cut = browser.group(4)["samples"][0]["completion"]
    assert cut.endswith(" … 10,000 more characters")
    assert browser.tokens(2, 0) == {
        "ids": [0, 1, 2],
        "pieces": None,
        "logprobs": [-0.5, None, -0.5],
        "total": 3,
        "ratios": [0.5, None, 2.0],
    }
    assert browser.tokens(1, 0)["ratios"] is None
    for wrong in (lambda: browser.group(9), lambda: browser.tokens(1, 7), lambda: browser.given(1, 0)):
        with pytest.raises(ConfigError):
            wrong()
    json.loads(encoded(found))
    assert b"<" not in encoded(found)


def test_tokens_are_pieces_of_text_where_there_is_a_tokenizer(run, monkeypatch):
    # The three bytes of one character are two tokens.
    euro = "".join(pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("€")[0][0])
    made = Tokenizer(
        models.BPE(vocab={euro[0]: 0, euro[1]: 3, euro[2]: 4, euro[1:]: 1, "a": 2}, merges=[(euro[1], euro[2])])
    )
    made.decoder = decoders.ByteLevel()
    (run / "assets").mkdir()
    made.save(str(run / "assets" / "tokenizer.json"))
    assert SampleBrowser(run).tokens(2, 0)["pieces"] == ["", "€", "a"]
    # Else the model's is taken from the cache of the hub, which is not asked.
    moved = (run / "assets" / "tokenizer.json").rename(run / "cached.json")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *of: moved if of[0] == "some/model" else None)
    assert SampleBrowser(run).tokens(2, 0)["pieces"] is None
    save_job(Job(run_id="demo-1", directory=run, recipe_directory=run, recipe=recipe_from(RECIPE | {"model": HUB})))
    assert SampleBrowser(run).tokens(2, 0)["pieces"] == ["", "€", "a"]
    moved.write_text("{}")
    assert SampleBrowser(run).tokens(2, 0)["pieces"] is None


def test_a_log_prob_or_ratio_that_is_no_number_is_told():
    sample = {"units": [7, 8, 9, 10], "logprobs": [-math.inf, None, math.nan, -1.5]}
    told = json.loads(encoded(shown.tokens_of(sample, None, [math.inf, math.nan, 2.0], 3)))
    assert (told["logprobs"], told["ratios"], told["total"]) == (["-inf", None, "nan"], ["inf", None, "nan"], 4)


def test_long_facts_and_large_groups_are_cut_and_told(run, monkeypatch):
    keep(run, "samples", "rollout-1", group(5, 0.0, 0.5, 1.0, reference=["r" * 5000], metadata={"m": "m" * 5000}))
    keep(run, "samples", "rollout-2", group(6, 0.0, reference="r" * 5000, metadata={"m": "m" * 1900}))
    monkeypatch.setattr(shown, "_SAMPLES", 2)
    embedded = {each["lease"]: each["detail"] for each in SampleBrowser(run).embedded(1 << 20)["groups"]}
    for found in (SampleBrowser(run).group(5), embedded[5]):
        assert (found["total"], [each["index"] for each in found["samples"]]) == (3, [0, 1])
        for name, first in (("reference", '["rr'), ("metadata", '{"m": "mm')):
            assert found[name].startswith(first)
            assert found[name].endswith("more characters")
            assert len(found[name]) < 2100
    found = SampleBrowser(run).group(6)
    assert (found["total"], found["reference"][1990:], found["metadata"]) == (
        1,
        "r" * 10 + " … 3,000 more characters",
        {"m": "m" * 1900},
    )


def test_what_a_report_holds_is_bounded(run):
    browser = SampleBrowser(run)
    every = browser.embedded(1 << 20)
    assert sorted(leases(every)) == [1, 2, 3, 4]
    detail = next(each["detail"] for each in every["groups"] if each["lease"] == 2)
    assert detail["samples"][0]["tokens"]["logprobs"] == [-0.5, None, -0.5]
    assert every["note"] == ""
    few = browser.embedded(1500)
    left_out = 4 - len(few["groups"])
    assert 0 < left_out < 4
    assert (few["total"], few["note"]) == (4, f"this page has no room for {left_out} of the chosen prompts")
    assert len(encoded(few)) < 1700
    # What is too large takes no room from the others, which come after it.
    keep(run, "samples", "rollout-0", group(5, 0.3, 0.3, 0.3, 0.3, text="x" * 4000))
    found = browser.embedded(12_000)
    assert (sorted(leases(found)), found["total"]) == ([1, 2, 3, 4], 5)


def test_a_report_has_the_newest_the_worst_the_best_and_those_with_media(run, monkeypatch):
    for path in (run / FOLDER).iterdir():
        path.unlink()
    rewards = {1: 0.0, 2: 1.0, 3: 0.5, 4: 0.5, 5: 0.5}
    for lease, reward in rewards.items():
        shows = "media/step-0/row-0.mp4" if lease == 3 else ""
        keep(run, "samples", f"rollout-{lease}", group(lease, reward, kept=shows, text=f"{lease}"))
    for lease, reward in ((11, 0.5), (12, 0.0), (13, 1.0), (14, 0.5), (15, 0.5)):
        keep(run, "samples", f"rollout-{lease}", group(lease, reward, purpose="evaluation"))
    monkeypatch.setattr(shown, "_EMBEDDED", 1)
    found = SampleBrowser(run).embedded(1 << 20)
    assert (sorted(leases(found)), found["total"]) == ([1, 2, 3, 5, 12, 13, 15], 10)


def test_what_is_not_there_is_a_sentence(run):
    (run / FOLDER / "samples.rollout-9.9.parquet").write_bytes(b"PAR1")
    left_out = "cannot be read, and left out: samples.rollout-9.9.parquet"
    found = SampleBrowser(run).groups()
    assert (len(found["groups"]), found["note"]) == (4, left_out)
    assert SampleBrowser(run).groups(step=77)["note"].endswith(left_out)
    for path in (run / FOLDER).iterdir():
        path.unlink()
    found = SampleBrowser(run).groups()
    assert (found["groups"], found["note"][:24]) == ([], "no samples are kept yet:")
    assert SampleBrowser(run).embedded(100)["groups"] == []


def test_nothing_heavy_is_imported_before_somebody_looks():
    code = (
        "import sys, cosmos_core.observe.samples; "
        "print({'torch', 'transformers', 'pyarrow', 'tokenizers', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
