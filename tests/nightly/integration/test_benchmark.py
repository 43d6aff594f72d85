"""A benchmark of physical reasoning, from a file of questions to a table by label, with a tiny model."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer, Qwen2VLImageProcessorPil

from cosmos_core.config.loading import load_recipe
from cosmos_core.run.planning.plan import make_plan
from tests.commandline import CommandLine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RECIPE = Path(__file__).parents[3] / "recipes" / "sft-vision.toml"


def picture() -> bytes:
    """A red square of the size that the tiny model takes."""
    written = io.BytesIO()
    Image.new("RGB", (32, 32), (200, 30, 30)).save(written, "PNG")
    return written.getvalue()


CHOICES = {"A": "It falls.", "B": "It stays."}
LABELS = ["physics/mechanics", "physics/states", "space/affordance"]
DATA = """
[dataset]
plugin = "reason"

[dataset.options]
train = "questions.jsonl"
heldout = "questions.jsonl"
labels = "required"
chat = false
on_bad_row = "skip"

[[reward]]
plugin = "reason-accuracy"

[[reward]]
plugin = "reason-format"

[rollout.sampling]
max_units = 4
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The model of the recipe as it is drawn, with tokenizer and image processor, in a Hugging Face folder."""
    plan = make_plan(load_recipe(RECIPE), RECIPE, tmp_path / "staging")
    assert plan.job.recipe.model.config is not None
    settings = dict(plan.job.recipe.model.config)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    tokenizer = AutoTokenizer.from_pretrained(plan.assets)
    config.get_text_config().vocab_size = len(tokenizer)
    folder = tmp_path / "model"
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    shutil.copytree(plan.assets, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("config.json"))
    vision, options = settings["vision_config"], plan.job.recipe.model.options
    Qwen2VLImageProcessorPil(
        patch_size=vision["patch_size"],
        merge_size=vision["spatial_merge_size"],
        temporal_patch_size=vision["temporal_patch_size"],
        size={"shortest_edge": options["min_pixels"], "longest_edge": options["max_pixels"]},
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def benchmark(cosmos: CommandLine) -> Path:
    """A recipe with twelve good questions and one without its picture."""
    folder = cosmos.folder
    (folder / "ball.png").write_bytes(picture())
    rows = [
        {"image": "ball.png", "question": f"Ball {n}?", "choices": CHOICES, "answer": "A", "label": LABELS[n % 3]}
        for n in range(12)
    ]
    lines = [*rows, rows[0] | {"image": "none.png"}]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    text = RECIPE.read_text()
    whole = text[: text.index("[dataset]")] + DATA + text[text.index("[algorithm]") :]
    (folder / "benchmark.toml").write_text(whole)
    return folder / "benchmark.toml"


def test_a_table_by_label(cosmos: CommandLine, benchmark: Path, model: Path) -> None:
    arguments = ("--recipe", str(benchmark), "--prompts", "100", "--by", "labels", "--output", "found.json")
    told = cosmos("eval", str(model), *arguments)
    assert "1 row(s) left out: field 'image' names a file that does not exist" in told
    found = json.loads((cosmos.folder / "found.json").read_text())
    groups = {group["label"]: group["num_prompts"] for group in found["groups"]}
    expected = {"physics": 8, "physics/mechanics": 4, "physics/states": 4, "space": 4, "space/affordance": 4}
    assert groups == expected
    assert (found["num_prompts"], found["total"]["num_prompts"], found["num_unscored"]) == (12, 12, 0)
    for label, number in expected.items():
        assert any(line.split()[:2] == [label, str(number)] for line in told.splitlines()), told
