"""Tests of rows and payloads: how they are encoded, shown, packed into micro-batches, and become texts again."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs
import torch

from cosmos_core.errors import UntriedError
from cosmos_core.models.diffusion.arrays import with_tensors
from cosmos_core.models.tokens import KIND, tokens_payload, values
from cosmos_core.policy.training.microbatch import Piece, pieces
from cosmos_core.policy.trial import TRIAL_UNITS
from cosmos_core.protocols import MicroBatch, Model
from cosmos_core.protocols.model import MultiTurnModel, Trial, TriedModel
from cosmos_core.protocols.vision import DialogueVision, VisionModel
from cosmos_core.protocols.world import WorldModel
from cosmos_core.testing.conformance.model.subject import (
    ROOM,
    SEED,
    Subject,
    attempt,
    contents,
    copied,
    expect_each_close,
    expect_refusal,
    first_difference,
    skip_rest,
)
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.testing.layouts import CPU, PluginModel
from cosmos_core.testing.worlds import WorldFailedError, run_world
from cosmos_core.types import Message, Payload, Prompt

_CHAT: Final = Prompt(text=(Message(role="user", content="How many?"),), demonstration="7")
_OBSERVATION: Final = "How many apples now? 7+5=12"
_APART: Final = "7 and "
_ALIKE: Final = 1e-4
"""How far features of one image may lie apart, alone and beside others."""


class RowTests:
    """Tests of `encode`, `encode_demonstration`, `decode`, `pack`, and of a `MultiTurnModel` or a `VisionModel`."""

    def test_payloads_are_of_the_declared_kinds(self, subject: Subject) -> None:
        """Planning pairs model, engine and rewards by what is declared; other payloads only look like ours."""
        made = {payload.kind for payload in [*map(subject.model.encode, subject.prompts), *subject.payloads]}
        declared = set(subject.capabilities.payload_kinds)
        if made != declared:
            what = f"prompts and payloads of the kit are of kind {sorted(made)}, and {sorted(declared)} is declared"
            fault(f"{what}; make ModelCapabilities.payload_kinds and the fixture `payloads` agree")
        foreign = Payload(kind="no-model-takes-this", arrays={})
        what = f"pack() took a payload of kind {foreign.kind!r}, and the plugin declares {sorted(declared)}"
        expect_refusal(what, subject.model.pack, [foreign], budget=ROOM)

    def test_demonstrations_are_what_is_asked_for_and_answered(self, subject: Subject) -> None:
        """A model is trained on the conditioning that it will be given, and to stop; rewards read its text."""
        model, shown = subject.model, [each for each in subject.prompts if each.demonstration is not None]
        for prompt in shown:
            _check_demonstration(subject, prompt)
        row = attrs.evolve(subject.prompts[0], demonstration=None)
        what = "encode_demonstration() took a row without a demonstration"
        expect_refusal(what, model.encode_demonstration, row)
        for encode in (model.encode, model.encode_demonstration):
            payload = attempt(encode, _CHAT)
            if payload is not None and payload.kind == KIND and not len(values(payload, "prompt")):
                fault(f"{encode.__name__}() encodes a chat to no tokens; raise DataError for what cannot be encoded")
        skip_rest({"not given: no row of `prompts` has a demonstration": not shown})

    def test_another_process_encodes_packs_and_builds_the_same(self, subject: Subject) -> None:
        """Every replica is a process of its own, with hashes of its own."""
        model = subject.model
        trial = None
        with contextlib.suppress(UntriedError):
            trial = model.trial(num_layers=2) if isinstance(model, TriedModel) else None
        try:
            (theirs,) = run_world(1, _described, subject.maker, subject.prompts, trial)
        except WorldFailedError as error:
            fault(f"the model, or a small one of its make, cannot be made in another process:\n{error}")
        mine = _described(subject.maker, subject.prompts, trial)
        if theirs["hash"] == mine["hash"]:
            raise RuntimeError("the other process has the hash seed of this one: it shows nothing that hash() changes")
        different = [what for what in ("encodings", "packing") if mine[what] != theirs[what]]
        if different or first_difference(mine["weights"], theirs["weights"]):
            fault(f"another process makes other {(*different, 'weights')[0]}; depend on no hash() or clock")

    def test_only_what_was_decided_is_priced(self, subject: Subject) -> None:
        """An observation conditions what follows it, and is never trained on."""
        _multi_turn(subject)
        payloads, expected = [], []
        for payload, all_C in zip(subject.payloads, subject.logprobs_alone(), strict=True):
            if payload.kind == KIND and len(all_C) >= 3:
                decided_C = torch.arange(len(all_C)) % 3 == 0
                decided_C[-1] = True
                payloads.append(with_tensors(payload, {"decided": decided_C}))
                expected.append(all_C[decided_C])
        what = (
            "log-probs of what was decided change when units between are declared not to be; leave out those that the "
            "array `decided` says are not the model's, and let them condition what follows"
        )
        found = attrs.evolve(subject, payloads=payloads).logprobs(subject.module)
        expect_each_close(found, expected, what, subject.kit.tolerance)
        skip_rest({"not given: no payload of tokens has three decisions": not payloads})

    def test_words_of_others_are_kept_and_never_steer(self, subject: Subject, steering: Mapping[str, int]) -> None:
        """Neither a tool that answers `<|im_end|>` nor a stranger who says it may end a turn, or begin one."""
        (multi_turn, stop), model = _multi_turn(subject), subject.model
        is_chatting = attempt(model.encode, _CHAT) is not None

        def heard(said: str) -> list[int]:
            prompt = Prompt(text=_said(said))
            ids: list[int] = values(model.encode(prompt), "prompt").tolist()
            return ids

        for prompt in (Prompt(text="How many?"), *([_CHAT] if is_chatting else [])):
            plain = list(multi_turn.encode_turns(prompt, [stop], _said(_OBSERVATION)))
            if plain[:1] == [stop]:
                fault(f"encode_turns() begins with token {stop}, with which the model has just ended its turn")
            for text, id_ in {"": -1, **steering}.items():
                said = f"{_APART}{text}{_OBSERVATION}"
                ids = list(multi_turn.encode_turns(prompt, [stop], _said(said)))
                if ids.count(id_) > plain.count(id_):
                    fault(
                        f"encode_turns() of {said!r} after {prompt.text!r:.80} has the token {id_}, {text!r}: "
                        "what an environment answers steers the model; encode its words as text (split_special_tokens)"
                    )
                decoded = model.decode(tokens_payload([stop], ids))
                if _OBSERVATION not in decoded or text not in decoded:
                    fault(
                        f"encode_turns() of {said!r} after {prompt.text!r:.80} decodes to {decoded!r}; leave "
                        "nothing out of what is said"
                    )
                if prompt is _CHAT and heard(said).count(id_) > heard(_APART).count(id_):
                    fault(
                        f"encode() of a chat whose user says {text!r} has the token {id_} of that name; only the chat "
                        "template may write it: encode the words of others as text"
                    )
        lacking = "not given: no tokenizer whose special tokens the kit knows; override the fixture `steering`"
        skip_rest({"not declared: the model takes no chats": not is_chatting, lacking: not steering})

    def test_a_turn_is_read_whatever_it_says(self, subject: Subject) -> None:
        """A turn may be cut anywhere, and a model that learns writes calls that nothing can read."""
        (multi_turn, stop), model = _multi_turn(subject), subject.model
        is_chatting = attempt(model.encode, _CHAT) is not None
        for prompt in (Prompt(text="How many?"), *([_CHAT] if is_chatting else [])):
            written = list(multi_turn.encode_turns(Prompt(text="How many?"), [stop], _said(_OBSERVATION)))
            for ids in ([*written, stop], written, written[:1], [stop], [stop, *written, stop, stop], []):
                read = multi_turn.read_turn(prompt, ids)
                if read.message.role != "assistant" or read.message.tool_calls or read.malformed:
                    fault(f"read_turn() of {ids} gave {read}; a prompt without tools has turns of words alone")
                wanted = model.decode(tokens_payload([stop], ids))
                if read.message.content != wanted:
                    fault(f"read_turn() of {ids} has the content {read.message.content!r}; decode() gives {wanted!r}")
        skip_rest({"not declared: the model takes no chats": not is_chatting})

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
            expect_refusal(what, vision.condition, with_tensors(payload, {"kit-made": torch.zeros(1)}))

    def test_each_image_or_video_is_shown_where_it_stands(self, subject: Subject) -> None:
        """Each is shown once, in the order of the prompt, and no unit is for two of them."""
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
                stop = each.start + len(each.is_seen_U)
                if not end <= each.start < stop <= units or not each.is_seen_U[-1]:
                    fault(
                        f"shown() puts one from {each.start} to {stop} of a prompt of {units} units, after one that "
                        f"ends at {end}; they lie in the prompt, share no unit, and the last unit of each is seen"
                    )
                end = stop
            if prompt.media:
                _check_missed("shown", shown_by, payload)

    def test_what_a_turn_shows_enters_where_it_stands_and_what_the_model_wrote_shows_nothing(
        self, subject: Subject
    ) -> None:
        """An engine is given a dialogue as its parts, joined, in which a policy may have sampled any token."""
        seeing: DialogueVision = subject.optional(DialogueVision, "turns show no images")
        (multi_turn, stop), row = _multi_turn(subject), Prompt(text="How many?")
        media = next((prompt.media[:1] for prompt in subject.prompts if prompt.media), None)
        if media is None:
            fault("the model is a `DialogueVision`, and none of `prompts` shows an image; give one of them one, first")
        turn = Message(role="user", content=_OBSERVATION)
        bare, seen = (seeing.encode_seen_turns(row, [stop], [attrs.evolve(turn, media=each)]) for each in ((), media))
        if values(bare, "prompt").tolist() != list(multi_turn.encode_turns(row, [stop], [turn])):
            fault("encode_seen_turns() of a turn without images has other ids than encode_turns(); encode it alike")
        ids = values(seen, "prompt").tolist()
        begun, written = subject.model.encode(row), tokens_payload(ids)
        parts = [begun, seen, written, seen]
        whole = seeing.join(parts)
        if values(whole, "prompt").tolist() != [each for part in parts for each in values(part, "prompt").tolist()]:
            fault("join() gave other ids than those of its parts, one after another")
        if contents(whole) != contents(seeing.join([seeing.join(parts[:2]), seeing.join(parts[2:])])):
            fault("join() of joined parts is not what it is of the parts; a dialogue grows by a part at a time")
        _check_joined(subject, seen, whole, len(ids))


class PackingTests:
    """Tests of `pack`: each payload once, within the budget, and the same each time."""

    def test_each_payload_is_packed_once_within_the_budget(self, subject: Subject) -> None:
        """A lost payload is never learnt from; the budget is what fits into memory; averages are made of the counts."""
        sizes = [batch.num_units for batch in subject.alone]
        for index, (payload, size, batch) in enumerate(zip(subject.payloads, sizes, subject.alone, strict=True)):
            if payload.kind != KIND:
                continue
            prompt, completion = (len(values(payload, name)) for name in ("prompt", "completion"))
            # The last token predicts nothing, so a plugin may leave it out.
            if batch.num_decisions != (completion,) or size < prompt + completion - 1:
                fault(
                    f"payload {index} of {prompt} and {completion} tokens is packed as {batch.num_decisions} decisions "
                    f"in {size} units; decide each token of the completion, and count every token in num_units"
                )
        for budget in subject.budgets:
            batches = subject.model.pack(subject.payloads, budget=budget)
            _check_pieces(subject, batches, budget)
            if (largest := max(batch.num_units for batch in batches)) > budget:
                fault(f"pack() made a micro-batch of {largest} units under a budget of {budget}; begin another one")
        index = sizes.index(max(sizes))
        found = attempt(subject.model.pack, [subject.payloads[index]], budget=sizes[index] - 1)
        if found is not None and (len(found) < 2 or any(batch.num_units >= sizes[index] for batch in found)):
            fault(
                f"pack() took payload {index} of {sizes[index]} units under a budget of {sizes[index] - 1}; raise "
                "DataError that names the payload and policy.micro_batch_units, or split it (`MicroBatch.spans`)"
            )

    def test_packing_depends_on_the_payloads_alone(self, subject: Subject) -> None:
        """A resumed run and every replica pack the same, of read-only frames of a network, on any machine."""
        received = [_received(payload) for payload in subject.payloads]
        for budget in subject.budgets:
            expected = subject.model.pack(subject.payloads, budget=budget)
            for name, tensor in (item for batch in expected for item in batch.inputs.items()):
                if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu":
                    fault(f"MicroBatch.inputs[{name!r}] is {type(tensor).__name__}; give a torch.Tensor on the CPU")
            for what, payloads in (
                ("a second time", subject.payloads),
                ("for payloads that lie in read-only memory (a memoryview)", received),
            ):
                found = subject.model.pack(payloads, budget=budget)
                if list(map(_contents, found)) != list(map(_contents, expected)):
                    fault(f"pack() gives other micro-batches {what} (budget of {budget} units); draw and keep nothing")
        if batches := list(subject.model.pack([], budget=ROOM)):
            fault(f"pack([]) gave {len(batches)} micro-batches; give an empty list: a share may have no sequence")


def demonstrations(model: Model, prompts: Sequence[Prompt]) -> list[Payload]:
    """The rows that have one, as a policy trains on them: with drawn points, of a model that needs these."""
    shown = [model.encode_demonstration(prompt) for prompt in prompts if prompt.demonstration is not None]
    return [model.noised(each, index) for index, each in enumerate(shown)] if isinstance(model, WorldModel) else shown


def _check_demonstration(subject: Subject, prompt: Prompt) -> None:
    model, stops = subject.model, subject.facts.stop_ids
    whole = model.encode_demonstration(prompt)
    for name, array in contents(model.encode(prompt)).items():
        if contents(whole).get(name) != array:
            what = f"encode_demonstration({prompt.text!r}) has another array {name!r} than encode() of the same row"
            fault(f"{what}; keep what conditions, and add what is imitated")
    if not isinstance(text := model.decode(whole), str):
        fault(f"decode() gave {text!r}; give a str, empty for what has no text")
    if whole.kind != KIND:
        return
    if text != prompt.demonstration:
        fault(
            f"decode() gives {text!r} for the demonstration {prompt.demonstration!r}; give its text, no token that ends"
        )
    ids = values(whole, "completion").tolist()
    if not ids or ids[-1] not in stops:
        what = f"{prompt.demonstration!r} ends with token {ids[-1:]}, none of the stop ids {sorted(stops)} of facts()"
        fault(f"{what}; end it as the model is to end")


def _said(text: str) -> tuple[Message, ...]:
    return (Message(role="user", content=text),)


def _multi_turn(subject: Subject) -> tuple[MultiTurnModel, int]:
    """The model, and the token with which it ends its turn."""
    multi_turn: MultiTurnModel = subject.optional(MultiTurnModel, "the model has no `encode_turns`")
    return multi_turn, min(subject.facts.stop_ids)


def _described(make: PluginModel, prompts: Sequence[Prompt], trial: Trial | None) -> dict[str, Any]:
    """Rows, encoded and packed, and weights, as this process makes them."""
    model = make()
    shown = demonstrations(model, prompts)
    packed = model.pack(shown, budget=ROOM)
    if trial is not None:
        packed += trial.make().pack(trial.payloads, budget=TRIAL_UNITS)
    return {
        "hash": hash(_OBSERVATION),
        "encodings": [contents(payload) for payload in [*map(model.encode, prompts), *shown]],
        "packing": [_contents(batch) for batch in packed],
        "weights": copied(model.build(seed=SEED, dtype=torch.float32, device=CPU)),
    }


def _check_entered(vision: VisionModel, payload: Payload, module: torch.nn.Module, other: torch.nn.Module) -> None:
    units, conditioning = payload.arrays["prompt"].shape[0], vision.condition(payload)
    if conditioning is None:
        fault("condition() of a prompt that shows something gave None; it would be computed as text")
    if conditioning.positions.shape[-1] != units or conditioning.positions.dtype != torch.int64:
        found = f"{conditioning.positions.dtype} {list(conditioning.positions.shape)}"
        fault(f"positions of {units} units are {found}; give torch.int64 [..., {units}]")
    with torch.no_grad():
        one, again, changed = (vision.enter(each, conditioning) for each in (module, module, other))
    if odd := {name: list(rows.shape) for name, rows in one.items() if len(rows) != units}:
        fault(f"enter() of {units} units gave {odd}; give a row for each unit")
    if first_difference(one, again):
        fault("enter() gave something else for the same weights and prompt; draw nothing")
    if all(torch.equal(one[name], changed[name]) for name in one):
        fault("enter() gave the same for other weights; keep nothing from one call to the next")


def _check_joined(subject: Subject, seen: Payload, whole: Payload, units: int) -> None:
    """The dialogue ends with an image's units, the same tokens as the model wrote them, and the image's again."""
    vision: VisionModel = subject.optional(VisionModel, "turns show no images")
    alone, laid = vision.condition(seen), vision.condition(whole)
    if alone is None or laid is None:
        fault("a turn with an image has no arrays of what it shows, or join() lost them; keep them beside the ids")
    with torch.no_grad():
        expected, entered = (vision.enter(subject.module, each) for each in (alone, laid))
    apart = []
    for name, rows in expected.items():
        three = torch.split(entered[name][-3 * units :], units)
        first, written, last = (float((each - rows).abs().max()) for each in three)
        apart.append(written)
        if max(first, last) > _ALIKE:
            fault(f"{name} of an image are {max(first, last):.3g} off in a dialogue; each enters as it does alone")
    if max(apart) <= _ALIKE:
        fault("what the model wrote enters as the image that its tokens stand for in a turn; `kinds` tells them apart")
    if vision.shown is not None and (found := len(vision.shown(whole))) != 2:
        fault(f"shown() of a dialogue of 2 images gave {found}; what the model wrote stands for none")


def _check_missed(name: str, method: Any, payload: Payload) -> None:
    """A method refuses a prompt that lacks one of the arrays of what it shows."""
    for lost in payload.arrays.keys() - {"prompt"}:
        rest = {each: array for each, array in payload.arrays.items() if each != lost}
        what = f"{name}() took a prompt that shows something without its array {lost!r}"
        expect_refusal(what, method, attrs.evolve(payload, arrays=rest))


def _check_pieces(subject: Subject, batches: Sequence[MicroBatch], budget: int) -> None:
    """The pieces of each payload are all of it, in order, in micro-batches that follow each other, and all counted."""
    found: dict[int, list[tuple[int, Piece]]] = {index: [] for index in range(len(subject.payloads))}
    for place, batch in enumerate(batches):
        for piece in pieces(batch):
            found.setdefault(piece.sequence, []).append((place, piece))
    for sequence, parts in found.items():
        places = [place for place, _ in parts]
        decided = [(piece.span.total, piece.span.first + n) for _, piece in parts for n in range(piece.number)]
        total = sum(sum(batch.num_decisions) for batch in subject.alone[sequence : sequence + 1])
        if not places or decided != [(total, n) for n in range(total)] or places != [*range(places[0], places[-1] + 1)]:
            shown = [f"{piece.number} from {piece.span.first} on of {piece.span.total}" for _, piece in parts]
            fault(
                f"under a budget of {budget} units payload {sequence} of {total} decisions is packed as "
                f"{', '.join(shown) or 'nothing'}, in micro-batches {places}; give every decision once, in order, in "
                "micro-batches that follow each other"
            )
    for batch in batches:
        whole = [piece.sequence for piece in pieces(batch) if piece.number == piece.span.total]
        if batch.num_units < (least := sum(subject.alone[index].num_units for index in whole)):
            fault(f"num_units is {batch.num_units} of payloads {whole} of {least}; count every unit of the forward")


def _contents(batch: MicroBatch) -> tuple[object, ...]:
    inputs = {name: (tensor.dtype, tensor.tolist()) for name, tensor in batch.inputs.items()}
    return tuple(batch.sequences), tuple(batch.num_decisions), tuple(batch.spans), batch.num_units, inputs


def _received(payload: Payload) -> Payload:
    arrays = {name: attrs.evolve(each, data=memoryview(bytes(each.data))) for name, each in payload.arrays.items()}
    return attrs.evolve(payload, arrays=arrays)
