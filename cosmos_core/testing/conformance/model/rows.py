"""Tests of rows and payloads: how they are encoded, shown, packed into micro-batches, and become texts again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs
import numpy as np
import pytest
import torch

from cosmos_core.models.tokens import KIND, array_of, tokens_payload, values
from cosmos_core.policy.training.microbatch import Piece, pieces
from cosmos_core.protocols import MicroBatch, Model
from cosmos_core.protocols.model import MultiTurnModel
from cosmos_core.protocols.vision import VisionModel
from cosmos_core.protocols.world import WorldModel
from cosmos_core.testing.conformance.model.subject import (
    ROOM,
    SEED,
    Subject,
    attempt,
    contents,
    copied,
    expect_close,
    expect_refusal,
    first_difference,
    skip_rest,
    split,
)
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.testing.layouts import CPU, PluginModel
from cosmos_core.testing.worlds import WorldFailedError, run_world
from cosmos_core.types import Message, Payload, Prompt

_TURNS: Final = (Message(role="system", content="Be brief."), Message(role="user", content="How many?"))
_OBSERVATION: Final = "How many apples now? 7+5=12"
_APART: Final = "7 and "
_MULTIPLE: Final = 7
"""One that no size of a test happens to be a multiple of."""


class RowTests:
    """Tests of `encode`, `encode_demonstration`, `decode`, `pack`, and of a `MultiTurnModel` or a `VisionModel`."""

    def test_payloads_are_of_the_declared_kinds(self, subject: Subject) -> None:
        """Planning pairs model, engine and rewards by what is declared; other payloads only look like ours."""
        made = {payload.kind for payload in [*map(subject.model.encode, subject.prompts), *subject.payloads]}
        declared = set(subject.capabilities.payload_kinds)
        if made - declared:
            fault(f"payloads are of kind {sorted(made)}, and ModelCapabilities.payload_kinds declares {declared}")
        if declared - made:
            fault(
                f"payload kinds {', '.join(sorted(declared - made))} are declared, and no payload of the kit is of them"
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
            raise RuntimeError("the other process has the hash seed of this one: it shows nothing that hash() changes")
        different = [what for what in ("encodings", "packing") if mine[what] != theirs[what]]
        if different or first_difference(mine["weights"], theirs["weights"]):
            fault(f"another process makes other {(*different, 'weights')[0]}; depend on no hash() or clock")

    def test_only_what_was_decided_is_priced(self, subject: Subject) -> None:
        """An observation conditions what follows it, and is never trained on."""
        _multi_turn(subject)
        is_seen = False
        for index, (payload, all_C) in enumerate(zip(subject.payloads, subject.logprobs_alone(), strict=True)):
            if payload.kind != KIND or payload.arrays["completion"].shape[0] < 3:
                continue
            is_seen, decided_C = True, np.zeros(len(values(payload, "completion")), np.bool_)
            decided_C[::3] = decided_C[-1] = True
            batch = subject.pack_alone(_with(payload, decided=array_of(decided_C)))
            if batch.num_decisions != (int(decided_C.sum()),):
                fault(
                    f"payload {index} has {int(decided_C.sum())} decided units, pack() gives {batch.num_decisions[0]}; "
                    "leave out those that the array `decided` says are not the model's"
                )
            with torch.no_grad():
                found_N = subject.decide(batch).logprobs_N
            what = f"payload {index}: log-probs of what was decided change when units between are declared not to be"
            expect_close(found_N, all_C[torch.from_numpy(decided_C)], what, rtol=0, atol=subject.kit.tolerance)
        skip_rest({"not given: no payload of tokens has three decisions": not is_seen})

    def test_an_observation_is_encoded_to_what_it_says(self, subject: Subject) -> None:
        """The model is to read what the environment answered, and its own turn ends once."""
        multi_turn, stop = _multi_turn(subject)
        for prompt in _talks(subject.model):
            ids = list(multi_turn.encode_observation(prompt, [stop], _OBSERVATION))
            text = subject.model.decode(tokens_payload([stop], ids))
            if _OBSERVATION not in text:
                fault(f"encode_observation() of {_OBSERVATION!r} after {prompt.text!r:.80} decodes to {text!r}")
            if ids[:1] == [stop]:
                fault(f"encode_observation() begins with token {stop}, with which the model has just ended its turn")

    def test_words_of_others_never_become_tokens_that_steer(
        self, subject: Subject, request: pytest.FixtureRequest
    ) -> None:
        """Neither a tool that answers `<|im_end|>` nor a stranger who says it may end a turn, or begin one."""
        (multi_turn, stop), model = _multi_turn(subject), subject.model
        steering: Mapping[str, int] = request.getfixturevalue("steering")

        def heard(said: str) -> list[int]:
            prompt = Prompt(text=(Message(role="user", content=said),))
            ids: list[int] = values(model.encode(prompt), "prompt").tolist()
            return ids

        talks = _talks(model)
        for prompt in talks:
            plain = list(multi_turn.encode_observation(prompt, [stop], _APART))
            for text, id_ in steering.items():
                said = f"{_APART}{text}{_APART}"
                ids = list(multi_turn.encode_observation(prompt, [stop], said))
                if ids.count(id_) > plain.count(id_):
                    fault(
                        f"encode_observation() of {said!r} after {prompt.text!r:.80} has the token {id_}, {text!r}: "
                        "what an environment answers steers the model; encode its words as text (split_special_tokens)"
                    )
                if text not in (decoded := model.decode(tokens_payload([stop], ids))):
                    fault(f"encode_observation() of {said!r} after {prompt.text!r:.80} decodes to {decoded!r}")
                if not isinstance(prompt.text, str) and heard(said).count(id_) > heard(_APART).count(id_):
                    fault(
                        f"encode() of a chat whose user says {text!r} has the token {id_} of that name; only the chat "
                        "template may write it: encode the words of others as text"
                    )
        skip_rest({"not declared: the model takes no chats": len(talks) == 1})

    def test_each_unit_of_a_prompt_enters_by_the_weights(self, subject: Subject) -> None:
        """An engine cuts prompts anywhere, asks again after an update, and refuses a request when it comes."""
        vision: VisionModel = subject.optional(VisionModel, "prompts are token ids alone")
        encoded = [(bool(prompt.media), subject.model.encode(prompt)) for prompt in subject.prompts]
        if not any(is_shown for is_shown, _ in encoded):
            fault("the model is a `VisionModel`, and none of `prompts` shows anything; give some of them media")
        other = subject.other_weights()
        for is_shown, payload in encoded:
            if is_shown:
                _check_entered(vision, payload, subject.module, other)
                _check_missed("condition", vision.condition, payload)
            elif vision.condition(payload) is not None:
                fault("condition() of a prompt without media gave something; give None where token ids say it all")
        for _, payload in encoded:
            what = "condition() took a prompt with an array that no model knows, 'kit-made'"
            expect_refusal(what, vision.condition, _with(payload, **{"kit-made": payload.arrays["prompt"]}))

    def test_each_image_or_video_is_shown_where_it_stands(self, subject: Subject) -> None:
        """Once, in the order of the prompt, no unit for two of them."""
        why = "no other implementation takes what its prompts show"
        shown_by = subject.optional(VisionModel, why, lambda model: model.shown is not None).shown
        if not any(prompt.media for prompt in subject.prompts):
            fault("the model has `shown`, and none of `prompts` shows anything; give some of them media")
        for prompt in subject.prompts:
            payload, end = subject.model.encode(prompt), 0
            shown, units = shown_by(payload), payload.arrays["prompt"].shape[0]
            if len(shown) != len(prompt.media):
                fault(f"shown() of a prompt with {len(prompt.media)} media gave {len(shown)}; give one for each")
            for each in shown:
                number = len(each.is_seen_U)
                if not 0 <= each.start < each.start + number <= units:
                    fault(f"shown() puts {number} units at {each.start} of a prompt of {units}; they lie in it")
                if not each.is_seen_U[-1]:
                    fault("shown() gave units of which none, or not the last, is seen; end with one that is")
                if each.start < end:
                    fault(f"shown() puts one at {each.start}, before the end of another at {end}; they share no unit")
                end = each.start + number
            if prompt.media:
                _check_missed("shown", shown_by, payload)


class PackingTests:
    """Tests of `pack`: each payload once, within the budget, the same each time, and padded to no effect."""

    def test_each_payload_is_packed_once_within_the_budget(self, subject: Subject) -> None:
        """What is lost is never learnt from; the budget is what fits into memory; averages are made of the counts."""
        for payload, batch in zip(subject.payloads, subject.alone, strict=True):
            if payload.kind == KIND:
                prompt, completion = (len(values(payload, name)) for name in ("prompt", "completion"))
                # The last token predicts nothing, so a plugin may leave it out.
                if batch.num_decisions != (completion,) or batch.num_units < prompt + completion - 1:
                    told = batch.num_decisions, batch.num_units
                    fault(f"{prompt} and {completion} tokens are packed as {told[0]} decisions in {told[1]} units")
        for budget in subject.budgets:
            batches = subject.model.pack(subject.payloads, budget=budget)
            _check_pieces(batches, len(subject.payloads), budget)
            if (largest := max(batch.num_units for batch in batches)) > budget:
                fault(f"pack() made a micro-batch of {largest} units under a budget of {budget}")
            for batch in batches:
                _check_counts(subject, batch)
        longest = max(subject.alone, key=lambda batch: batch.num_units)
        payload, size = subject.payloads[subject.alone.index(longest)], longest.num_units
        found = attempt(subject.model.pack, [payload], budget=size - 1)
        if found is not None and (len(found) < 2 or any(batch.num_units >= size for batch in found)):
            fault(
                f"pack() took a payload of {size} units under a budget of {size - 1}; raise DataError that names the "
                "payload and policy.micro_batch_units, or split it (`MicroBatch.spans`)"
            )

    def test_packing_depends_on_the_payloads_alone(self, subject: Subject) -> None:
        """A resumed run and every replica pack the same, of read-only frames of a network, on any machine."""
        received, model, another = [_received(payload) for payload in subject.payloads], subject.model, subject.maker()
        for budget in subject.budgets:
            expected = model.pack(subject.payloads, budget=budget)
            for name, tensor in (item for batch in expected for item in batch.inputs.items()):
                if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu":
                    fault(f"MicroBatch.inputs[{name!r}] is {type(tensor).__name__}; give a torch.Tensor on the CPU")
            for what, packer, payloads in (
                ("a second time", model, subject.payloads),
                ("by another instance", another, subject.payloads),
                ("for payloads that lie in read-only memory (a memoryview)", model, received),
            ):
                if list(map(_contents, packer.pack(payloads, budget=budget))) != list(map(_contents, expected)):
                    fault(f"pack() gives other micro-batches {what} (budget of {budget} units); draw and keep nothing")
        if batches := list(model.pack([], budget=ROOM)):
            fault(f"pack([]) gave {len(batches)} micro-batches; give an empty list: a share may have no sequence")

    def test_padding_decides_nothing(self, subject: Subject) -> None:
        """Processes of `cp` and `tp` split units evenly, stages pass on one shape; what is added is neither seen."""
        axes = subject.capabilities.mesh_axes
        if not axes & {"cp", "tp", "pp"}:
            pytest.skip("not declared: none of cp, tp and pp, for which micro-batches are padded")
        if {payload.kind for payload in subject.payloads} == {"latents"}:
            pytest.skip("denoising steps are units that no axis splits")
        expected = subject.logprobs_alone()
        for budget in subject.budgets[-3:-1]:
            for is_uniform in (False, True) if "pp" in axes else (False,):
                batches = subject.model.pack(subject.payloads, budget=budget, multiple=_MULTIPLE, is_uniform=is_uniform)
                sizes = sorted({batch.num_units for batch in batches})
                if any(size % _MULTIPLE for size in sizes):
                    fault(f"pack(multiple={_MULTIPLE}) made micro-batches of {sizes} units; pad each to a multiple")
                if is_uniform and len(sizes) > 1:
                    fault(f"pack(is_uniform=True) made micro-batches of {sizes} units; pad all to one size")
                for batch in batches:
                    _check_padded(subject, batch, expected)


def demonstrations(model: Model, prompts: Sequence[Prompt]) -> list[Payload]:
    """The rows that have one, as a policy trains on them: with drawn points, of a model that needs these."""
    shown = [model.encode_demonstration(prompt) for prompt in prompts if prompt.demonstration is not None]
    return [model.noised(each, index) for index, each in enumerate(shown)] if isinstance(model, WorldModel) else shown


def _check_demonstration(subject: Subject, prompt: Prompt) -> None:
    model, stops = subject.model, subject.facts.stop_ids
    whole = model.encode_demonstration(prompt)
    for name, array in contents(model.encode(prompt)).items():
        if contents(whole).get(name) != array:
            fault(f"encode_demonstration({prompt.text!r}) has another array {name!r} than encode() of the same row")
    if not isinstance(text := model.decode(whole), str):
        fault(f"decode() gave {text!r}; give a str, empty for what has no text")
    if whole.kind != KIND:
        return
    if text != prompt.demonstration:
        fault(f"decode() gives {text!r} for the demonstration {prompt.demonstration!r}")
    ids = values(whole, "completion").tolist()
    if not ids or ids[-1] not in stops:
        fault(f"{prompt.demonstration!r} ends with token {ids[-1:]}, none of the stop ids {sorted(stops)} of facts()")


def _multi_turn(subject: Subject) -> tuple[MultiTurnModel, int]:
    """The model, and the token with which it ends its turn."""
    model: MultiTurnModel = subject.optional(MultiTurnModel, "the model has no `encode_observation`")
    return model, min(subject.facts.stop_ids)


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


def _check_entered(vision: VisionModel, payload: Payload, module: torch.nn.Module, other: torch.nn.Module) -> None:
    units, conditioning = payload.arrays["prompt"].shape[0], vision.condition(payload)
    if conditioning is None:
        fault("condition() of a prompt that shows something gave None; it would be computed as text")
    if conditioning.positions.shape[-1] != units or conditioning.positions.dtype != torch.int64:
        fault(f"positions of {units} units are {list(conditioning.positions.shape)}; give int64 [..., {units}]")
    with torch.no_grad():
        one, again, changed = (vision.enter(each, conditioning) for each in (module, module, other))
    if odd := {name: list(rows.shape) for name, rows in one.items() if len(rows) != units}:
        fault(f"enter() of {units} units gave {odd}; give a row for each unit")
    if first_difference(one, again):
        fault("enter() gave something else for the same weights and prompt")
    if all(torch.equal(one[name], changed[name]) for name in one):
        fault("enter() gave the same for other weights; keep nothing from one call to the next")


def _check_missed(name: str, method: Any, payload: Payload) -> None:
    """A method refuses a prompt that lacks one of the arrays of what it shows."""
    for lost in payload.arrays.keys() - {"prompt"}:
        rest = {each: array for each, array in payload.arrays.items() if each != lost}
        what = f"{name}() took a prompt that shows something without its array {lost!r}"
        expect_refusal(what, method, attrs.evolve(payload, arrays=rest))


def _check_padded(subject: Subject, batch: MicroBatch, expected: Sequence[torch.Tensor]) -> None:
    counts = tuple(len(expected[index]) for index in batch.sequences)
    if batch.num_decisions != counts:
        fault(f"{counts} decisions are {batch.num_decisions} by num_decisions where the micro-batch is padded")
    with torch.no_grad():
        found = split(batch, subject.decide(batch).logprobs_N)
    for index, logprobs_N in found.items():
        what = f"log-probs of payload {index}, padded to {batch.num_units} units; let no sequence see padding"
        expect_close(logprobs_N, expected[index], what, rtol=subject.kit.tolerance, atol=subject.kit.tolerance)


def _check_pieces(batches: Sequence[MicroBatch], number: int, budget: int) -> None:
    """The pieces of each sequence are all of it, in order, in micro-batches that follow each other."""
    found: dict[int, list[tuple[int, Piece]]] = {index: [] for index in range(number)}
    for place, batch in enumerate(batches):
        if batch.spans and len(batch.spans) != len(batch.sequences):
            fault(f"a micro-batch of {len(batch.sequences)} sequences has {len(batch.spans)} spans; give one for each")
        for piece in pieces(batch):
            found.setdefault(piece.sequence, []).append((place, piece))
    for sequence, parts in found.items():
        places, totals = [place for place, _ in parts], {piece.span.total for _, piece in parts}
        decided = [piece.span.first + number for _, piece in parts for number in range(piece.number)]
        is_whole = len(totals) == 1 and decided == list(range(*totals))
        if not is_whole or places != list(range(places[0], places[0] + len(parts))):
            shown = [f"{piece.number} from {piece.span.first} on of {piece.span.total}" for _, piece in parts]
            fault(
                f"under a budget of {budget} units payload {sequence} is packed as {', '.join(shown) or 'nothing'}, in "
                f"micro-batches {places}; give every decision once, in order, in micro-batches that follow each other"
            )


def _check_counts(subject: Subject, batch: MicroBatch) -> None:
    expected = tuple(subject.alone[index].num_decisions[0] for index in batch.sequences)
    told = tuple(piece.span.total for piece in pieces(batch))
    if told != expected:
        fault(f"payloads {batch.sequences} have {expected} decisions, num_decisions says {told}")
    whole = [piece.sequence for piece in pieces(batch) if piece.number == piece.span.total]
    if batch.num_units < (least := sum(subject.alone[index].num_units for index in whole)):
        fault(f"num_units is {batch.num_units} of payloads of {least}; count every unit that the forward processes")


def _contents(batch: MicroBatch) -> tuple[object, ...]:
    inputs = {name: (tensor.dtype, tensor.tolist()) for name, tensor in batch.inputs.items()}
    return tuple(batch.sequences), tuple(batch.num_decisions), tuple(batch.spans), batch.num_units, inputs


def _received(payload: Payload) -> Payload:
    return _with(
        payload,
        **{name: attrs.evolve(each, data=memoryview(bytes(each.data))) for name, each in payload.arrays.items()},
    )


def _with(payload: Payload, **arrays: Any) -> Payload:
    """The payload with more arrays, or others in their place."""
    return attrs.evolve(payload, arrays={**payload.arrays, **arrays})
