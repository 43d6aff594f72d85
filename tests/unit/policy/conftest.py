"""Tiny models, and algorithms simple enough to compute by hand."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch

from cosmos_core.config.job import Stage
from cosmos_core.config.schema import OptimizerConfig, PolicyConfig
from cosmos_core.models import HuggingFaceModel, HuggingFaceOptions
from cosmos_core.policy.batches.batch import Counts, TrainSequence
from cosmos_core.policy.processes.world import single_world
from cosmos_core.policy.training.trainer import Trainer
from cosmos_core.protocols import Aggregation, Loss, ModelContext, PlainAlgorithm
from cosmos_core.types import Array, Payload
from tests.streams import Streams
from tests.tiny import QWEN3

torch.set_num_threads(1)

CPU = torch.device("cpu")


@pytest.fixture
def streams(monkeypatch):
    return Streams(monkeypatch)


@pytest.fixture
def config():
    return dict(QWEN3)


@pytest.fixture
def model(tmp_path):
    return HuggingFaceModel(HuggingFaceOptions(), ModelContext(path=None, config=QWEN3, assets=tmp_path / "assets"))


def payload(prompt, completion, *, version=0, logprobs=None):
    """A rollout's payload; made-up log-probs if none are given."""
    completion = np.asarray(completion, dtype=np.int32)
    logprobs = np.full(len(completion), -2.0) if logprobs is None else np.asarray(logprobs)
    arrays = {
        "prompt": np.asarray(prompt, dtype=np.int32),
        "completion": completion,
        "logprobs": logprobs.astype(np.float32),
        "versions": np.full(len(completion), version, dtype=np.int32),
    }
    return Payload(
        kind="tokens",
        arrays={name: Array(dtype=str(a.dtype), shape=a.shape, data=a.tobytes()) for name, a in arrays.items()},
    )


def random_sequences(number, *, seed=0, vocab=64):
    generator = np.random.default_rng(seed)
    return [
        TrainSequence(
            payload=payload(
                generator.integers(0, vocab, generator.integers(1, 9)),
                generator.integers(0, vocab, generator.integers(1, 12)),
            ),
            advantage=float(generator.normal()),
            place=place,
        )
        for place in range(number)
    ]


def counts_of(sequences):
    return Counts(
        sequences=len(sequences),
        decisions=sum(s.payload.arrays["completion"].shape[0] for s in sequences),
        prompt_units=sum(s.payload.arrays["prompt"].shape[0] for s in sequences),
        trained=len(sequences),
    )


@attrs.frozen(kw_only=True)
class Reinforce(PlainAlgorithm):
    """-A · log π, or what `loss_of` says."""

    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    constant_length: int = 10
    old_logprobs: str = "none"
    needs_entropy: bool = False
    skips_zero_advantage: bool = True
    loss_of: object = None
    seen: list = attrs.field(factory=list)

    def admit(self, group):
        return None

    def advantages(self, groups):
        return [[sample.reward for sample in group.samples] for group in groups]

    def loss(self, decisions):
        self.seen.append(decisions)
        if self.loss_of is not None:
            return self.loss_of(decisions)
        return Loss(
            loss_N=-decisions.advantages_N * decisions.logprobs_N, metrics={"advantage": decisions.advantages_N}
        )


def stage_of(optimizer=None, *, index=0, steps=100, first_step=0):
    return Stage(
        index=index,
        key="algorithm",
        plugin="reinforce",
        options={},
        steps=steps,
        prompts_per_step=4,
        optimizer=optimizer or OptimizerConfig(lr=1e-2),
        first_step=first_step,
    )


def make_trainer(model, algorithm=None, *, optimizer=None, seed=0, frozen=None, critic=None, **policy):
    settings = PolicyConfig(**{"precision": "fp32", **policy})
    module = model.build(seed=seed, dtype=torch.float32, device=CPU)
    trainer = Trainer(
        model=model,
        module=module,
        policy=settings,
        device=CPU,
        world=single_world(),
        frozen=frozen or {},
        critic=critic,
    )
    trainer.begin_stage(stage_of(optimizer), algorithm or Reinforce(), 1.0)
    return trainer


@pytest.fixture
def kit():
    """The functions above, for tests that import nothing from one another."""
    import types

    return types.SimpleNamespace(
        Reinforce=Reinforce,
        counts_of=counts_of,
        make_trainer=make_trainer,
        payload=payload,
        random_sequences=random_sequences,
        stage_of=stage_of,
        CPU=CPU,
        QWEN3=QWEN3,
    )
