"""One agent's calls as they are recorded: a tree of the model's turns, in token ids that are never redone.

A call whose messages go on from an earlier reply continues that reply's ids. Any other begins a branch: from the last
reply that it shares, or from nothing. Each branch is a document of the sample. What two of them share is decided in the
first, and conditions in the others.

Shape legend: P units of the first document's prompt, C units after it in all documents, N that the model decided.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import numpy as np

from cosmos_core.errors import DataError
from cosmos_core.models.tokens import array_of, tokens_payload
from cosmos_core.protocols import FinishReason, Generated, Model
from cosmos_core.protocols.model import MultiTurnModel
from cosmos_core.protocols.vision import DialogueVision
from cosmos_core.types import JSON, Array, Message, Payload, Prompt
from cosmos_core.types.payload import of_document

_RECORDED: Final = ("logprobs", "versions")
"""Arrays of what an engine says of each unit that it generated."""


@attrs.frozen(kw_only=True, eq=False)
class Turn:
    """One reply of the model.

    Attributes:
        before: The turn that it continues; None where it begins a document.
        given: int32, ids between that turn and this one: of a document's first, its prompt.
        shown: Arrays of what these ids show; none where they are words alone.
        made: int32, ids of this turn, the stop token included.
        recorded: The engine's arrays of these ids, by name; records of forwards have rows of all units before, too.
            What a forward recorded of a unit is kept of the first turn in which it went through one: the forward that
            priced the unit after it. Later turns recorded it anew, perhaps under other weights.
        versions: Oldest and newest weight version.
        messages: What was said between, and the reply.
        history: The name of all that was said up to here; see `names_of`.
        ends: Whether the reply ends here; False where the next turn is more of it.
    """

    before: Turn | None
    given: np.ndarray
    made: np.ndarray
    recorded: Mapping[str, Array]
    versions: tuple[int, int]
    shown: Mapping[str, Array] = attrs.field(factory=dict)
    messages: tuple[Message, ...] = ()
    history: str = ""
    ends: bool = True

    @property
    def path(self) -> list[Turn]:
        """The turns of its document up to this one, in order."""
        turn: Turn | None = self
        path = []
        while turn is not None:
            path.append(turn)
            turn = turn.before
        return path[::-1]


def turn_of(generated: Generated, prompt: Payload, before: Turn | None, given: Payload, **said: Any) -> Turn:
    """The turn that an engine generated from `prompt`, which is all that came before and ends with `given`."""
    arrays = generated.payload.arrays
    known = {*prompt.arrays, "completion", "decided"}
    return Turn(
        before=before,
        given=np.frombuffer(given.arrays["prompt"].data, np.int32),
        shown=shown_in(given),
        made=np.frombuffer(arrays["completion"].data, np.int32),
        recorded={name: array for name, array in arrays.items() if name not in known},
        versions=(generated.oldest_version, generated.newest_version),
        **said,
    )


def cut(turn: Turn, size: int) -> Turn:
    """The first `size` ids of a turn, and what the engine recorded of them."""
    num_cut = len(turn.made) - size
    recorded = {
        name: attrs.evolve(
            array,
            shape=(array.shape[0] - num_cut, *array.shape[1:]),
            data=bytes(array.data)[: array.nbytes - num_cut * (array.nbytes // max(array.shape[0], 1))],
        )
        for name, array in turn.recorded.items()
    }
    drawn_by = np.frombuffer(recorded["versions"].data, np.int32)
    versions = (int(drawn_by.min()), int(drawn_by.max())) if size else turn.versions
    return attrs.evolve(turn, made=turn.made[:size], recorded=recorded, versions=versions)


def follow(parts: Sequence[Payload], model: Model) -> Payload:
    """One prompt of prompts that follow each other, with what they show."""
    if len(parts) == 1:
        return parts[0]
    if any(map(shown_in, parts)):
        assert isinstance(model, DialogueVision), "nothing else makes arrays for what turns show"
        return model.join(parts)
    return tokens_payload(np.concatenate([np.frombuffer(part.arrays["prompt"].data, np.int32) for part in parts]))


def parts_of(turns: Sequence[Turn]) -> list[Payload]:
    """Prompts of what turns in a row are given and make; what a model makes shows nothing."""
    both = [(turn.given, turn.shown, turn.made) for turn in turns]
    return [
        Payload(kind="tokens", arrays={"prompt": array_of(ids), **shown})
        for given, seen, made in both
        for ids, shown in ((given, seen), (made, {}))
    ]


def encode_turns(
    model: Model, prompt: Prompt, written: Sequence[int], turns: Sequence[Message], *, sees: bool
) -> Payload:
    """The ids between the model's turn and its next one, with what they show, as a prompt; DataError as the model."""
    if any(turn.media for turn in turns):
        refuse_unseen(turns, sees=sees)
        assert isinstance(model, DialogueVision), "whoever says that it sees has asked"
        return model.encode_seen_turns(prompt, written, turns)
    assert isinstance(model, MultiTurnModel), "planning has checked"
    return tokens_payload(model.encode_turns(prompt, written, turns))


