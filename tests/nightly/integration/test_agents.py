"""Agents against the real engine: programs of the OpenAI Agents SDK, of Node, of a file; and a thousand sessions."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import queue
import shutil
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from cosmos_core.config.loading import load_recipe
from cosmos_core.config.schema import AgentConfig, EnvironmentConfig
from cosmos_core.models import HuggingFaceModel, HuggingFaceOptions
from cosmos_core.models.documents import documents_of, pack_samples
from cosmos_core.models.tokens import decided, values
from cosmos_core.protocols import EngineContext, EnvironmentCapabilities, ModelContext, Request, Sampling
from cosmos_core.rollout.embedded.engine import EmbeddedEngine
from cosmos_core.rollout.embedded.options import EmbeddedOptions
from cosmos_core.rollout.episodes.player import player_of, serving
from cosmos_core.rollout.episodes.pool import EnvironmentPool
from cosmos_core.types import Prompt, SampleStatus

ROOT = Path(__file__).parents[3]
CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "tie_word_embeddings": True,
}
TEMPERATURE = 0.8


class Chatty(HuggingFaceModel):
    """A model that often stops: a random one would hardly ever."""

    def make_text_encoder(self):
        made = super().make_text_encoder()
        made.stop_ids = lambda: frozenset(range(0, 300, 12)) | {made.stop_id()}
        return made


class Recorded:
    """An engine, and all that it has generated."""

    def __init__(self, engine):
        self.engine, self.made = engine, []

    def submit(self, requests):
        handles = self.engine.submit(requests)
        for handle in handles:
            handle.add_done_callback(lambda handle: self.made.extend(handle.result(0)))
        return handles

    def abort(self, names):
        self.engine.abort(names)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    assets = tmp_path_factory.mktemp("assets")
    recipe = load_recipe(ROOT / "recipes/agent-calculator.toml", overrides=(), selections={}, refuse=None)
    options = HuggingFaceOptions(chat_template=recipe.model.options["chat_template"])
    made = Chatty(options, ModelContext(path=None, config=CONFIG, assets=assets))
    corpus = [f'user: What is {n} times 7? <tool_call>{{"name": "calculate"}}</tool_call> #### {n}' for n in range(50)]
    made.prepare(corpus, {"build": "byte-bpe", "vocab_size": 300, "split_digits": True, "corpus_rows": 50})
    return made


@pytest.fixture(scope="module")
def engine(model):
    context = EngineContext(
        model=model,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_in_flight=64,
        context_length=1024,
        seed=5,
    )
    made = EmbeddedEngine(EmbeddedOptions(), context)
    made.start()
    yield made
    made.shutdown()


def play(model, engine, config, tasks, *, num_samples=2, max_units=400, timeout_s=200.0):
    """All samples of some tasks, and what was counted."""
    events, found = queue.SimpleQueue(), {}
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(contextlib.closing(EnvironmentPool(config, seed=0)))
        pool.start()
        capabilities = EnvironmentCapabilities(calls_model=True, rewards=True)
        agents = player_of(
            config,
            capabilities,
            name="run",
            model=model,
            engine=engine,
            pool=pool,
            version=lambda: 0,
            post=events.put,
        )
        check = stack.enter_context(serving(agents))
        for index, prompt in enumerate(tasks):
            sampling = Sampling(temperature=TEMPERATURE, max_units=max_units, num_samples=num_samples)
            request = Request(request_id=str(index), prompt=model.encode(prompt), sampling=sampling, seed=index)
            agents.begin(request, prompt, longest=1000, done=functools.partial(found.__setitem__, index))
        end = time.monotonic() + timeout_s
        while len(found) < len(tasks):
            with contextlib.suppress(queue.Empty):
                events.get(timeout=0.1)()
            pool.check()
            check()
            assert time.monotonic() < end
    return [each for index in range(len(tasks)) for each in found[index]], agents.counts


def check_recorded(model, played, made):
    """Every id that was trained on is one that the engine made, and its log-prob that of the trainer."""
    payloads = [each.generated.payload for each in played]
    parts = []
    for payload in payloads:
        for document in documents_of(payload):
            own, ids = decided(document), values(document, "completion")
            borders = [0, *(np.flatnonzero(np.diff(own.astype(int))) + 1).tolist(), len(own)]
            parts += [tuple(ids[a:b].tolist()) for a, b in itertools.pairwise(borders) if a < b and own[a]]
    said = [tuple(values(each.payload, "completion").tolist()) for each in made]
    assert collections.Counter(parts) == collections.Counter(said)
    module = model.build(seed=5, dtype=torch.float32, device=torch.device("cpu"))
    recorded = [values(payload, "logprobs") for payload in payloads]
    for batch in pack_samples(model, payloads, budget=1500):
        logprobs_N = model.decide(module, batch, temperature=TEMPERATURE).logprobs_N.detach().numpy()
        firsts = [span.first for span in batch.spans] or [0] * len(batch.sequences)
        expected = [
            recorded[index][first : first + number]
            for index, first, number in zip(batch.sequences, firsts, batch.num_decisions, strict=True)
        ]
        np.testing.assert_allclose(np.concatenate(expected), logprobs_N, atol=1e-5, rtol=0)


def test_a_program_of_the_sdk_is_recorded_in_the_engines_own_ids(model, engine):
    options = {"agent": "cosmos_environment_openai_agents.calculator:calculator", "input": "What is {sum}?"}
    config = EnvironmentConfig(plugin="openai-agents", options=options)
    recorded = Recorded(engine)
    tasks = [Prompt(text="x", metadata={"sum": f"{n}*7"}) for n in range(6)]
    played, counts = play(model, recorded, config, tasks)
    assert {each.status for each in played} <= {SampleStatus.OK, SampleStatus.TRUNCATED}
    assert counts["agent_calls"] == len(recorded.made) >= 12
    check_recorded(model, played, recorded.made)


NODE = """
import OpenAI from "openai";
import fs from "node:fs";

