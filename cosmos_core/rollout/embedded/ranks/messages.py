"""What the first rank of an engine and the others say to each other, in frames of the strict codec.

Ranks after the first do what they are told, in order; tensors of the model travel between them in collectives, and
weights through memory that two processes map.
"""

from __future__ import annotations

from typing import Any, Final

import attrs

from cosmos_core.rollout.embedded.attention import Fork, Piece
from cosmos_core.rollout.embedded.options import EmbeddedOptions
from cosmos_core.rollout.embedded.runs import Run
from cosmos_core.transport.codec import Codec


@attrs.frozen(kw_only=True)
class Setup:
    """First message to a rank: what it is a part of, and how it makes the model.

    Attributes:
        rank: Its number; 1 or more.
        size: Ranks of the engine.
        plugin: The model's.
        model_options: The recipe's options of it.
        path: See `ModelContext`.
        config: See `ModelContext`.
        assets: See `ModelContext`.
        trust_remote_code: See `ModelContext`.
        seed: See `EngineContext`.
        dtype: Name of `EngineContext.dtype`.
        device: Kind of device.
        max_in_flight: See `EngineContext`.
        context_length: See `EngineContext`.
        threads: Of the CPU.
        options: The engine's.
    """

    rank: int
    size: int
    plugin: str
    model_options: dict[str, Any]
    path: str | None
    config: dict[str, Any] | None
    assets: str
    trust_remote_code: bool
    seed: int
    dtype: str
    device: str
    max_in_flight: int
    context_length: int
    threads: int
    options: EmbeddedOptions


@attrs.frozen(kw_only=True)
class Ready:
    """The rank has made its model plugin, and waits to join the others."""


@attrs.frozen(kw_only=True)
class Join:
    """Find the others at this port of this machine, and build."""

    port: int


@attrs.frozen(kw_only=True)
class Share:
    """Where a rank's part of a tensor lies.

    Attributes:
        start: Its first index in each dim.
        size: Its size in each dim.
        shape: Of the whole tensor.
        dtype: torch dtype name.
    """

    start: tuple[int, ...]
    size: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str


@attrs.frozen(kw_only=True)
class Built:
    """The rank has its part of the model, and goes on with what all ranks do at once; what it holds, by name."""

    shares: dict[str, Share]


@attrs.frozen(kw_only=True)
class Step:
    """One step; see `scheduler.Plan`.

    Attributes:
        num_units: Units in the longest slot.
        longest: Units that a slot may come to have.
        num_kept: Slots whose cache is needed.
        tokens: Newest unit of each slot that decodes.
        places: Its place in the sequence.
        pieces: What follows them.
        piece_tokens: Tokens of the pieces.
        forks: Slots that start from what another holds.
        shared: Decoding slots, next to each other, that hold one prompt.
        kept: Token of the step whose logits are kept, for each piece that draws.
    """

    num_units: int
    longest: int
    num_kept: int
    tokens: list[int]
    places: list[int]
    pieces: tuple[Piece, ...]
    piece_tokens: list[int]
    forks: tuple[Fork, ...]
    shared: tuple[Run, ...]
    kept: list[int]


@attrs.frozen(kw_only=True)
class Move:
    """Copy what some slots have cached to others."""

    sources: list[int]
    targets: list[int]
    num_units: int


@attrs.frozen(kw_only=True)
class Sequence:
    """A sequence to score; see `serving.given.Given`."""

    tokens: list[int]
    num_given: int
    decided: list[int]


@attrs.frozen(kw_only=True)
class Score:
    """Score sequences; the first rank takes the results."""

    sequences: list[Sequence]
    temperature: float
    budget: int


@attrs.frozen(kw_only=True)
class Load:
    """Load the weights that are in the memory whose descriptor comes with this."""


@attrs.frozen(kw_only=True)
class Loaded:
    """What the rank holds now.

    Attributes:
        digests: Of its part of each tensor, read back.
        wrong: A tensor that is not, bit by bit, what was to be loaded; empty if all are.
    """

    digests: dict[str, int]
    wrong: str


@attrs.frozen(kw_only=True)
class Failed:
    """The rank ends, and why."""

    reason: str


TO_RANK: Final = Codec((Setup, Join, Step, Move, Score, Load))
FROM_RANK: Final = Codec((Ready, Built, Loaded, Failed))
