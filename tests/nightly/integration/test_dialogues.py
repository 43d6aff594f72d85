"""Dialogues of the real engine with environments in real processes, and the recipe with the calculator."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import json
import os
import queue
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from cosmos_core.config.schema import EnvironmentConfig
from cosmos_core.control.journal import entries
from cosmos_core.models import HuggingFaceModel, HuggingFaceOptions
from cosmos_core.models.tokens import decided, values
from cosmos_core.protocols import EngineContext, EnvironmentCapabilities, ModelContext, Request, Sampling
from cosmos_core.rollout.embedded.engine import EmbeddedEngine
from cosmos_core.rollout.embedded.options import EmbeddedOptions
from cosmos_core.rollout.episodes.episode import Episodes
from cosmos_core.rollout.episodes.pool import EnvironmentPool
from cosmos_core.run.follower import Follower
from cosmos_core.types import Message, Prompt, SampleStatus

ROOT = Path(__file__).parents[3]
CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
}
CHATTER = """
from cosmos_core.protocols import Provider, Turn, hookimpl


class Chatter:
    def __init__(self, options, context):
        self.turns = 0

    async def reset(self, prompt, seed):
        return "Go. " if prompt.metadata.get("words") else None

    async def step(self, text):
        self.turns += 1
        return Turn(observation=f"turn {self.turns} had {len(text)} signs. Go on: ", done=self.turns == 4)

    async def close(self):
        pass


@hookimpl
def cosmos_environment():
    return Provider(create=Chatter)
