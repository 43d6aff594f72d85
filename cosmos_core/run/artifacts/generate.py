"""Completes prompts with an exported model, or a run's, by an engine in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, cast

import attrs
import torch

from cosmos_core.config.job import Job
from cosmos_core.config.loading import run_of
from cosmos_core.config.schema import EngineConfig, ModelConfig
from cosmos_core.errors import ConfigError
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import (
    EngineContext,
    FinishReason,
    Generated,
    Kind,
    Model,
    ModelContext,
    Request,
    RolloutEngine,
    Sampling,
)
from cosmos_core.protocols.vision import VisionModel
from cosmos_core.protocols.world import WorldModel
from cosmos_core.rollout.media import write_media
from cosmos_core.run.artifacts.export import TRAINED, export_run
from cosmos_core.storage import MARKS
from cosmos_core.storage.scratch import scratch
from cosmos_core.types import JSON, Message, Payload, Prompt
from cosmos_core.types.prompt import GIVEN_FRAMES

_MAX_IN_FLIGHT: Final = 64
_DEFAULT_UNITS: Final = 256
_DEFAULT_STEPS: Final = 32


@attrs.frozen(kw_only=True, eq=False)
class Served:
    """A model that is being served."""

    model: Model
    engine: RolloutEngine
    context_length: int

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
    source: Path,
    prompts: Sequence[str],
    *,
    plugin: str | None,
    max_units: int | None,
    temperature: float,
    num_samples: int,
    seed: int,
    output: Path,
    media: Sequence[str] = (),
    given_frames: int | None = None,
    as_chat: bool = False,
    system: str | None = None,
    trust_remote_code: bool = False,
) -> list[list[str]]:
    """Complete texts; the completions of each, or where they were written if they are images or videos.

    Args:
        source: A run's folder, of which it takes the latest checkpoint, or an exported model.
        prompts: Plain texts.
        plugin: Model plugin; that of the run the model is from if None, else `hf`.
        max_units: Longest completion, or denoising steps; those of the run if None, else 256, or 32 steps.
        temperature: 0 is greedy, or without noise in the steps.
        num_samples: Completions of each prompt.
        seed: Of the draws for the first prompt; each other one, and each other denoised sample, has the next one.
        output: Folder for images and videos: `prompt-K-sample-N.*`. Those that are there are replaced.
        media: Locations of images and videos that each prompt shows, in order.
        given_frames: How many last frames of a video a world model goes on from; as in the run if None.
        as_chat: Whether each prompt is a user's turn, to be put through the chat template.
        system: The system's turn before it; then each prompt is one.
        trust_remote_code: Whether code inside the model's folder may run. That a run found beside the model allowed it
            does not count: whoever made the folder may have made the run, too.

    Raises:
        ConfigError: Greedy with several samples, the folder holds no model, it takes no media or wants some, or
            `output` cannot be written to.
        DataError: A prompt cannot be encoded, or media cannot be read.
        EngineError: The engine failed.
    """
    job = run_of(source)
    config = model_config(source, job, plugin, trust_remote_code=trust_remote_code)
    is_text = is_of_tokens("model", config.plugin)
    if is_text and temperature == 0.0 and num_samples > 1:
        raise ConfigError(f"--samples: {num_samples} greedy completions are all the same; set --temperature above 0")
    metadata = _frames_to_give(source, job, media, given_frames, is_text=is_text)
    max_units = _max_units(job, is_text=is_text) if max_units is None else max_units
    # Samples of one request may share their noise, as an engine's options say; requests have each their own.
    together = num_samples if is_text else 1
    sampling = Sampling(temperature=temperature, max_units=max_units, num_samples=together)
    with exported(source) as directory, serve(directory, config, _engine(job, is_text=is_text)) as served:
        if media and not isinstance(served.model, (VisionModel, WorldModel)):
            raise ConfigError(f"--image, --video: models of plugin {config.plugin!r} are not shown any; leave them out")
        texts = _turns(prompts, system) if as_chat or system is not None else prompts
        encoded = [served.model.encode(Prompt(text=text, media=tuple(media), metadata=metadata)) for text in texts]
        payloads = [payload for payload in encoded for _ in range(num_samples // together)]
        completed = served.complete(payloads, sampling, range(seed, seed + len(payloads)))
        made = [each for samples in completed for each in samples]
        told = [_told(served.model, each, output, *divmod(at, num_samples)) for at, each in enumerate(made)]
        return [told[start : start + num_samples] for start in range(0, len(told), num_samples)]


def _turns(prompts: Sequence[str], system: str | None) -> list[tuple[Message, ...]]:
    """Each prompt as a user's turn, after the system's if there is one."""
    first = () if system is None else (Message(role="system", content=system),)
    return [(*first, Message(role="user", content=text)) for text in prompts]


def model_config(source: Path, job: Job | None, plugin: str | None, *, trust_remote_code: bool) -> ModelConfig:
    """The model's options: those of the run that it is from, unless another plugin is named."""
    config = job.recipe.model if job is not None and plugin is None else ModelConfig(plugin=plugin or "hf")
    is_run = (source / "job.json").is_file()
    # As in evaluations, a run that is named says so itself.
    return attrs.evolve(config, trust_remote_code=trust_remote_code or (is_run and config.trust_remote_code))


def _frames_to_give(
    source: Path, job: Job | None, media: Sequence[str], number: int | None, *, is_text: bool
) -> dict[str, JSON]:
    """The metadata of prompts that say how many frames of their media a world model goes on from."""
    of_run = 0 if is_text or job is None else job.given_frames
    if of_run and not media:
        raise ConfigError(
            f"{source}: each row that its run learned from gives {of_run} frames to go on from; give some with "
            "--image FILE or --video FILE"
        )
    if number is not None and (is_text or not media):
        raise ConfigError("--given-frames: it is of a video that a world model is given with --video FILE")
    return {GIVEN_FRAMES: number or of_run or 1} if media and not is_text else {}


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


def _engine(job: Job | None, *, is_text: bool) -> EngineConfig:
    """The core's own engine of tokens; else the run's, or the core's own of no run or of one that made no rollouts."""
    if is_text:
        return EngineConfig()
    if job is None or is_of_tokens("engine", job.recipe.rollout.engine.plugin):
        return EngineConfig(plugin="diffusion")
    return job.recipe.rollout.engine


def _max_units(job: Job | None, *, is_text: bool) -> int:
    if job is not None and (is_text or job.uses_rollouts):
        return job.recipe.rollout.sampling.max_units
    return _DEFAULT_UNITS if is_text else _DEFAULT_STEPS


def _told(model: Model, generated: Generated, output: Path, row: int, index: int) -> str:
    """A completion, or the file that it was written to."""
    place = output / f"prompt-{row + 1}-sample-{index + 1}"
    if generated.media is None:
        return model.decode(generated.payload) + (" […]" if generated.reason is FinishReason.LENGTH else "")
    try:
        return str(write_media(generated.media, place))
    except OSError as error:
        raise ConfigError(f"--output: {place} cannot be written: {error}") from error
