"""Completions of an exported model, by an engine in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, cast

import attrs
import torch

from cosmos_core.config.job import Job
from cosmos_core.config.loading import load_job
from cosmos_core.config.schema import EngineConfig, ModelConfig
from cosmos_core.errors import ConfigError
from cosmos_core.plugin.selection import PluginSet
from cosmos_core.protocols import (
    EngineContext,
    FinishReason,
    Generated,
    Model,
    ModelContext,
    Request,
    RolloutEngine,
    Sampling,
)
from cosmos_core.storage import MARKS
from cosmos_core.types import Message, Payload, Prompt

_MAX_IN_FLIGHT: Final = 64
_DEFAULT_UNITS: Final = 256


@attrs.frozen(kw_only=True, eq=False)
class Served:
    """A model that is being served."""

    model: Model
    engine: RolloutEngine
    context_length: int

    def complete(self, payloads: Sequence[Payload], sampling: Sampling, seed: int) -> list[list[Generated]]:
        """Complete each prompt `sampling.num_samples` times, no further than the model's context.

        Raises:
            ConfigError: A prompt fills the context.
            EngineError: The engine failed.
        """
        requests = []
        for index, payload in enumerate(payloads):
            room = self.room(payload)
            if room is not None and room < 1:
                raise ConfigError(
                    f"prompt {index + 1}: {payload.arrays['prompt'].shape[0]} tokens fill the model's context of "
                    f"{self.context_length}; shorten it"
                )
            fitting = attrs.evolve(
                sampling, max_units=sampling.max_units if room is None else min(sampling.max_units, room)
            )
            requests.append(Request(request_id=str(index), prompt=payload, sampling=fitting, seed=seed + index))
        return [handle.result() for handle in self.engine.submit(requests)]

    def room(self, prompt: Payload) -> int | None:
        """Units that the model's context leaves for a completion; None of what has no length, as what is denoised."""
        size = prompt.arrays["prompt"].shape[0] if prompt.kind == "tokens" else None
        return None if size is None else self.context_length - size


def run_of(model: Path) -> Job | None:
    """The run whose export this folder is (it lies within the run's folder); None if it is of no run."""
    for folder in (model, *model.resolve().parents[:2]):
        if (folder / "job.json").is_file():
            return load_job(folder)
    return None


@contextmanager
def serve(directory: Path, config: ModelConfig, engine: EngineConfig, *, threads: int = 1) -> Iterator[Served]:
    """Serve the exported model in `directory`, in fp32 so that it says what `from_pretrained` would.

    Args:
        directory: A Hugging Face folder.
        config: Plugin and options of the model; where it comes from is replaced by `directory`.
        engine: The engine and its options.
        threads: CPU threads.

    Raises:
        ConfigError: The folder holds no model, or an option is wrong.
        PluginError: A plugin failed.
        EngineError: The engine cannot serve this model.
    """
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
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        max_in_flight=_MAX_IN_FLIGHT,
        context_length=context_length,
        seed=0,
    )
    made = plugins.create("engine", engine.plugin, engine.options, serving, "rollout.engine.options")
    running = cast("RolloutEngine", made)
    running.start()
    try:
        yield Served(model=model, engine=running, context_length=context_length)
    finally:
        running.shutdown()


def complete_prompts(
    directory: Path,
    prompts: Sequence[str],
    *,
    plugin: str | None,
    max_units: int | None,
    temperature: float,
    num_samples: int,
    seed: int,
    as_chat: bool = False,
    trust_remote_code: bool = False,
) -> list[list[str]]:
    """Complete texts; the completions of each.

    Args:
        directory: An exported model.
        prompts: Plain texts.
        plugin: Model plugin; that of the run the model is from if None, else `hf`.
        max_units: Longest completion; that of the run if None, else 256.
        temperature: 0 is greedy.
        num_samples: Completions of each prompt.
        seed: Of the draws.
        as_chat: Whether each prompt is a user's turn, to be put through the chat template.
        trust_remote_code: Whether code inside the model's folder may run. That a run found beside the model allowed it
            does not count: whoever made the folder may have made the run, too.

    Raises:
        ConfigError: Greedy with several samples, or the folder holds no model.
        DataError: A prompt cannot be encoded.
        EngineError: The engine failed.
    """
    if temperature == 0.0 and num_samples > 1:
        raise ConfigError(f"--samples: {num_samples} greedy completions are all the same; set --temperature above 0")
    job = run_of(directory)
    config = job.recipe.model if job is not None and plugin is None else ModelConfig(plugin=plugin or "hf")
    config = attrs.evolve(config, trust_remote_code=trust_remote_code)
    if max_units is None:
        max_units = job.recipe.rollout.sampling.max_units if job is not None else _DEFAULT_UNITS
    sampling = Sampling(temperature=temperature, max_units=max_units, num_samples=num_samples)
    with serve(directory, config, EngineConfig()) as served:
        texts = [(Message(role="user", content=text),) if as_chat else text for text in prompts]
        payloads = [served.model.encode(Prompt(text=text)) for text in texts]
        return [
            [served.model.decode(each.payload) + _mark(each) for each in samples]
            for samples in served.complete(payloads, sampling, seed)
        ]


def _mark(generated: Generated) -> str:
    return " […]" if generated.reason is FinishReason.LENGTH else ""
