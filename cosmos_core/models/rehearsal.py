"""A model that is nowhere whole is tried on a small one of the same make, before it is spread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import attrs
from transformers import PreTrainedModel

from cosmos_core.errors import ConfigError, PluginIncompatibleError
from cosmos_core.models.building import Blueprint, draw
from cosmos_core.models.facts import make_shell
from cosmos_core.models.parallel.channel import open_channel
from cosmos_core.models.shallow import small_configs
from cosmos_core.models.weights import loading
from cosmos_core.models.weights.verification import check_layers

MOST: Final = 10**9
"""Parameters of a small model."""

_LOG: Final = logging.getLogger(__name__)


def verify_small(blueprint: Blueprint, verify: Callable[[PreTrainedModel], None], *, keeps_ids: bool = False) -> None:
    """Check a small model of the same make, drawn on the CPU, where the model itself is nowhere whole.

    If none can be made that transformers' own forward runs on, the model goes unchecked, and a warning says so.

    Args:
        blueprint: Of the model.
        verify: Compares a model, with packed attention, with its own forward.
        keeps_ids: Whether that takes tokens of the model's own vocabulary.

    Raises:
        ConfigError: The config does not make a model.
        PluginIncompatibleError: The model cannot be packed.
    """
    trust = blueprint.trust_remote_code
    shell = make_shell(blueprint.config, blueprint.auto_class, trust_remote_code=trust)
    check_layers(shell)
    reasons = []
    for config in small_configs(shell, keeps_ids=keeps_ids):
        try:
            size = make_shell(config, blueprint.auto_class, trust_remote_code=trust).num_parameters()
            if size <= MOST:
                return verify(draw(attrs.evolve(blueprint, config=config)).eval())
            reasons.append(f"one would have {size:,} parameters")
        except (ConfigError, *loading.LIBRARY_ERRORS) as error:
            reasons.append(loading.first_line(error))
    _LOG.warning(
        "%s is not compared with transformers' own forward: no small model of its make could be tried (%s)",
        type(shell).__name__,
        "; ".join(reasons),
    )
    return None


def rehearse(blueprint: Blueprint, verify: Callable[[PreTrainedModel], None]) -> None:
    """Let the first process check a small model of the same make; every process of the mesh calls it.

    Raises:
        PluginIncompatibleError: The check failed; every process says so.
    """
    channel = open_channel()
    failure: Exception | None = None
    if channel.is_leader:
        try:
            verify_small(blueprint, verify)
        except Exception as error:  # noqa: BLE001 - the others wait, and shall hear of it, whatever it is
            failure = error
    said = channel.exchange(b"" if failure is None else (str(failure) or type(failure).__name__).encode())[0].decode()
    if said:
        raise PluginIncompatibleError(said) from failure
