"""How well runs of world models still predict their data: the flow-matching loss of held-out videos.

    python recipes/wfm/data_loss.py runs/wan-tiny-grpo-fast runs/wan-tiny-ddrl

Each video is noised at the same times and with the same noise for all runs.
"""  # noqa: INP001 - a script beside the recipes that it is about

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

from cosmos_core.config.loading import load_job
from cosmos_core.plugins.recipe import load_dataset, selections
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import ModelContext
from cosmos_core.run.export import export_run

DRAWS = 16
"""Of times and noise, for each video."""


def data_loss(run: Path, *, num_rows: int = 64) -> float:
    """The mean of (v - (e - x_0))² over held-out videos of a run, at its newest checkpoint."""
    job = load_job(run)
    recipe = job.recipe
    plugins = PluginSet.load(selections(recipe, ("model", "dataset")))
    dataset = load_dataset(job, plugins)
    with tempfile.TemporaryDirectory() as folder:
        export_run(run, step="latest", output=Path(folder) / "model")
        context = ModelContext(path=str(Path(folder) / "model"), config=None, assets=job.assets)
        model = plugins.create("model", recipe.model.plugin, recipe.model.options, context)
        module = model.build(seed=0, dtype=torch.float32, device=torch.device("cpu"))
    rows = [dataset.row("heldout", index) for index in range(min(num_rows, dataset.size("heldout")))]
    payloads = [
        model.noised(model.encode_demonstration(row), seed, num_decisions=DRAWS) for seed, row in enumerate(rows)
    ]
    with torch.no_grad():
        found = [model.decide(module, batch, temperature=1.0).logprobs_N for batch in model.pack(payloads, budget=128)]
    return -float(torch.cat(found).mean())


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        print(f"{name}: data loss {data_loss(Path(name)):.4f}")  # noqa: T201 - it is what the script is for
