"""Options of `mixture`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import attrs
from attrs import validators as check

from cosmos_core.config import option
from cosmos_core.config.sources import label
from cosmos_core.types import JSON


@attrs.frozen(kw_only=True)
class Part:
    """One dataset of the mixture."""

    plugin: str = option(help="Name of its plugin.")
    name: str | None = option(
        None, help="What its rows are called in samples (metadata `part`); the plugin's name if absent."
    )
    weight: float = option(
        1.0, help="Its share of an epoch, relative to the others'.", validator=check.and_(check.gt(0.0), check.lt(1e9))
    )
    options: Mapping[str, JSON] = option(factory=dict, help="The plugin's own options.")

    @property
    def label(self) -> str:
        """The name of its rows."""
        return label(self.plugin) if self.name is None else self.name


@attrs.frozen(kw_only=True)
class MixtureOptions:
    """The datasets, their proportions, and the end of an epoch."""

    parts: tuple[Part, ...] = option(help="The datasets, tables of `plugin`, `weight`, `name` and `options`.")
    epoch: Literal["longest", "shortest"] = option(
        "longest",
        help="`longest` ends an epoch once every row of every part came, shorter parts again and again meanwhile; "
        "`shortest` once the first part is used up, and leaves rows of the others out.",
    )

    def __attrs_post_init__(self) -> None:
        if not self.parts:
            raise ValueError("`parts` is empty; give one table or more, each with a `plugin`")
        labels = [part.label for part in self.parts]
        for each in labels:
            if labels.count(each) > 1:
                raise ValueError(f"two parts are called {each!r}; give each a `name` of its own")