def refuse_unseen(turns: Sequence[Message], *, sees: bool) -> None:
    """Refuse turns that show images, unless these are seen."""
    if not sees and (number := sum(len(turn.media) for turn in turns)):
        raise DataError(
            f"the turns show {number} images, and the dialogues of this run are of text: its model or its engine takes "
            "no images in turns; leave them out"
        )


def shown_in(payload: Payload) -> Mapping[str, Array]:
    """The arrays of what the ids of a prompt show: all others."""
    return {name: array for name, array in payload.arrays.items() if name != "prompt"}


def ids_of(turns: Sequence[Turn]) -> np.ndarray:
    """All ids of turns that follow each other, int32."""
    return np.concatenate([part for turn in turns for part in (turn.given, turn.made)] or [np.empty(0, np.int32)])


def names_of(messages: Sequence[Message], tools: Sequence[Mapping[str, JSON]]) -> list[str]:
    """A name for each beginning of a history, of 0, 1, … messages: two histories have one name if they are the same.

    What a model thought does not count, for most clients do not send it back, and neither do ids of calls or how the
    JSON of their arguments is written.
    """
    digest = hashlib.blake2b(json.dumps(list(tools), sort_keys=True).encode(), digest_size=16)
    names = [digest.hexdigest()]
    for message in messages:
        calls = [[call.name, _canonical(call.arguments)] for call in message.tool_calls]
        seen = [message.media, message.places] if message.media else []
        said = json.dumps([message.role, message.content, calls, *seen])
        digest.update(said.encode("utf-8", "surrogatepass"))
        names.append(digest.hexdigest())
    return names


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


