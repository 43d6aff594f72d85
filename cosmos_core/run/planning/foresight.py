"""What the engine of a recipe says of the run before any process starts (`Provider.foresee`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from cosmos_core.config.mesh import world_size
from cosmos_core.config.schema import Recipe
from cosmos_core.config.structure import structure
from cosmos_core.errors import CosmosError, PluginBrokenError
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import EngineOutlook, Foresight, Model, ModelFacts, Sampling
from cosmos_core.run.launch.local import visible_gpus
from cosmos_core.run.launch.making import capabilities_of

_DTYPES: Final = {"fp32": "float32", "bf16": "bfloat16"}


def foresee(recipe: Recipe, plugins: PluginSet, model: Model, facts: ModelFacts, *, shows_media: bool) -> Foresight:
    """Ask the engine.

    Args:
        recipe: The recipe.
        plugins: Its plugins.
        model: Its model.
        facts: Of the model.
        shows_media: Whether rows of its dataset show images or videos.

    Raises:
        ConfigError: An option of the engine is wrong.
        PluginError: The engine failed, or answered with something else.
    """
    config = recipe.rollout
    provider = plugins.provider("engine", config.engine.plugin)
    ask: Callable[..., Any] | None = provider.foresee
    if ask is None:
        return Foresight()
    outlook = EngineOutlook(
        model=model,
        facts=facts,
        device=config.device,
        # What another machine has is not known here; its launcher's own options say, and are checked there.
        has_gpu=bool(visible_gpus()) or capabilities_of(recipe, plugins).submits,
        precision=_DTYPES[config.precision],
        temperatures={"rollout.sampling.temperature": config.sampling.temperature},
        shows_media=shows_media,
        num_ranks=world_size(config.mesh),
        samplings=_samplings(recipe),
    )
    options: object = structure(config.engine.options, provider.options, "rollout.engine.options")
    where = f"engine plugin {config.engine.plugin!r}"
    try:
        told = ask(options, outlook)
    except CosmosError:
        raise
    except Exception as error:
        raise PluginBrokenError(f"{where}: foresee() failed: {type(error).__name__}: {error}") from error
    if not isinstance(told, Foresight):
        raise PluginBrokenError(f"{where}: foresee() returned {told!r}, which is no Foresight")
    return told


def _samplings(recipe: Recipe) -> dict[str, Sampling]:
    config, evaluation = recipe.rollout.sampling, recipe.evaluation
    found = {
        "rollout.sampling": Sampling(
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            max_units=config.max_units,
            num_samples=recipe.rollout.group_size,
        )
    }
    if evaluation.interval > 0 and evaluation.prompts > 0:
        found["evaluation"] = Sampling(temperature=0.0, max_units=evaluation.max_units or config.max_units)
    return found
