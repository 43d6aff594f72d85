"""Dialogues on real vLLM: the calculator's recipe, weights loaded in flight, and what is scored of a dialogue."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch

from cosmos_core.control.journal import entries
from cosmos_core.models.tokens import token_array
from cosmos_core.protocols import Request, Sampling
from cosmos_core.run.follower import Follower
from cosmos_core.testing.conformance.engine.subject import tokens_of
from cosmos_core.testing.conformance.model.subject import tensor_of
from cosmos_core.types import Array, Prompt
from tests.commandline import CommandLine

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(400)]

RECIPE = Path(__file__).parents[3] / "recipes" / "grpo-calculator.toml"
SETTINGS = (
    "rollout.engine.plugin=vllm",
    "model.config.head_dim=32",
    "warmup.steps=150",
    "run.steps=5",
    "evaluation.prompts=12",
    "evaluation.interval=0",
    "rollout.max_in_flight=64",
    "sync.cache=recompute",
)
STEPS, SAMPLES = 5, 16 * 8


def test_the_calculators_recipe_trains_on_dialogues_of_vllm(tmp_path):
    cosmos = CommandLine(tmp_path, timeout_s=380.0)
    cosmos("run", str(RECIPE), *(part for each in SETTINGS for part in ("--set", each)))
    assert not cosmos.left_behind()
    folder = tmp_path / "runs" / "calculator"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["outcome"] == "finished"
    assert summary["samples"]["consumed"] == STEPS * SAMPLES
    # Nothing is refused, on either side: what is left over at the end, or too old, is all that is not trained on.
    assert set(summary["samples"]["dropped"]) <= {"stale", "run_ended", "unused"}, summary["samples"]["dropped"]
    follower = Follower()
    follower.fold(entries(folder / "journal.sqlite"))
    steps = [timed.record for timed in follower.steps if timed.record.stage == 1]
    assert len(steps) == STEPS
    asked = [step.rewards["calculator"] for step in steps]
    assert sum(asked) / len(asked) > 0.02, asked
    assert max(asked) < 4.0, asked
    # Log-probs are of the same numbers that the trainer computes, over every turn.
    found = [step.metrics["mismatch_kl"] for step in steps if "mismatch_kl" in step.metrics]
    assert found
    assert max(map(abs, found)) < 1e-4
    for log in (folder / "logs").glob("*.jsonl"):
        assert '"ERROR"' not in log.read_text(), log.read_text()


AGENT = """
import json

import aiohttp

TOOL = {"name": "calculate", "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}}}


def value(arguments):
    left, _, right = json.loads(arguments).get("expression", "").partition("*")
    return str(int(left) * int(right)) if left.isdecimal() and right.isdecimal() else "error"


async def agent(session, task):
    question = {"role": "user", "content": task.metadata["question"]}
    messages = [{"role": "system", "content": "Answer with #### and the number."}, question]
    async with aiohttp.ClientSession() as client:
        for _ in range(4):
            body = {"model": session.model, "messages": messages, "tools": [{"type": "function", "function": TOOL}]}
            async with client.post(session.base_url + "/chat/completions", json=body) as reply:
                message = (await reply.json())["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                return
            for call in message["tool_calls"]:
                said = value(call["function"]["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})
"""


def test_agents_call_vllm(tmp_path):
    (tmp_path / "mine.py").write_text(AGENT)
    cosmos = CommandLine(tmp_path, timeout_s=380.0)
    recipe = str(RECIPE.with_name("agent-calculator.toml"))
    overrides = [part for each in (*SETTINGS, "run.steps=3") for part in ("--set", each)]
    cosmos("run", recipe, "--environment", f"{tmp_path}/mine.py:agent", *overrides)
    assert not cosmos.left_behind()
    folder = tmp_path / "runs" / "agent-calculator"
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["outcome"], summary["samples"]["consumed"]) == ("finished", 3 * SAMPLES)
    assert set(summary["samples"]["dropped"]) <= {"stale", "run_ended", "unused"}, summary["samples"]["dropped"]
    follower = Follower()
    follower.fold(entries(folder / "journal.sqlite"))
    found = [timed.record.metrics.get("mismatch_kl", 0.0) for timed in follower.steps if timed.record.stage == 1]
    assert max(map(abs, found)) < 1e-4


def test_of_a_dialogue_what_the_model_decided_is_scored(start, model, pricer):
    engine = start()
    prompt = model.encode(Prompt(text="Two and two"))
    ((made,),) = engine.generate([Request(request_id="one", prompt=prompt, sampling=Sampling(max_units=12), seed=3)])
    told = np.ones(len(tokens_of(made)), np.bool_)
    told[4:9] = False
    array = Array(dtype="bool", shape=told.shape, data=told.tobytes())
    dialogue = attrs.evolve(made.payload, arrays={**made.payload.arrays, "decided": array})
    whole, parts = engine.score([made.payload, dialogue], temperature=1.3)
    assert len(whole) == 12
    torch.testing.assert_close(parts, whole[torch.from_numpy(told)], atol=0, rtol=0)
    (theirs,) = pricer.logprobs([dialogue], temperature=1.3)
    torch.testing.assert_close(parts, theirs, atol=1e-4, rtol=0)


def test_a_next_turn_reuses_the_one_before_until_weights_come(start, model, pricer):
    """With either way to load: vLLM keeps blocks of 32 units, and forgets or hides them all."""
    engine, version = start(dialogues=True), 0
    opening = model.encode(Prompt(text="What are two and two, and three and three, and four and four together? " * 2))
    size = opening.arrays["prompt"].shape[0]
    for cache, weights in (("none", 0), ("recompute", 1), ("keep", 2)):
        first = Request(request_id="first", prompt=opening, sampling=Sampling(max_units=24), seed=3)
        ((made,),) = engine.generate([first])
        prompt = attrs.evolve(
            opening, arrays={"prompt": token_array([*tokens_of(made, "prompt"), *tokens_of(made), 5])}
        )
        if weights:
            version += 1
            engine.load(version, pricer.tensors(weights), cache)
        before = engine.stats()
        ((turn,),) = engine.generate(
            [Request(request_id="next", prompt=prompt, sampling=Sampling(max_units=8), seed=4)]
        )
        after = engine.stats()
        reused, processed = after.cached_units - before.cached_units, after.prompt_units - before.prompt_units
        assert reused + processed == size + 25
        assert reused == (0 if weights else (size + 24) // 32 * 32)
        (theirs,) = pricer.logprobs([turn.payload], temperature=1.0, weights=weights)
        torch.testing.assert_close(tensor_of(turn.payload, "logprobs"), theirs, atol=1e-4, rtol=0)