class Recording:
    """The turns of one session.

    Attributes:
        turns: All of them, in the order in which they were made.
        rewards: What the environment gave for a turn; nothing for the others.
    """

    def __init__(self) -> None:
        self.turns: Final[list[Turn]] = []
        self.rewards: Final[dict[Turn, float]] = {}
        self._by_history: Final[dict[str, Turn]] = {}

    def find(self, messages: Sequence[Message], names: Sequence[str]) -> tuple[Turn | None, int]:
        """The newest turn that these messages go on from, and how many of them it has; None and 0: they begin anew."""
        for size in range(len(messages) - 1, 0, -1):
            if messages[size - 1].role == "assistant" and (turn := self._by_history.get(names[size])):
                return turn, size
        return None, 0

    def add(self, turn: Turn) -> None:
        """Take in a reply."""
        self.turns.append(turn)
        self._by_history[turn.history] = turn

    @property
    def num_decided(self) -> int:
        """N."""
        return sum(len(turn.made) for turn in self.turns)

    def documents(self) -> list[list[Turn]]:
        """The turns of each document, in the order in which they were finished."""
        followed = {id(turn.before) for turn in self.turns if turn.before is not None}
        return [turn.path for turn in self.turns if id(turn) not in followed]

    def said(self) -> tuple[Message, ...]:
        """The messages of the document of the newest turn."""
        return tuple(message for turn in self.turns[-1].path for message in turn.messages) if self.turns else ()

    def generated(self, opening: Payload, reason: FinishReason, version: int, model: Model, weight: float) -> Generated:
        """All documents as one completion; of a session without turns, `opening` and nothing, of the version given.

        `model` joins what turns show, and rewards of turns count with `weight`.
        """
        documents = self.documents()
        if not documents:
            arrays = {**shown_in(opening), **_arrays([], [], {}, opening.arrays["prompt"])}
            return _generated(arrays, reason, (version, version), opening)
        begins = ids_of(documents[0])[: len(documents[0][0].given)]
        completion: list[np.ndarray] = []
        decided: list[np.ndarray] = []
        sizes: list[int] = []
        order: list[Turn] = []
        seen: set[int] = set()
        for index, turns in enumerate(documents):
            units = ids_of(turns)
            flags = np.concatenate([flag for turn in turns for flag in _flags(turn, id(turn) not in seen)])
            order += [turn for turn in turns if id(turn) not in seen]
            seen.update(map(id, turns))
            skipped = len(begins) if index == 0 else 0
            completion.append(units[skipped:])
            decided.append(flags[skipped:])
            sizes.append(len(units) - skipped)
        arrays = _arrays(completion, decided, dict(_joined(order, documents)), array_of(begins))
        shown = [
            shown_in(follow(parts_of(turns), model)) if any(turn.shown for turn in turns) else {} for turns in documents
        ]
        if len(documents) > 1:
            arrays["documents"] = array_of(np.asarray(sizes, np.int32))
            arrays |= {
                of_document(index, name): array for index, own in enumerate(shown) for name, array in own.items()
            }
        else:
            arrays |= shown[0]
        arrays |= self._credited(order, weight)
        versions = [version for turn in order for version in turn.versions]
        return _generated(arrays, reason, (min(versions), max(versions)), opening)

    def _credited(self, order: Sequence[Turn], weight: float) -> dict[str, Array]:
        """The decisions of each turn, and what was given for it; nothing where there is one turn."""
        ends = np.flatnonzero([turn.ends for turn in order])
        if len(ends) < 2:
            return {}
        sizes = np.diff(np.cumsum([len(turn.made) for turn in order])[ends], prepend=0)
        rewards = [weight * self.rewards.get(turn, 0.0) for turn in order if turn.ends]
        return {"turns": array_of(sizes.astype(np.int32)), "turn_rewards": array_of(np.asarray(rewards, np.float64))}


def _flags(turn: Turn, is_new: bool) -> Iterator[np.ndarray]:
    yield np.zeros(len(turn.given), np.bool_)
    yield np.full(len(turn.made), is_new, np.bool_)


def _joined(order: Sequence[Turn], documents: Sequence[Sequence[Turn]]) -> Iterator[tuple[str, Array]]:
    """Arrays of what was decided, turn by turn, and records of forwards, document by document."""
    for name, first in order[0].recorded.items():
        if name in _RECORDED:
            parts = [turn.recorded[name] for turn in order]
            shape: tuple[int, ...] = (sum(part.shape[0] for part in parts),)
            data = b"".join(bytes(part.data) for part in parts)
        else:
            rows = [_rows([turn.recorded[name] for turn in turns]) for turns in documents]
            shape = (sum(number for _, number in rows), *first.shape[1:])
            data = b"".join(data for data, _ in rows)
        yield name, attrs.evolve(first, shape=shape, data=data)


def _rows(arrays: Sequence[Array]) -> tuple[bytes, int]:
    """Rows of a growing sequence, each from the first array that has it, and how many they are."""
    data, num_rows = bytearray(), 0
    for array in arrays:
        row_size = array.nbytes // max(array.shape[0], 1)
        data += memoryview(array.data).cast("B")[num_rows * row_size :]
        num_rows = array.shape[0]
    return bytes(data), num_rows


def _arrays(
    completion: Sequence[np.ndarray], decided: Sequence[np.ndarray], recorded: Mapping[str, Array], begins: Array
) -> dict[str, Array]:
    nothing = {"logprobs": array_of(np.empty(0, np.float32)), "versions": array_of(np.empty(0, np.int32))}
    return {
        **nothing,
        **recorded,
        "prompt": begins,
        "completion": array_of(np.concatenate([*completion, np.empty(0, np.int32)])),
        "decided": array_of(np.concatenate([*decided, np.empty(0, np.bool_)])),
    }


def _generated(
    arrays: Mapping[str, Any], reason: FinishReason, versions: tuple[int, int], opening: Payload
) -> Generated:
    return Generated(
        payload=attrs.evolve(opening, arrays=arrays),
        reason=reason,
        oldest_version=versions[0],
        newest_version=versions[1],
        num_units=arrays["logprobs"].shape[0],
    )