const task = JSON.parse(fs.readFileSync(0, "utf8"));
const client = new OpenAI();
const model = process.env.OPENAI_MODEL;
const parameters = { type: "object", properties: { a: { type: "number" } } };
const tools = [{ type: "function", function: { name: "calculate", parameters } }];
const messages = [{ role: "system", content: "Be brief." }, { role: "user", content: task.text }];
for (let turn = 0; turn < 3; turn++) {
  const stream = client.chat.completions.stream({ model, messages, tools, max_tokens: 40 });
  const reply = await stream.finalChatCompletion();
  const { message } = reply.choices[0];
  messages.push(message);
  for (const call of message.tool_calls ?? []) messages.push({ role: "tool", tool_call_id: call.id, content: "7" });
  messages.push({ role: "user", content: `Again, ${turn}.` });
}
// A compacted history.
await client.chat.completions.create({ model, messages: [{ role: "user", content: "In short?" }], max_tokens: 20 });
const answer = await client.responses.create({ model, input: "And by the other API?", max_output_tokens: 20 });
if (answer.object !== "response") process.exit(2);
console.log(0.5);
"""


def test_a_client_of_node_is_recorded_in_the_engines_own_ids(model, engine, tmp_path):
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed: no client of Node")
    (tmp_path / "agent.mjs").write_text(NODE)
    (tmp_path / "package.json").write_text('{"private": true}')
    subprocess.run(["npm", "install", "--silent", "openai@7"], cwd=tmp_path, check=True, timeout=120)
    options = {"command": ["node", "agent.mjs"], "directory": str(tmp_path), "reward": True}
    config = EnvironmentConfig(plugin="command", options=options)
    recorded = Recorded(engine)
    played, counts = play(model, recorded, config, [Prompt(text=f"What is {n}?") for n in range(3)])
    assert [(each.status, each.reward) for each in played] == [(SampleStatus.OK, 0.5)] * 6, played[0].detail
    assert counts == {"agent_calls": 30, "agent_calls_refused": 0, "tool_calls_malformed": 0, "branches": 12}
    for each in played:
        first, *others = documents_of(each.generated.payload)
        assert len(others) == 2
        borders = np.diff(np.concatenate([[0], decided(first).astype(int)])) == 1
        assert borders.sum() == 3
    check_recorded(model, played, recorded.made)


SCRIPTED = '''
import asyncio
import json

import aiohttp

CLIENT = None


async def agent(session, task):
    """What a row says: work, hang, die, send nonsense, use another token."""
    global CLIENT
    CLIENT = CLIENT or aiohttp.ClientSession()
    what = task.metadata["what"]
    if what == "raise":
        raise RuntimeError("broken")
    if what == "hang":
        await asyncio.sleep(600)
    url = session.base_url if what != "stranger" else session.base_url.replace(session.key, "0" * 32)
    messages = [{"role": "user", "content": task.text}]
    for turn in range(3):
        body = {"model": session.model, "messages": messages, "max_tokens": 8}
        data = json.dumps(body) if what != "nonsense" else "{nonsense"
        async with CLIENT.post(f"{url}/chat/completions", data=data) as reply:
            answer = await reply.json()
            if reply.status != 200:
                raise RuntimeError(answer["error"]["message"])
        messages += [answer["choices"][0]["message"], {"role": "user", "content": str(turn)}]
    return 1.0
'''


@pytest.mark.timeout(300)
def test_a_thousand_sessions_at_once_none_of_them_lost(model, engine, tmp_path):
    (tmp_path / "mine.py").write_text(SCRIPTED)
    config = EnvironmentConfig(
        plugin=f"{tmp_path}/mine.py:agent", agent=AgentConfig(concurrency=1000, timeout_s=60.0), workers=1
    )
    kinds = {"work": 920, "raise": 20, "hang": 20, "stranger": 20, "nonsense": 20}
    whats = [what for what, number in kinds.items() for _ in range(number)]
    tasks = [Prompt(text=f"Task {n}.", metadata={"what": what}) for n, what in enumerate(whats)]
    before = psutil.Process().memory_info().rss
    peak = [0]
    watching = threading.Event()

    def watch():
        while not watching.wait(0.5):
            peak[0] = max(peak[0], psutil.Process().memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        played, counts = play(model, engine, config, tasks, num_samples=1, max_units=60)
    finally:
        watching.set()
        watcher.join()
    by_kind = collections.defaultdict(collections.Counter)
    for what, each in zip(whats, played, strict=True):
        by_kind[what][each.status.value] += 1
    assert {what: dict(found) for what, found in by_kind.items()} == {
        "work": {"ok": 920},
        "raise": {"environment_failed": 20},
        "hang": {"environment_timeout": 20},
        "stranger": {"environment_failed": 20},
        "nonsense": {"environment_failed": 20},
    }
    assert counts["agent_calls"] == 3 * 920
    assert counts["agent_calls_refused"] == 40
    assert counts["branches"] == 0
    assert (peak[0] - before) / 1e6 < 400, "MB"
