"""The settings of a reward service, scorers and bounds: its TOML file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import attrs
from attrs import validators as check

from cosmos_core.config import option
from cosmos_core.config.loading import read_toml
from cosmos_core.config.problems import nearest
from cosmos_core.config.schema import RewardConfig
from cosmos_core.config.structure import structure
from cosmos_core.config.training import ABOVE_ZERO, AT_MOST_A_DAY, NAME, POSITIVE
from cosmos_core.errors import ConfigError
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import RewardContext
from cosmos_core.types import JSON

SERVED_KINDS: Final = frozenset({"media", "latents"})
"""Kinds of payload that requests bring."""


@attrs.frozen(kw_only=True)
class ScorerSettings:
    """One scorer: a reward plugin in processes of its own."""

    plugin: str = option(help="Name of the reward plugin.")
    name: str | None = option(
        None, help="What requests call it, the plugin's name if absent.", validator=check.optional(NAME)
    )
    options: Mapping[str, JSON] = option(factory=dict, help="The plugin's own options.")
    timeout_s: float = option(
        60.0, help="Seconds until a score is given up, and its process with it.", validator=AT_MOST_A_DAY
    )
    workers: int = option(1, help="Processes, each with the plugin loaded.", validator=POSITIVE)
    seed: int = option(0, help="For rewards that draw random numbers.")

    @property
    def label(self) -> str:
        """The name by which requests call it."""
        return self.name or self.plugin

    @property
    def reward(self) -> RewardConfig:
        """It, as a recipe has it."""
        return RewardConfig(plugin=self.plugin, name=self.label, options=self.options, timeout_s=self.timeout_s)


@attrs.frozen(kw_only=True)
class ServiceSettings:
    """The file of a service."""

    scorer: tuple[ScorerSettings, ...] = option(help="The scorers.", validator=check.min_len(1))
    host: str = option("127.0.0.1", help="Address to listen at; 0.0.0.0 for all of this machine.")
    port: int = option(
        8077, help="Port to listen at; 0 takes a free one, and says which.", validator=(check.ge(0), check.le(65535))
    )
    token_variable: str = option(
        "WFM_REWARD_TOKEN", help="Environment variable with the token that requests must bring."
    )
    queue: int = option(256, help="Most requests that are not answered yet; more get status 429.", validator=POSITIVE)
    queue_mb: int = option(4096, help="Most megabytes that they hold.", validator=POSITIVE)
    body_mb: int = option(512, help="Largest body in megabytes; larger ones get status 413.", validator=POSITIVE)
    batch: int = option(64, help="Most completions of a request.", validator=POSITIVE)
    upload_s: float = option(
        60.0, help="Seconds within which a request and its body must have come.", validator=ABOVE_ZERO
    )
    keep_s: float = option(600.0, help="Seconds that a result is kept; then its status is 410.", validator=ABOVE_ZERO)
    keep: int = option(65536, help="Most results that are kept; the oldest expire first.", validator=POSITIVE)
    forget_s: float = option(3600.0, help="Seconds after that until its status is 404.", validator=ABOVE_ZERO)
    wait_s: float = option(30.0, help="Longest time that a request for a result may wait for it.", validator=ABOVE_ZERO)
    retry_after_s: int = option(1, help="What `Retry-After` says with status 429 and 503.", validator=POSITIVE)
    drain_s: float = option(
        30.0, help="Seconds that a service which is stopped waits for what it has begun.", validator=check.ge(0.0)
    )

    def __attrs_post_init__(self) -> None:
        labels = [each.label for each in self.scorer]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f"scorer: {', '.join(twice)} is there twice; give them names")
        if self.queue_mb < self.body_mb:
            raise ValueError(f"queue_mb: {self.queue_mb} is less than body_mb, {self.body_mb}; one body must fit")


def load_settings(path: Path, overrides: Mapping[str, JSON] | None = None) -> ServiceSettings:
    """Read the file of a service; `overrides` replace its keys.

    Raises:
        ConfigError: The file is missing or no TOML, a key is unknown or a value is wrong.
    """
    return structure({**read_toml(path, "configuration of a reward service"), **(overrides or {})}, ServiceSettings)


def kinds_of(settings: ServiceSettings) -> dict[str, frozenset[str]]:
    """The kinds of payload that each scorer scores; imports their plugins and checks their options, as planning does.

    Raises:
        ConfigError: A plugin refuses its options, or scores nothing that a request can bring.
        PluginError: A plugin is missing or broken.
    """
    plugins = PluginSet.load(("reward", each.plugin) for each in settings.scorer)
    kinds: dict[str, frozenset[str]] = {}
    for index, each in enumerate(settings.scorer):
        context = RewardContext(name=each.label, seed=each.seed)
        plugins.create("reward", each.plugin, each.options, context, f"scorer.{index}.options")
        scores: frozenset[str] = plugins.provider("reward", each.plugin).capabilities.payload_kinds
        if not scores & SERVED_KINDS:
            raise ConfigError(
                f"scorer.{index}.plugin: {each.plugin!r} scores {', '.join(sorted(scores))}, and requests bring "
                f"{' or '.join(sorted(SERVED_KINDS))}; take a reward that looks at one of them"
            )
        kinds[each.label] = scores & SERVED_KINDS
    return kinds


def unknown_scorers(names: tuple[str, ...], kinds: Mapping[str, frozenset[str]], kind: str) -> str:
    """The fault in the scorers that a request names; empty if there is none.

    Args:
        names: Those that it names.
        kinds: What each scorer of the service scores.
        kind: Kind of payload that it brings.
    """
    for name in names:
        if name not in kinds:
            close = nearest(name, kinds)
            hint = f"did you mean {close[0]}? " if close else ""
            return f"scorers: {name!r:.100} is none of this service; {hint}it has {', '.join(sorted(kinds))}"
        if kind not in kinds[name]:
            hint = ""
            if kind == "latents" and "media" in kinds[name]:
                hint = "; serve it by the reward 'decoded' (cosmos-reward-vision), which decodes latents"
            return f"scorers: {name!r} scores {', '.join(sorted(kinds[name]))}, and the request brings {kind}{hint}"
    return ""
