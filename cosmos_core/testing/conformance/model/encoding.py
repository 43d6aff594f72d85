"""Tests of rows that become payloads and texts again, also in another process and turn by turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs
import numpy as np
import pytest
import torch

from cosmos_core.models.tokens import KIND, array_of, tokens_payload, values
from cosmos_core.protocols import Model
from cosmos_core.protocols.model import MultiTurnModel
from cosmos_core.testing.conformance.model.subject import (
    ROOM,
    SEED,
    Subject,
    attempt,
    contents,
    copied,
    demonstrations,
    expect_close,
    expect_refusal,
    first_difference,
    skip_rest,
)
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.testing.layouts import CPU, PluginModel
from cosmos_core.testing.worlds import WorldFailedError, run_world
from cosmos_core.types import Message, Payload, Prompt

_TURNS: Final = (Message(role="system", content="Be brief."), Message(role="user", content="How many?"))
_OBSERVATION: Final = "How many apples now? 7+5=12"
_APART: Final = "7 and "


class EncodingTests:
    """Tests of `encode`, `encode_demonstration` and `decode`, and of a model that is a `MultiTurnModel`."""

    def test_payloads_are_of_the_declared_kinds(self, subject: Subject) -> None:
        """Planning pairs model, engine and rewards by what is declared; other payloads only look like ours."""
        made = {payload.kind for payload in [*map(subject.model.encode, subject.prompts), *subject.payloads]}
        declared = set(subject.capabilities.payload_kinds)
        if made - declared:
            fault(f"payloads are of kind {sorted(made)}, and ModelCapabilities.payload_kinds declares {declared}")
        if declared - made:
            fault(
                f"payload kinds {', '.join(sorted(declared - made))} are declared, and no payload of the kit is of "
                "them; add one to the fixture `payloads`, or declare fewer"
            )
        foreign = Payload(kind="no-model-takes-this", arrays={})
        what = f"pack() took a payload of kind {foreign.kind!r}, and the plugin declares {sorted(declared)}"
        expect_refusal(what, subject.model.pack, [foreign], budget=ROOM)

    def test_demonstrations_are_what_is_asked_for_and_answered(self, subject: Subject) -> None:
        """A model is trained on the conditioning that it will be given, and to stop; rewards read its text."""
        model, shown = subject.model, [each for each in subject.prompts if each.demonstration is not None]
        for prompt in shown:
            _check_demonstration(subject, prompt)
        row = Prompt(text=subject.prompts[0].text, media=subject.prompts[0].media)
        what = "encode_demonstration() took a row without a demonstration"
        expect_refusal(what, model.encode_demonstration, row)
        for encode in (model.encode, model.encode_demonstration):
            payload = attempt(encode, Prompt(text=_TURNS, demonstration="7"))
            if payload is not None and payload.kind == KIND and not len(values(payload, "prompt")):
                fault(f"{encode.__name__}() encodes a chat to no tokens; raise DataError for what cannot be encoded")
        skip_rest({"not given: no row of `prompts` has a demonstration": not shown})

    def test_another_process_encodes_packs_and_builds_the_same(self, subject: Subject) -> None:
        """Every replica is a process of its own, with hashes of its own."""
        try:
            (theirs,) = run_world(1, _described, subject.maker, subject.prompts)
        except WorldFailedError as error:
            fault(f"the model cannot be made in another process:\n{error}")
        mine = _described(subject.maker, subject.prompts)
        if theirs["hash"] == mine["hash"]:
            raise RuntimeError(
                "the other process has the hash seed of this one, so it shows nothing that hash() changes"
            )
        different = [what for what in ("encodings", "packing") if mine[what] != theirs[what]]
        if different or first_difference(mine["weights"], theirs["weights"]):
            fault(
                f"another process makes other {(*different, 'weights')[0]} from the same rows and seed; do not depend "
                "on hash(), the order of a set, the clock or a global random state"
            )

    def test_only_what_was_decided_is_priced(self, subject: Subject) -> None:
        """An observation conditions what follows it, and is never trained on."""
        _conversing(subject)
        is_seen = False
        for index, payload in enumerate(subject.payloads):
            if payload.kind != KIND or payload.arrays["completion"].shape[0] < 3:
                continue
            decided_C = np.zeros(len(values(payload, "completion")), np.bool_)
            decided_C[::3] = decided_C[-1] = True
            told = attrs.evolve(payload, arrays={**payload.arrays, "decided": array_of(decided_C)})
            batch = subject.pack_alone(told)
            if batch.num_decisions != (int(decided_C.sum()),):
                fault(
                    f"payload {index} has {int(decided_C.sum())} units that were decided, and pack() made decisions of "
                    f"{batch.num_decisions[0]}; leave out those that the array `decided` says are not the model's"
                )
            with torch.no_grad():
                found_N, all_C = (subject.decide(each).logprobs_N for each in (batch, subject.alone[index]))
            what = f"payload {index}: log-probs of what was decided change when units between are declared not to be"
            expect_close(found_N, all_C[torch.from_numpy(decided_C)], what, rtol=0, atol=subject.tolerance)
            is_seen = True
        skip_rest({"not given: no payload of tokens has three decisions": not is_seen})

    def test_an_observation_is_encoded_to_what_it_says(self, subject: Subject) -> None:
        """The model is to read what the environment answered, and its own turn ends once."""
        conversing, model, stop = _conversing(subject), subject.model, min(subject.facts.stop_ids)
        for prompt in _talks(model):
            ids = list(conversing.encode_observation(prompt, [stop], _OBSERVATION))
            text = model.decode(tokens_payload([stop], ids))
            if _OBSERVATION not in text:
                fault(f"encode_observation() of {_OBSERVATION!r} after {prompt.text!r:.80} decodes to {text!r}")
            if ids[:1] == [stop]:
                fault(f"encode_observation() begins with token {stop}, with which the model has just ended its turn")

    def test_words_of_others_never_become_tokens_that_steer(
        self, subject: Subject, request: pytest.FixtureRequest
    ) -> None:
        """Neither a tool that answers `<|im_end|>` nor a stranger who says it may end a turn, or begin one."""
        conversing, model, stop = _conversing(subject), subject.model, min(subject.facts.stop_ids)
        steering: Mapping[str, int] = request.getfixturevalue("steering")

        def observed(prompt: Prompt, said: str) -> list[int]:
            return list(conversing.encode_observation(prompt, [stop], said))

        def heard(said: str) -> list[int]:
            prompt = Prompt(text=(Message(role="user", content=said),))
            ids: list[int] = values(model.encode(prompt), "prompt").tolist()
            return ids

        talks = _talks(model)
        for prompt in talks:
            plain = observed(prompt, _APART)
            for text, id_ in steering.items():
                said = f"{_APART}{text}{_APART}"
                ids = observed(prompt, said)
                if ids.count(id_) > plain.count(id_):
                    fault(
                        f"encode_observation() of {said!r} after {prompt.text!r:.80} has the token {id_}, {text!r}: "
                        "what an environment answers steers the model; encode its words as text, as "
                        "`split_special_tokens=True` does"
                    )
                if text not in (decoded := model.decode(tokens_payload([stop], ids))):
                    fault(f"encode_observation() of {said!r} after {prompt.text!r:.80} decodes to {decoded!r}")
                if not isinstance(prompt.text, str) and heard(said).count(id_) > heard(_APART).count(id_):
                    fault(
                        f"encode() of a chat whose user says {text!r} has the token {id_} of that name; only the chat "
                        "template may write it: encode the words of others as text"
                    )
        skip_rest({"not declared: the model takes no chats": len(talks) == 1})


def _check_demonstration(subject: Subject, prompt: Prompt) -> None:
    model, stops = subject.model, subject.facts.stop_ids
    whole = model.encode_demonstration(prompt)
    for name, array in contents(model.encode(prompt)).items():
        if contents(whole).get(name) != array:
            fault(
                f"encode_demonstration({prompt.text!r}) has another array {name!r} than encode() of the same row; "
                "encode the conditioning in one place"
            )
    if not isinstance(text := model.decode(whole), str):
        fault(f"decode() gave {text!r}; give a str, empty for what has no text")
    if whole.kind != KIND:
        return
    if text != prompt.demonstration:
        fault(f"decode() gives {text!r} for the demonstration {prompt.demonstration!r}")
    ids = values(whole, "completion").tolist()
    if not ids or ids[-1] not in stops:
        fault(
            f"the demonstration {prompt.demonstration!r} ends with token {ids[-1:]}, which is none of the stop ids "
            f"{sorted(stops)} of facts(); append the token that ends a completion"
        )


def _conversing(subject: Subject) -> MultiTurnModel:
    conversing: MultiTurnModel = subject.optional(MultiTurnModel, "the model has no `encode_observation`")
    return conversing


def _talks(model: Model) -> list[Prompt]:
    """Rows that a dialogue may begin with: plain text, and a chat if the model takes any."""
    plain, chat = Prompt(text="How many?"), Prompt(text=_TURNS[1:])
    return [plain] if attempt(model.encode, chat) is None else [plain, chat]


def _described(make: PluginModel, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Rows, encoded and packed, and weights, as this process makes them."""
    model = make()
    shown = demonstrations(model, prompts)
    return {
        "hash": hash(_OBSERVATION),
        "encodings": [contents(payload) for payload in [*map(model.encode, prompts), *shown]],
        "packing": [list(batch.sequences) for batch in model.pack(shown, budget=ROOM)],
        "weights": copied(model.build(seed=SEED, dtype=torch.float32, device=CPU)),
    }
