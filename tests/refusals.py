"""Bad recipes, and what planning says of each: `python -m tests.refusals` writes `docs/refusals.md`.

Each is a good recipe of the repository with one thing wrong.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import attrs

from cosmos_core.config.loading import load_recipe
from cosmos_core.errors import CosmosError
from cosmos_core.run.planning.plan import make_plan

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "refusals.md"
NANOCHAT = (
    'model.config={model_type="nanochat",hidden_size=32,intermediate_size=64,num_hidden_layers=2,'
    "num_attention_heads=4,max_position_embeddings=256}"
)
MAMBA = 'model.config={model_type="mamba",hidden_size=32,state_size=8,num_hidden_layers=2}'


@attrs.frozen
class Bad:
    """A recipe, and what is set in it."""

    recipe: str
    sets: tuple[str, ...]


def bad(*sets: str, recipe: str = "arithmetic") -> Bad:
    """A bad recipe by what is set."""
    return Bad(recipe, sets)


BAD: dict[str, tuple[Bad, ...]] = {
    "Keys and names": (
        bad("run.stepps=3"),
        bad("run.steps=-1"),
        bad("train.steps=3"),
        bad("policy.optimizer.lr=0"),
        bad('policy.optimizer.lr="fast"'),
        bad('algorithm.options.aggregatoin="token-mean"'),
        bad('algorithm.plugin="gpro"'),
        bad("reward=[]"),
    ),
    "Data": (
        bad("dataset.min_prompt_units=200", "dataset.max_prompt_units=210"),
        bad("rollout.sampling.max_units=256"),
        bad("policy.micro_batch_units=16"),
        bad('algorithm={plugin="dpo"}'),
        bad("policy.prompts_per_step=1", "rollout.group_size=2", "policy.replicas=4"),
        bad('environment={plugin="calculator"}', 'dataset.plugin="shapes"', "dataset.options={}"),
        bad('dataset.options.train="../data/reasoning-benchmark.jsonl"', recipe="reason/cosmos-reason1-7b"),
    ),
    "Models": (
        bad("model.config.vocab_size=300"),
        bad("model.config.hidden_sise=96"),
        bad("model.config.num_attention_heads=5"),
        bad('model.plugin="hf"', 'model.config.model_type="qwen9"'),
        bad('model.plugin="hf"', MAMBA),
        bad('model.path="./nowhere"'),
    ),
    "Layouts": (
        bad("policy.mesh.tp=3"),
        bad("policy.mesh.pp=4"),
        bad("policy.mesh.ep=2"),
        bad("policy.mesh.cp=3", 'policy.parallel.context="ulysses"'),
        bad("policy.mesh.tp=2", "policy.mesh.dp_shard=3", "model.config.vocab_size=397"),
        bad("policy.mesh.tp=2", "policy.micro_batch_units=1001"),
        bad('policy.lora={modules=["q_prj"]}'),
        bad('model.plugin="hf"', NANOCHAT, "policy.mesh.pp=2"),
        bad('model.plugin="hf"', MAMBA, "policy.mesh.tp=2", recipe="sft-arithmetic"),
    ),
    "Rollouts": (
        bad('rollout.engine.plugin="diffusion"'),
        bad("rollout.engine.options.prefil_units=9"),
        bad("rollout.sampling.top_k=20"),
        bad("rollout.group_size=1"),
        bad("rollout.mesh.tp=3"),
        bad('rollout.quantization="int4"'),
    ),
    "Machines": (
        bad('control.bind="0.0.0.0"'),
        bad('sync.transport="nccl"'),
        bad('launch.launcher="slrum"'),
        bad("policy.checkpoint.keep=-1"),
    ),
}


def sentence(each: Bad) -> str:
    """What planning says of a bad recipe; empty if it takes it."""
    path = ROOT / "recipes" / f"{each.recipe}.toml"
    with tempfile.TemporaryDirectory() as staging:
        try:
            make_plan(load_recipe(path, overrides=each.sets), path, Path(staging))
        except CosmosError as error:
            # The last digits of sums differ from one processor to another.
            return re.sub(r"[\d.]+ against [\d.]+", "… against …", str(error).replace(str(ROOT), "."))
    return ""


def page() -> Iterator[str]:
    """The lines of the page."""
    yield from (
        "# What planning refuses",
        "",
        "`cosmos plan` and `cosmos run` refuse what cannot work before any process starts, and name the key, what was",
        "seen, and what to do. This page is made from a table of bad recipes (`python -m tests.refusals`), each a",
        "recipe of the repository with one thing wrong; a test holds that planning still says this.",
    )
    for title, recipes in BAD.items():
        yield from ("", f"## {title}")
        for each in recipes:
            shown = " ".join(f"--set {shlex.quote(given)}" for given in each.sets)
            yield from ("", f"    cosmos plan recipes/{each.recipe}.toml {shown}", "")
            yield from (f"> {line}" for line in sentence(each).splitlines())


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    told = "\n".join(page()) + "\n"
    sys.stdout.write(told)
    PAGE.write_text(told)
