"""The GSM8K recipe on the real files, through the command line and real processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def gsm8k_folder():
    folder = Path(os.environ["COSMOS_DATA"]) if "COSMOS_DATA" in os.environ else ROOT.parent / "shared" / "data"
    if not (folder / "gsm8k" / "test.jsonl").is_file():
        pytest.skip(f"GSM8K is not in {folder / 'gsm8k'}; set COSMOS_DATA to the folder that holds gsm8k/test.jsonl")
    return folder.resolve()


def cosmos(*arguments):
    environment = {**os.environ, "COSMOS_DATA": str(gsm8k_folder()), "OMP_NUM_THREADS": "1"}
    command = [str(Path(sys.executable).parent / "cosmos"), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_recipe_runs_end_to_end(tmp_path):
    done = cosmos(
        "run",
        "recipes/gsm8k.toml",
        "--set",
        f"run.output_dir={json.dumps(str(tmp_path))}",
        "--set",
        "warmup.steps=6",
        "--set",
        "run.steps=2",
        "--set",
        "evaluation.prompts=4",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "gsm8k" / "summary.json").read_text(encoding="utf-8"))
    assert 0.0 <= summary["heldout_accuracy_before"] <= 1.0
    assert 0.0 <= summary["heldout_accuracy_after"] <= 1.0
    assert summary["samples"]["consumed"] == 2 * 4 * 4


def test_the_recipe_reads_questions_and_final_numbers():
    from cosmos_core.config.loading import load_recipe
    from cosmos_core.config.structure import structure
    from cosmos_core.protocols import DatasetContext
    from cosmos_dataset_jsonl import FileDataset, JsonlOptions

    data = gsm8k_folder()
    recipe = load_recipe(ROOT / "recipes" / "gsm8k.toml", overrides=(), selections=None)
    given = {
        name: value.replace("${COSMOS_DATA:-../../shared/data}", str(data)) if isinstance(value, str) else value
        for name, value in recipe.dataset.options.items()
    }
    dataset = FileDataset(structure(given, JsonlOptions), DatasetContext(seed=0, directory=ROOT / "recipes"))
    assert (dataset.size("train"), dataset.size("heldout")) == (2000, 1319)
    first = dataset.row("heldout", 0)
    assert first.text.startswith("Janet\u2019s ducks lay 16 eggs per day.")
    assert first.reference == "18"
    assert first.demonstration.endswith("#### 18")
    assert all(dataset.row("heldout", index).reference.strip("-0123456789,") == "" for index in range(1319))
