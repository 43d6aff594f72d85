"""Options of `curriculum`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import attrs
from attrs import validators as check

from cosmos_core.config import option
from cosmos_core.types import JSON


@attrs.frozen(kw_only=True)
class Part:
    """The dataset whose rows are ordered."""

    plugin: str = option(help="Name of its plugin.")
    options: Mapping[str, JSON] = option(factory=dict, help="The plugin's own options.")


@attrs.frozen(kw_only=True)
class CurriculumOptions:
    """The rows, the measure of their difficulty, and the pace at which they become available."""

    part: Part = option(help="The dataset, a table of `plugin` and `options`.")
    difficulty: str = option(
        "difficulty", help="Key of a number in the metadata of each train row: the greater, the harder."
    )
    hardest_first: bool = option(False, help="Whether to go from hard to easy instead.")
    start: float = option(
        0.1,
        help="Share of the train rows, the easiest ones, that are available at first.",
        validator=check.and_(check.gt(0.0), check.le(1.0)),
    )
    over: float = option(
        0.5,
        help="Share of the prompts of a stage after which all train rows are available.",
        validator=check.and_(check.gt(0.0), check.le(1.0)),
    )
    pacing: Literal["root", "linear"] = option(
        "root",
        help="How the available share grows until then: `linear`, or as a square `root`, in which new rows come the "
        "slower the more there are.",
    )
    num_windows: int = option(20, help="In how many jumps it grows.", validator=check.and_(check.ge(1), check.le(1000)))
