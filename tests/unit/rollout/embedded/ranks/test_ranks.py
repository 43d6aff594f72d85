"""Engines whose model is split over two processes, against the same engine in one."""

from __future__ import annotations

import os
import signal
import time

import attrs
import numpy as np
import pytest
import torch
import torch.distributed as dist

from cosmos_core.errors import AttestationError, CosmosError, EngineError, EngineLostError
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import EngineContext, ModelContext, ModelSource, Record, Request, Sampling
from cosmos_core.rollout.embedded.engine import EmbeddedEngine
from cosmos_core.rollout.embedded.options import EmbeddedOptions
from cosmos_core.rollout.embedded.ranks import team
from cosmos_core.rollout.embedded.ranks.lead import Lead
from cosmos_core.rollout.embedded.ranks.process import RankProcess
from cosmos_core.rollout.embedded.ranks.team import Team
from cosmos_core.rollout.serving.updates import Update
from cosmos_core.testing.conformance.engine.pricing import Pricer, stopping_at, twin
from cosmos_core.testing.ranks import forked_ranks
from cosmos_core.types import Prompt
from cosmos_core.weights import slices
from cosmos_core.weights.digest import digest_of

ROUNDING = 3e-5
"""Of log-probs in float32, in other orders of summation; processors differ in it."""
TEXTS = ("Two and two", "Once upon a time there was", "x", "What is 6 times 7?")
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
MODELS = {
    "llama": {"model_type": "llama", **SIZES, "tie_word_embeddings": False},
    # One head of keys for both processes, and a vocabulary of which they have unequal parts.
    "qwen3": {"model_type": "qwen3", **SIZES, "head_dim": 8, "num_key_value_heads": 1, "vocab_size": 271},
    "gpt_oss": {
        "model_type": "gpt_oss",
        **SIZES,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
    },
}


@pytest.fixture(autouse=True)
def _ranks():
    torch.set_num_threads(1)
    with forked_ranks():
        yield


@pytest.fixture
def source(tmp_path, request):
    config = MODELS[getattr(request, "param", "qwen3")]
    context = ModelContext(path=None, config=config, assets=tmp_path)
    return ModelSource(plugin="hf", options={}, context=context)


@pytest.fixture
def model(source):
    made = PluginSet.load([("model", "hf")]).create("model", "hf", {}, source.context)
    made.prepare(TEXTS, {"build": "byte-bpe", "vocab_size": 270, "split_digits": True})
    return stopping_at(made, ())


@pytest.fixture
def start(model, source):
    started = []

    def begin(tensor_parallel=2, **changes):
        context = EngineContext(
            model=model,
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_in_flight=4,
            context_length=128,
            seed=1,
            tensor_parallel=tensor_parallel,
            source=source,
        )
        engine = EmbeddedEngine(EmbeddedOptions(cache_step=8), attrs.evolve(context, **changes))
        started.append(engine)
        engine.start()
        return engine

    yield begin
    for engine in started:
        engine.shutdown()


def requests(model, **sampling):
    return [
        Request(
            request_id=str(index),
            prompt=model.encode(Prompt(text=text)),
            sampling=Sampling(
                **{"max_units": 30 - 7 * index, "num_samples": 1 + bool(sampling.get("temperature", 1)), **sampling}
            ),
            seed=index,
        )
        for index, text in enumerate(TEXTS)
    ]


def generate(engine, asked):
    return [each for handle in engine.submit(asked) for each in handle.result(60)]


def tokens(generated):
    return np.frombuffer(generated.payload.arrays["completion"].data, np.int32).tolist()


def logprobs(generated):
    return np.frombuffer(generated.payload.arrays["logprobs"].data, np.float32)


def write(engine, tensors, version=1):
    engine.begin_update(version)
    for rank, held in engine.layout().items():
        for piece, _ in held:
            whole = slices.whole(piece.name, tuple(tensors[piece.name].shape))
            engine.write(rank, piece, tensors[piece.name][slices.within(piece, whole)])


