"""Scores completions of held-out prompts, by a run's checkpoint or any exported model, in this process."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import attrs

from cosmos_core.config.job import Job, are_right_or_wrong
from cosmos_core.config.loading import load_recipe, run_of
from cosmos_core.config.order import evaluation_seed
from cosmos_core.config.schema import EnvironmentConfig
from cosmos_core.devices import num_threads
from cosmos_core.errors import ConfigError, DataError
from cosmos_core.plugins.recipe import files, greedy, load_dataset, load_rewards
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import Dataset, Request, Sampling
from cosmos_core.protocols.model import MultiTurnModel
from cosmos_core.rollout.episodes.dialogue import EpisodeResult
from cosmos_core.rollout.episodes.player import player_of, serving
from cosmos_core.rollout.episodes.pool import EnvironmentPool
from cosmos_core.rollout.rewards.messages import Outcomes
from cosmos_core.rollout.rewards.pool import RewardPool
from cosmos_core.rollout.rewards.scoring import absent_here, sample, to_score
from cosmos_core.types import Payload, Prompt, Sample, SampleStatus
from cosmos_service_tools.scores import Evaluated, mean_score, mean_scores_by
from cosmos_service_tools.served import Served, check_folder, exported, is_of_tokens, serve

_TICK_S: Final = 0.2


def play(
    served: Served,
    environment: EnvironmentConfig,
    asked: Sequence[tuple[int, Prompt, Payload]],
    sampling: Sampling,
    *,
    seed: int,
    name: str,
) -> list[EpisodeResult]:
    """Play one dialogue of each held-out row, as an evaluation of the run `name` does."""
    if not isinstance(served.model, MultiTurnModel):
        raise ConfigError("environment: the model plugin has no encode_turns; remove [environment]")
    capabilities = PluginSet.load([("environment", environment.plugin)]).provider("environment", environment.plugin)
    events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    found: dict[int, list[EpisodeResult]] = {}
    with contextlib.closing(EnvironmentPool(environment, seed=seed)) as pool, contextlib.ExitStack() as stack:
        pool.start()
        episodes = player_of(
            environment,
            capabilities.capabilities,
            name=name,
            model=served.model,
            engine=served.engine,
            pool=pool,
            version=lambda: 0,
            post=events.put,
            sees=served.sees,
        )
        check = stack.enter_context(serving(episodes))
        for index, (row, prompt, payload) in enumerate(asked):
            request = Request(request_id=str(index), prompt=payload, sampling=sampling, seed=evaluation_seed(seed, row))
            keep = functools.partial(found.__setitem__, index)
            episodes.begin(request, prompt, longest=served.context_length, done=keep)
        while len(found) < len(asked):
            try:
                events.get(timeout=_TICK_S)()
            except queue.Empty:
                pool.check()
                check()
                served.engine.health()
    return [each for index in range(len(asked)) for each in found[index]]


def evaluate_model(
    source: Path,
    *,
    recipe_path: Path | None,
    num_prompts: int | None,
    step: str,
    trust_remote_code: bool = False,
    by: str | None = None,
) -> Evaluated:
    """Complete held-out prompts greedily and score them.

    Args:
        source: A run's folder, or an exported model.
        recipe_path: Where dataset and rewards come from; from the run if None.
        num_prompts: At most this many; `evaluation.prompts` if None.
        step: Which checkpoint of a run.
        trust_remote_code: Whether code inside an exported model may run. A run or a recipe that is named says so
            itself; a run that is found beside the model does not count.
        by: Key of the prompts' metadata to group by; None for no groups.
    """
    check_folder(source)
    job = _job(source, recipe_path)
    if not job.recipe.reward_names:
        raise ConfigError("reward: the recipe has none, so there is nothing to evaluate by")
    is_beside = recipe_path is None and not (source / "job.json").is_file()
    if is_beside and not trust_remote_code and (named := files(job.recipe)):
        raise ConfigError(
            f"{source}: the run beside it names code of its own folder ({', '.join(named)}), which whoever made the "
            "folder may have written; read it, and add --trust-remote-code, or give --recipe FILE"
        )
    rewards = job.recipe.reward
    plugins = PluginSet.load([("reward", each.plugin) for each in rewards])
    # Before anything is generated.
    if absent := absent_here(rewards, load_rewards(job, plugins)):
        raise ConfigError("; ".join(absent))
    if recipe_path is None and not (source / "job.json").is_file():
        model = attrs.evolve(job.recipe.model, trust_remote_code=trust_remote_code)
        job = attrs.evolve(job, recipe=attrs.evolve(job.recipe, model=model))
    with exported(source, step) as folder:
        return _evaluate(folder, job, num_prompts, by)


def _job(source: Path, recipe_path: Path | None) -> Job:
    found = run_of(source)
    if recipe_path is None:
        if found is None:
            raise ConfigError(f"{source}: not of a run, so it has no dataset and rewards; name them with --recipe FILE")
        return found
    recipe = load_recipe(recipe_path)
    return Job(
        run_id="evaluation",
        directory=source,
        recipe_directory=recipe_path.parent.resolve(),
        recipe=recipe,
        unit="token" if is_of_tokens("model", recipe.model.plugin) else "denoising step",
    )


def _evaluate(model: Path, job: Job, num_prompts: int | None, by: str | None) -> Evaluated:
    recipe = job.recipe
    dataset = load_dataset(job, PluginSet.load([("dataset", recipe.dataset.plugin)]))
    rows = min(num_prompts or recipe.evaluation.prompts, dataset.size("heldout"))
    if rows < 1:
        raise ConfigError(f"dataset: {recipe.dataset.plugin!r} has no held-out rows to evaluate on")
    prompts = list(_usable(dataset, rows))
    if by is not None:
        _check_key(by, [prompt for _, prompt in prompts])
    pool = RewardPool(recipe.reward, num_workers=recipe.rollout.reward_workers, seed=recipe.run.seed)
    pool.start()
    try:
        with serve(model, recipe.model, recipe.rollout.engine, threads=num_threads(recipe.launch.threads)) as served:
            answered = _complete(served, prompts, job)
            scored = _score(served, answered, job, pool)
    finally:
        pool.close()
    firsts = (value for each in scored if each.is_scored for value in list(each.rewards.values())[:1])
    name = "accuracy" if are_right_or_wrong(firsts, job.unit) else "reward"
    scores = _scores(prompts, answered, scored, name)
    # Rewards may be below 0 throughout, so that one without a score must not count as 0.
    unscored = 0.0 if name == "accuracy" else None
    return attrs.evolve(
        _result(scored, name, num_prompts=rows),
        total=mean_score("all", [score for _, score in scores], unscored=unscored) if scores else None,
        groups=() if by is None else tuple(mean_scores_by(scores, by, unscored=unscored)),
    )


def _usable(dataset: Dataset, num_rows: int) -> Iterator[tuple[int, Prompt]]:
    """The first held-out rows and their numbers; bad ones are left out, and so without a score, as in a run."""
    for index in range(num_rows):
        try:
            yield index, dataset.row("heldout", index)
        except DataError:
            continue


def _check_key(by: str, prompts: list[Prompt]) -> None:
    """Refuse to group by what no row has, before anything is generated."""
    keys = list(dict.fromkeys(key for prompt in prompts for key in prompt.metadata))
    if prompts and by not in keys:
        raise ConfigError(f"--by: no row's metadata has {by!r}; they have {', '.join(map(repr, keys)) or 'none'}")


def _complete(served: Served, prompts: list[tuple[int, Prompt]], job: Job) -> list[tuple[Prompt, EpisodeResult]]:
    """Greedy completions, or dialogues, of the prompts that can be encoded and fit the context."""
    fitting, environment = [], job.recipe.environment
    for row, prompt in prompts:
        if environment is not None and prompt.shows_media and not served.sees:
            continue  # the dialogues of this model are of text
        try:
            payload = served.model.encode(prompt)
        except DataError:
            continue
        room = served.room(payload)
        if room is None or room > 0:
            fitting.append((row, prompt, payload))
    sampling = greedy(job.recipe)
    if environment is not None:
        played = play(served, environment, fitting, sampling, seed=job.recipe.run.seed, name=job.recipe.run.name)
        return [(prompt, each) for (_, prompt, _), each in zip(fitting, played, strict=True)]
    # Denoised samples depend on their noise: it is that of the run's own evaluations.
    seeds = [evaluation_seed(job.recipe.run.seed, row) for row, _, _ in fitting]
    completed = served.complete([payload for _, _, payload in fitting], sampling, seeds)
    return [
        (prompt, EpisodeResult.single(samples[0])) for (_, prompt, _), samples in zip(fitting, completed, strict=True)
    ]


def _score(served: Served, answered: list[tuple[Prompt, EpisodeResult]], job: Job, pool: RewardPool) -> list[Sample]:
    if not answered:
        return []
    done = threading.Event()
    outcomes: Outcomes = []

    def receive(found: Outcomes) -> None:
        outcomes.extend(found)
        done.set()

    asked = [
        to_score(prompt, each, served.model.decode(each.generated.payload) if each.text is None else each.text)
        for prompt, each in answered
        if each.status.is_scored
    ]
    pool.submit(asked, receive)
    while not done.wait(_TICK_S):
        pool.check()
    recipe, scores = job.recipe, iter(outcomes)
    return [
        sample(index, each, next(scores) if each.status.is_scored else (), recipe.reward, recipe.environment)
        for index, (_, each) in enumerate(answered)
    ]


def _scores(
    prompts: list[tuple[int, Prompt]], answered: list[tuple[Prompt, EpisodeResult]], samples: list[Sample], name: str
) -> list[tuple[Prompt, float | None]]:
    """The score of each prompt; None of those that were not answered or could not be scored."""
    found = {
        id(prompt): _score_of(sample, name) if sample.is_scored else None
        for (prompt, _), sample in zip(answered, samples, strict=True)
    }
    return [(prompt, found.get(id(prompt))) for _, prompt in prompts]


def _score_of(sample: Sample, name: str) -> float | None:
    """The score of a sample; of an accuracy, the first reward says whether it is right."""
    return next(iter(sample.rewards.values())) if name == "accuracy" else sample.reward


def _result(samples: list[Sample], name: str, *, num_prompts: int) -> Evaluated:
    scored = [each for each in samples if each.is_scored]
    names = list(scored[0].rewards) if scored else []
    totals = {name: sum(each.rewards[name] for each in scored) for name in names}
    values = [score for each in scored if (score := _score_of(each, name)) is not None]
    counted = num_prompts if name == "accuracy" else len(values)
    return Evaluated(
        name=name,
        score=sum(values) / counted if values else None,
        num_prompts=num_prompts,
        num_unscored=num_prompts - len(scored),
        num_truncated=sum(each.status is SampleStatus.TRUNCATED for each in samples),
        rewards={name: total / len(scored) for name, total in totals.items()},
    )
