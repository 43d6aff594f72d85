"""The two ontologies of physical reasoning, as labels of questions.

Source: Cosmos-Reason1, arXiv:2503.15558, section 2: the hierarchical ontology of physical common sense, and the
two-dimensional one of embodied reasoning (capability by embodiment). The spelling of labels is this package's.

A label is `AREA/SUBCATEGORY` of physical common sense, such as `space/affordance`, or `embodied/CAPABILITY`, with
`/EMBODIMENT` where it is known, such as `embodied/predict-action-effects/robot-arm`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Final

COMMON_SENSE: Final[Mapping[str, tuple[str, ...]]] = {
    "space": ("relationship", "plausibility", "affordance", "environment"),
    "time": ("actions", "order", "causality", "camera", "planning"),
    "physics": (
        "attributes",
        "states",
        "object-permanence",
        "mechanics",
        "electromagnetism",
        "thermodynamics",
        "anti-physics",
    ),
}
"""Areas of physical common sense and their subcategories; `physics` is fundamental physics."""

CAPABILITIES: Final = (
    "process-sensory-inputs",
    "predict-action-effects",
    "respect-physical-constraints",
    "learn-from-interactions",
)
"""What embodied reasoning is about."""

EMBODIMENTS: Final = ("human", "animal", "robot-arm", "humanoid", "vehicle")
"""Whose body it is: natural agents and robots."""

EMBODIED: Final = "embodied"
LABELS: Final = frozenset(
    {f"{area}/{each}" for area, subcategories in COMMON_SENSE.items() for each in subcategories}
    | {f"{EMBODIED}/{capability}" for capability in CAPABILITIES}
    | {f"{EMBODIED}/{capability}/{body}" for capability in CAPABILITIES for body in EMBODIMENTS}
)
"""Every label that a question may have."""


def levels(label: str) -> list[str]:
    """A label and what is above it, from the top: `space/order` is of `space`, and of itself.

    Raises:
        ValueError: It is none of the ontologies; the message names the nearest.
    """
    if label not in LABELS:
        near = difflib.get_close_matches(label, sorted(LABELS), n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"areas are {', '.join([*COMMON_SENSE, EMBODIED])}"
        raise ValueError(f"label {label!r} is of neither ontology; {hint}")
    names = label.split("/")
    return ["/".join(names[: depth + 1]) for depth in range(len(names))]