"""


class Chatty(HuggingFaceModel):
    """A model that often stops: a random one would hardly ever."""

    def make_text_encoder(self):
        made = super().make_text_encoder()
        made.stop_ids = lambda: frozenset(range(0, 285, 3)) | {made.stop_id()}
        return made


@pytest.fixture(autouse=True)
def chatter(tmp_path, monkeypatch):
    """An installed environment that always has something to say, for the workers only."""
    site = tmp_path / "site"
    info = site / "chatter-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "chatter_plugin.py").write_text(CHATTER)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: chatter\nVersion: 1.0\nRequires-Dist: cosmos-core\n")
    (info / "entry_points.txt").write_text("[cosmos_core.environments]\nchatter = chatter_plugin\n")
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)


@pytest.fixture
def model(tmp_path):
    made = Chatty(HuggingFaceOptions(), ModelContext(path=None, config=CONFIG, assets=tmp_path / "assets"))
    (tmp_path / "assets").mkdir()
    corpus = [f"What is {n}? turn {n} had {n} signs. Go on: answer" for n in range(50)]
    made.prepare(corpus, {"build": "byte-bpe", "vocab_size": 285, "split_digits": True, "corpus_rows": 50})
    return made


def play(model, prompts, *, max_units=60, longest=200):
    """All samples of some prompts, four of each, as a replica plays them."""
    context = EngineContext(
        model=model,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_in_flight=16,
        context_length=256,
        seed=5,
    )
    engine = EmbeddedEngine(EmbeddedOptions(), context)
    engine.start()
    config = EnvironmentConfig(plugin="chatter", timeout_s=10.0)
    events, found = queue.SimpleQueue(), {}
    with contextlib.ExitStack() as stack:
        stack.callback(engine.shutdown)
        pool = stack.enter_context(contextlib.closing(EnvironmentPool(config, seed=0)))
        pool.start()
        episodes = Episodes(
            environment=config,
            capabilities=EnvironmentCapabilities(),
            model=model,
            engine=engine,
            pool=pool,
            version=lambda: 0,
            post=events.put,
        )
        for index, prompt in enumerate(prompts):
            sampling = Sampling(temperature=0.8, max_units=max_units, num_samples=4)
            request = Request(request_id=str(index), prompt=model.encode(prompt), sampling=sampling, seed=index)
            done = functools.partial(found.__setitem__, index)
            episodes.begin(request, prompt, longest=longest, done=done)
        end = time.monotonic() + 60
        while len(found) < len(prompts):
            with contextlib.suppress(queue.Empty):
                events.get(timeout=0.1)()
            pool.check()
            engine.health()
            assert time.monotonic() < end
    return [found[index] for index in range(len(prompts))]


def transformers_own(module):
    """The same weights, with attention as transformers computes it."""
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(module.config), attn_implementation="eager")
    plain.load_state_dict(module.state_dict())
    return plain.eval()


@torch.no_grad()
def own_logprobs(module, ids, temperature):
    """Of each token but the first, by one plain forward of transformers."""
    logits = module(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].float() / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


def test_what_was_recorded_of_the_models_own_tokens_is_what_its_forward_says(model):
    prompts = [
        Prompt(text="What is 7? "),
        Prompt(text="What is 12? ", metadata={"words": True}),
        Prompt(text=(Message(role="user", content="What is 3?"),)),
    ]
    model.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>\n{% endfor %}assistant: "
    )
    groups = play(model, prompts)
    module = model.build(seed=5, dtype=torch.float32, device=torch.device("cpu"))
    plain = transformers_own(module)
    payloads = [each.generated.payload for group in groups for each in group]
    num_turns = []
    for payload in payloads:
        own = decided(payload)
        ids = [*values(payload, "prompt").tolist(), *values(payload, "completion").tolist()]
        whole = own_logprobs(plain, ids, 0.8)[len(values(payload, "prompt")) - 1 :]
        assert own[0]
        assert own[-1]
        assert len(values(payload, "versions")) == own.sum()
        np.testing.assert_allclose(values(payload, "logprobs"), whole[own], atol=2e-4, rtol=0)
        num_turns.append(1 + int((np.diff(own.astype(int)) == 1).sum()))
    assert max(num_turns) == 4
    # The trainer prices exactly these decisions, whatever they are packed with.
    for batch in model.pack(payloads, budget=600):
        logprobs_N = model.decide(module, batch, temperature=0.8).logprobs_N.detach().numpy()
        recorded = np.concatenate([values(payloads[index], "logprobs") for index in batch.sequences])
        assert batch.num_decisions == tuple(int(decided(payloads[index]).sum()) for index in batch.sequences)
        np.testing.assert_allclose(recorded, logprobs_N, atol=2e-4, rtol=0)


def test_observations_stand_where_they_were_said_and_nothing_is_encoded_anew(model):
    ((first, *_),) = play(model, [Prompt(text="What is 7? ", metadata={"words": True})])
    payload = first.generated.payload
    assert model.tokenizer.decode(values(payload, "prompt").tolist()) == "What is 7? Go. "
    own, tokens = decided(payload), values(payload, "completion")
    borders = [0, *(np.flatnonzero(np.diff(own.astype(int))) + 1).tolist(), len(own)]
    parts = [tokens[a:b].tolist() for a, b in itertools.pairwise(borders)]
    assert first.status is SampleStatus.OK
    assert len(parts) == 7
    for number, (turn, observation) in enumerate(zip(parts[::2], parts[1::2], strict=False), 1):
        text = model.tokenizer.decode(turn, skip_special_tokens=True)
        said = f"turn {number} had {len(text)} signs. Go on: "
        assert observation == model.tokenizer(said, add_special_tokens=False)["input_ids"]
        assert turn[-1] in model.text.stop_ids()


def test_a_dialogue_without_room_is_truncated_and_keeps_what_it_has(model):
    for limits in ({"max_units": 6}, {"longest": 40}):
        ((*samples,),) = play(model, [Prompt(text="What is 7? ")], **limits)
        for sample in samples:
            payload = sample.generated.payload
            assert sample.generated.num_units <= limits.get("max_units", 60)
            assert sum(payload.arrays[name].shape[0] for name in ("prompt", "completion")) <= limits.get("longest", 200)
        assert SampleStatus.TRUNCATED in {sample.status for sample in samples}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("name", "environment"), [("calculator", "calculator"), ("grpo-crop", "crop")])
def test_the_recipe_trains_on_dialogues(cosmos, name, environment):
    cosmos.timeout_s = 240.0
    recipe = str(ROOT / "recipes" / f"grpo-{environment}.toml")
    overrides = ("warmup.steps=150", "run.steps=6", "evaluation.prompts=12", "evaluation.interval=0")
    cosmos("run", recipe, *(part for each in overrides for part in ("--set", each)))
    folder = cosmos.folder / "runs" / name
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["outcome"] == "finished"
    assert summary["samples"]["consumed"] == 6 * 16 * 8
    assert not set(summary["samples"]["dropped"]) & {"environment_failed", "environment_timeout"}
    follower = Follower()
    follower.fold(entries(folder / "journal.sqlite"))
    steps = [timed.record for timed in follower.steps if timed.record.stage == 1]
    assert len(steps) == 6
    # How often the model asked something that could be answered, or shown, and what that was good for.
    asked = [step.rewards[environment] for step in steps]
    assert sum(asked) / len(asked) > 0.02, asked
    assert max(asked) < 4.0, asked
    (right,) = steps[0].rewards.keys() - {environment}
    assert all(step.rewards[right] > 0.0 and step.reward == step.rewards[right] for step in steps)
    # `cosmos eval` holds the same dialogues, greedily.
    evaluated = float(cosmos("eval", f"runs/{name}").partition("held-out accuracy")[2].split()[0])
    assert evaluated == pytest.approx(summary["heldout_accuracy_after"], abs=1e-3)