@pytest.mark.parametrize(
    "source",
    ["qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "gpt_oss"))],
    indirect=True,
)
def test_it_generates_and_scores_what_one_process_does(start, model):
    alone, spread = start(1), start(2)
    for sampling in ({"temperature": 0.0}, {"temperature": 0.7}):
        expected, found = (generate(engine, requests(model, **sampling)) for engine in (alone, spread))
        assert [tokens(each) for each in found] == [tokens(each) for each in expected]
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(logprobs(one), logprobs(other), atol=ROUNDING, rtol=0)
        scores = [engine.score([each.payload for each in expected], temperature=0.7) for engine in (alone, spread)]
        for one, other in zip(*scores, strict=True):
            torch.testing.assert_close(one, other, atol=ROUNDING, rtol=0)


def test_no_rank_holds_what_it_does_not_need(start):
    layout = start(2).layout()
    whole = {name for name, start_, shape in _boxes(layout[0]) if (name, start_, shape) in set(_boxes(layout[1]))}
    assert all("norm" in name or "k_proj" in name or "v_proj" in name for name in whole)
    sizes = [sum(slices.size(piece) for piece, _ in held) for held in layout.values()]
    assert max(sizes) < 0.56 * sum(sizes)


def _boxes(held):
    return [(piece.name, piece.start, piece.shape) for piece, _ in held]


def test_an_update_in_flight_is_loaded_on_every_rank(start, model, kit, monkeypatch):
    paused = kit.pause_when(monkeypatch, lambda engine: engine.stats().generated_units >= 20)
    engine, pricer = start(2), Pricer(model, seed=1)
    (handle,) = engine.submit(requests(model, max_units=40, num_samples=3)[:1])
    assert paused.wait(20)
    write(engine, pricer.tensors(1), version=3)
    assert engine.commit_update("recompute") == digest_of(pricer.tensors(1))
    engine.resume()
    for generated in handle.result(60):
        versions = np.frombuffer(generated.payload.arrays["versions"].data, np.int32)
        assert set(versions.tolist()) == {0, 3}
        for weights, version in ((0, 0), (1, 3)):
            (expected,) = pricer.logprobs([generated.payload], temperature=1.0, weights=weights)
            made = versions == version
            np.testing.assert_allclose(logprobs(generated)[made], expected.numpy()[made], atol=1e-4)


def corrupt(engine, name):
    """Flip a bit of what is about to be loaded by rank 1."""
    written = engine._update.stagings[1].tensors[name]
    written.view(torch.int32).flatten()[:1].bitwise_xor_(1)


def test_a_wrong_bit_in_the_part_of_one_rank_changes_the_digest(start, model):
    engine, tensors = start(2), Pricer(model, seed=1).tensors(1)
    write(engine, tensors)
    corrupt(engine, "model.layers.1.mlp.down_proj.weight")
    assert engine.commit_update() != digest_of(tensors)
    write(engine, tensors)
    assert engine.commit_update() == digest_of(tensors)


def test_a_wrong_bit_where_ranks_should_be_equal_is_named(start, model):
    engine, tensors = start(2), Pricer(model, seed=1).tensors(1)
    write(engine, tensors)
    corrupt(engine, "model.norm.weight")
    with pytest.raises(AttestationError, match=r"model.norm.weight: ranks 0 and 1 of the engine hold other values"):
        engine.commit_update()
    engine.abort_update()
    write(engine, tensors)
    assert engine.commit_update() == digest_of(tensors)


def test_a_wrong_bit_in_the_first_rank_is_named_as_in_the_others(start, model, monkeypatch):
    engine, tensors = start(2), Pricer(model, seed=1).tensors(1)
    name, real = "model.layers.1.mlp.down_proj.weight", Update.apply

    def spoil(update):
        real(update)
        update._tensors[name].view(torch.int32)[0, 0].bitwise_xor_(1)

    with monkeypatch.context() as patched:
        patched.setattr(Update, "apply", spoil)
        write(engine, tensors)
        with pytest.raises(AttestationError, match=rf"{name}: rank 0 of the engine holds something else than was"):
            engine.commit_update()
        engine.abort_update()
    write(engine, tensors)
    assert engine.commit_update() == digest_of(tensors)


@pytest.mark.parametrize("is_busy", [False, True])
def test_the_end_of_a_rank_ends_the_engine_promptly(start, model, is_busy):
    with forked_ranks() as ranks:
        engine = start(2)
        handles = engine.submit(requests(model, max_units=100, num_samples=16)) if is_busy else []
        while is_busy and engine.stats().generated_units < 10:
            time.sleep(0.01)
        os.kill(ranks[0].pid, signal.SIGKILL)
        killed = time.monotonic()
        for handle in handles:
            with pytest.raises(EngineLostError, match="rank 1 of the 2 ranks of the engine ended: signal SIGKILL"):
                handle.result(20)
        assert "rank 1 of the 2 ranks of the engine ended: signal SIGKILL" in failure_of(engine, EngineLostError)
        assert time.monotonic() < killed + 10
        with pytest.raises(EngineLostError, match="rank 1 of the 2 ranks"):
            engine.abort(["0"])


def test_a_rank_that_answers_too_late_ends_the_engine(start, model, monkeypatch):
    with forked_ranks() as ranks:
        engine, tensors = start(2), Pricer(model, seed=1).tensors(1)
        write(engine, tensors)
        # Its answer would be taken for that to the next update.
        monkeypatch.setattr(team, "_ANSWER_S", 0.2)
        os.kill(ranks[0].pid, signal.SIGSTOP)
        with pytest.raises(EngineLostError, match=r"rank 1 of the engine did not answer within 0\.2 s"):
            engine.commit_update()
        assert "rank 1 of the engine did not answer" in failure_of(engine, EngineLostError)


def test_a_rank_that_cannot_be_told_ends_the_engine(start, model, monkeypatch):
    def send(process, message, descriptor=None):
        raise EngineLostError("rank 1 of the engine cannot be told what to do: timed out")

    engine = start(2)
    write(engine, Pricer(model, seed=1).tensors(1))
    monkeypatch.setattr(team, "_DEATH_S", 0.01)
    monkeypatch.setattr(RankProcess, "send", send)
    with pytest.raises(EngineError, match="rank 1 of the engine cannot be told what to do: timed out"):
        engine.commit_update()
    assert "cannot be told what to do" in failure_of(engine, EngineLostError)


def test_the_first_rank_waits_for_the_others_before_the_first_collective(start, monkeypatch):
    # A rank may take longer to build its part than a collective may take.
    order = []
    for owner, name in ((Lead, "meet"), (EmbeddedEngine, "_serve_with")):
        real = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *args, real=real, name=name: (order.append(name), real(*args), order.append(name))
        )
    start(2)
    assert order == ["meet", "meet", "_serve_with", "_serve_with"]


