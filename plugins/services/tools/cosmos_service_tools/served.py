"""A run's model, or an exported one, served by an engine in this process."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, cast

import attrs
import torch

from cosmos_core.config.job import Job
from cosmos_core.config.schema import EngineConfig, ModelConfig
from cosmos_core.devices import choose_device
from cosmos_core.errors import ConfigError
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import (
    EngineContext,
    Generated,
    Kind,
    Model,
    ModelContext,
    Request,
    RolloutEngine,
    Sampling,
)
from cosmos_core.rollout.episodes.player import sees_turns
from cosmos_core.run.export import TRAINED, export_run
from cosmos_core.scratch import scratch
from cosmos_core.storage import MARKS
from cosmos_core.types import Payload

_MAX_IN_FLIGHT: Final = 64


@attrs.frozen(kw_only=True, eq=False)
class Served:
    """A model that is being served; `sees` says whether turns of dialogues may show images."""

    model: Model
    engine: RolloutEngine
    context_length: int
    sees: bool = False

    def complete(self, payloads: Sequence[Payload], sampling: Sampling, seeds: Sequence[int]) -> list[list[Generated]]:
        """Complete each prompt `sampling.num_samples` times, no further than the model's context."""
        requests = []
        for index, (payload, seed) in enumerate(zip(payloads, seeds, strict=True)):
            room = self.room(payload)
            if room is not None and room < 1:
                raise ConfigError(
                    f"prompt {index + 1}: {payload.arrays['prompt'].shape[0]} tokens fill the model's context of "
                    f"{self.context_length}; shorten it"
                )
            fitting = attrs.evolve(
                sampling, max_units=sampling.max_units if room is None else min(sampling.max_units, room)
            )
            requests.append(Request(request_id=str(index), prompt=payload, sampling=fitting, seed=seed))
        return [handle.result() for handle in self.engine.submit(requests)]

    def room(self, prompt: Payload) -> int | None:
        """Units that the model's context leaves for a completion; None of what has no length, as what is denoised."""
        size = prompt.arrays["prompt"].shape[0] if prompt.kind == "tokens" else None
        return None if size is None else self.context_length - size


def check_folder(directory: Path) -> None:
    """Refuse a run or an exported model that is not there, by a ConfigError."""
    if not directory.is_dir():
        raise ConfigError(f"{directory}: there is no such folder; give a run's, or an exported model's")


@contextmanager
def serve(directory: Path, config: ModelConfig, engine: EngineConfig, *, threads: int = 1) -> Iterator[Served]:
    """Serve an exported model (a Hugging Face folder), in fp32 so that it says what `from_pretrained` would.

    `config` has the plugin and options of the model; where it comes from is replaced by `directory`.
    """
    check_folder(directory)
    if not any((directory / mark).is_file() for mark in MARKS):
        raise ConfigError(
            f"{directory}: no exported model (it has no {' or '.join(MARKS)}); make one with: cosmos export RUN"
        )
    torch.set_num_threads(threads)
    plugins = PluginSet.load([("model", config.plugin), ("engine", engine.plugin)])
    context = ModelContext(
        path=str(directory.resolve()),
        config=None,
        assets=directory.resolve(),
        trust_remote_code=config.trust_remote_code,
    )
    model = cast("Model", plugins.create("model", config.plugin, config.options, context, "model.options"))
    context_length = model.facts().context_length
    serving = EngineContext(
        model=model,
        dtype=torch.float32,
        device=choose_device("", "auto"),
        max_in_flight=_MAX_IN_FLIGHT,
        context_length=context_length,
        seed=0,
        replica=secrets.token_hex(6),
    )
    made = plugins.create("engine", engine.plugin, engine.options, serving, "rollout.engine.options")
    running = cast("RolloutEngine", made)
    running.start()
    takes_media: bool = plugins.provider("engine", engine.plugin).capabilities.media
    sees = sees_turns(model, takes_media=takes_media)
    try:
        yield Served(model=model, engine=running, context_length=context_length, sees=sees)
    finally:
        running.shutdown()


def model_config(source: Path, job: Job | None, plugin: str | None, *, trust_remote_code: bool) -> ModelConfig:
    """The model's options: those of the run that it is from, unless another plugin is named."""
    config = job.recipe.model if job is not None and plugin is None else ModelConfig(plugin=plugin or "hf")
    is_run = (source / "job.json").is_file()
    # As in evaluations, a run that is named says so itself.
    return attrs.evolve(config, trust_remote_code=trust_remote_code or (is_run and config.trust_remote_code))


@contextmanager
def exported(source: Path, step: str = "latest") -> Iterator[Path]:
    """The folder of the model itself, or of a checkpoint of the run, exported for as long as it is needed."""
    if not (source / "job.json").is_file():
        yield source
        return
    with scratch("generate") as folder:
        export_run(source, step=step, output=folder / "model", dtype=TRAINED)
        yield folder / "model"


def is_of_tokens(kind: Kind, name: str) -> bool:
    """True if a model takes tokens, or an engine makes them."""
    return "tokens" in PluginSet.load([(kind, name)]).provider(kind, name).capabilities.payload_kinds
