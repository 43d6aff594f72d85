"""Completes prompts with a run's model, or an exported one; images and videos become files."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cosmos_core.config.job import Job
from cosmos_core.config.loading import run_of
from cosmos_core.config.schema import EngineConfig
from cosmos_core.errors import ConfigError
from cosmos_core.protocols import FinishReason, Generated, Model, Sampling
from cosmos_core.protocols.vision import VisionModel
from cosmos_core.protocols.world import WorldModel
from cosmos_core.rollout.media import write_media
from cosmos_core.types import JSON, Message, Prompt
from cosmos_core.types.prompt import GIVEN_FRAMES
from cosmos_service_tools.served import exported, is_of_tokens, model_config, serve

_LOG: Final = logging.getLogger(__name__)
_DEFAULT_UNITS: Final = 256
_DEFAULT_STEPS: Final = 32


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
    texts = _turns(prompts, system) if as_chat or system is not None else prompts
    if is_text:
        _check_texts(job, temperature, num_samples, are_chats=texts is not prompts)
    metadata = _frames_to_give(source, job, media, given_frames, is_text=is_text)
    max_units = _max_units(job, is_text=is_text) if max_units is None else max_units
    # Samples of one request may share their noise, as an engine's options say; requests have each their own.
    together = num_samples if is_text else 1
    sampling = Sampling(temperature=temperature, max_units=max_units, num_samples=together)
    with exported(source) as directory, serve(directory, config, _engine(job, is_text=is_text)) as served:
        if media and not isinstance(served.model, (VisionModel, WorldModel)):
            raise ConfigError(f"--image, --video: models of plugin {config.plugin!r} are not shown any; leave them out")
        encoded = [served.model.encode(Prompt(text=text, media=tuple(media), metadata=metadata)) for text in texts]
        payloads = [payload for payload in encoded for _ in range(num_samples // together)]
        completed = served.complete(payloads, sampling, range(seed, seed + len(payloads)))
        made = [each for samples in completed for each in samples]
        told = [_told(served.model, each, output, *divmod(at, num_samples)) for at, each in enumerate(made)]
        return [told[start : start + num_samples] for start in range(0, len(told), num_samples)]


def _check_texts(job: Job | None, temperature: float, num_samples: int, *, are_chats: bool) -> None:
    """Refuse several greedy completions; say if the run learned from prompts of the other kind."""
    if temperature == 0.0 and num_samples > 1:
        raise ConfigError(f"--samples: {num_samples} greedy completions are all the same; set --temperature above 0")
    if job is not None and job.is_plain == are_chats:
        learned = "plain prompts" if are_chats else "chats; --chat puts a prompt in their template"
        _LOG.warning("run %s learned from %s", job.recipe.run.name, learned)


def _turns(prompts: Sequence[str], system: str | None) -> list[tuple[Message, ...]]:
    """Each prompt as a user's turn, after the system's if there is one."""
    first = () if system is None else (Message(role="system", content=system),)
    return [(*first, Message(role="user", content=text)) for text in prompts]


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