def test_the_end_of_a_rank_while_the_engine_starts_is_not_missed(start, monkeypatch):
    real = EmbeddedEngine._serve_with

    def serve(engine, *args):
        real(engine, *args)
        os.kill(ranks[0].pid, signal.SIGKILL)
        # Until the engine was told, which takes no commands yet.
        while engine._loss is None:
            time.sleep(0.01)

    monkeypatch.setattr(EmbeddedEngine, "_serve_with", serve)
    with (
        forked_ranks() as ranks,
        pytest.raises(EngineLostError, match="rank 1 of the 2 ranks of the engine ended: signal"),
    ):
        start(2)
    assert not dist.is_initialized()


def failure_of(engine, kind=EngineError):
    """Why the engine cannot serve any more."""
    for _ in range(1000):
        try:
            engine.health()
        except kind as error:
            return str(error)
        time.sleep(0.01)
    return "it can"


def test_what_a_rank_fails_of_is_told(start, source):
    gone = attrs.evolve(source, options={"no_such_option": 1})
    with pytest.raises(EngineError, match=r"rank 1 of the 2 ranks of the engine ended: .*no_such_option") as caught:
        start(2, source=gone)
    # Another one would fail of it, too.
    assert not isinstance(caught.value, EngineLostError)


def test_an_engine_that_could_not_start_leaves_room_for_another(start, model):
    with pytest.raises(CosmosError, match=r"3 does not divide the 4 heads"):
        start(3)
    generate(start(2), requests(model)[:1])


def test_a_second_engine_of_several_ranks_is_refused_and_the_first_goes_on(start, model):
    first = start(2)
    with pytest.raises(EngineError, match=r"has a torch\.distributed process group"):
        start(2)
    generate(first, requests(model))
    write(first, Pricer(model, seed=1).tensors(1))
    first.commit_update()


@pytest.mark.parametrize("is_late", [False, True])
def test_a_process_group_of_somebody_else_stays(start, monkeypatch, is_late):
    def found():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    if is_late:
        # It comes while the ranks start.
        send = Team.tell
        monkeypatch.setattr(Team, "tell", lambda team, message: (found(), send(team, message)))
    else:
        found()
    try:
        with pytest.raises(EngineError, match=r"has a torch\.distributed process group"):
            start(2)
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_what_it_only_does_in_one_process_is_refused(start, model):
    with pytest.raises(EngineError, match=r"rollout.mesh.tp: 2 with rollout.quantization = 'fp8'"):
        start(2, quantization="fp8")
    with pytest.raises(EngineError, match=r"rollout.mesh.tp: 2 ranks, but nothing says how .*EngineContext.source"):
        start(2, source=None)
    record = Record(name="routes", dtype="uint8", shape=(2,), option="model.options.router_replay")
    recording = twin(model, records=lambda _: (record,), record=lambda _, module: dict)
    with pytest.raises(EngineError, match=r"rollout.mesh.tp: 2, and model.options.router_replay asks for a record"):
        start(2, model=recording)
