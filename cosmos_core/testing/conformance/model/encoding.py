"""Tests of rows that become payloads and texts again, also in another process and turn by turn.

`python -m cosmos_core.testing.conformance.model.encoding QUESTION ANSWER` is that process.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import msgspec
import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from cosmos_core.errors import DataError
from cosmos_core.models.tokens import KIND, array_of, tokens_payload, values
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import Model, ModelCapabilities, ModelContext
from cosmos_core.protocols.model import Conversing
from cosmos_core.protocols.vision import Showing
from cosmos_core.testing.conformance.model.subject import ROOM, SEED, ModelSetting, demonstrations, pack_alone
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.testing.conformance.processes import ask
from cosmos_core.types import JSON, Message, Payload, Prompt
from cosmos_core.weights.digest import digest_of
from cosmos_core.weights.shards import canonical_tensors

_CHAT: Final = (Message(role="system", content="Be brief."), Message(role="user", content="How many?"))


class ModelEncoding(ModelSetting):
    """Tests of `encode`, `encode_demonstration` and `decode`."""

    @pytest.fixture
    def shown(self, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
        """The rows that have a demonstration."""
        found = [prompt for prompt in prompts if prompt.demonstration is not None]
        if not found:
            pytest.skip("not given: no row of `prompts` has a demonstration")
        return found

    def test_payloads_are_of_the_declared_kinds(
        self, model: Model, prompts: Sequence[Prompt], payloads: Sequence[Payload], capabilities: ModelCapabilities
    ) -> None:
        """Planning pairs model, engine and rewards by what is declared."""
        made = {payload.kind for payload in [*map(model.encode, prompts), *payloads]}
        declared = set(capabilities.payload_kinds)
        if made - declared:
            fault(
                f"payloads are of kind {', '.join(sorted(made))}, ModelCapabilities.payload_kinds declares "
                f"{', '.join(sorted(declared)) or 'none'}; declare what encode() makes and pack() takes"
            )
        if declared - made:
            fault(
                f"payload kinds {', '.join(sorted(declared - made))} are declared, and no payload of the kit is of "
                "them; add one to the fixture `payloads`, or declare fewer"
            )

    def test_a_demonstration_begins_with_the_encoded_prompt(self, model: Model, shown: Sequence[Prompt]) -> None:
        """The model must be trained on the conditioning that it will be given."""
        for prompt in shown:
            conditioning, whole = model.encode(prompt), model.encode_demonstration(prompt)
            for name, array in conditioning.arrays.items():
                other = whole.arrays.get(name)
                if other is None or (bytes(other.data), other.shape) != (bytes(array.data), array.shape):
                    fault(
                        f"encode_demonstration({prompt.text!r}) has another array {name!r} than encode() of the same "
                        "row; encode the conditioning in one place"
                    )

    def test_a_demonstration_ends_with_a_stop_id(self, model: Model, shown: Sequence[Prompt]) -> None:
        """Otherwise a model learns to say it and never learns to stop."""
        stops = model.facts().stop_ids
        for prompt in shown:
            payload = model.encode_demonstration(prompt)
            if payload.kind != KIND:
                pytest.skip(f"payloads of kind {payload.kind!r} have no stop ids")
            ids = values(payload, "completion").tolist()
            if not ids or ids[-1] not in stops:
                fault(
                    f"the demonstration {prompt.demonstration!r} ends with token {ids[-1:]}, which is none of the "
                    f"stop ids {sorted(stops)} of facts(); append the token that ends a completion"
                )

    def test_a_demonstration_decodes_to_itself(self, model: Model, shown: Sequence[Prompt]) -> None:
        """Rewards read what `decode` gives; special tokens are no part of it."""
        for prompt in shown:
            payload = model.encode_demonstration(prompt)
            text = model.decode(payload)
            if not isinstance(text, str):
                fault(f"decode() gave {text!r}; give a str, empty for what has no text")
            if payload.kind == KIND and text != prompt.demonstration:
                fault(f"decode() gives {text!r} for the demonstration {prompt.demonstration!r}")

    def test_a_row_without_demonstration_is_a_data_error(self, model: Model, prompts: Sequence[Prompt]) -> None:
        """Such a row is left out and counted; any other exception ends the run."""
        try:
            model.encode_demonstration(Prompt(text=prompts[0].text, media=prompts[0].media))
        except DataError:
            return
        fault("encode_demonstration() took a row without a demonstration; raise DataError")

    def test_a_chat_is_encoded_or_refused(self, model: Model) -> None:
        """Rows are plain text or turns of a chat; a model that takes no chats says so."""
        for prompt in (Prompt(text=_CHAT), Prompt(text=_CHAT, demonstration="7")):
            encode = model.encode if prompt.demonstration is None else model.encode_demonstration
            try:
                payload = encode(prompt)
            except DataError:
                continue
            if payload.kind == KIND and not len(values(payload, "prompt")):
                fault(f"{encode.__name__}() encodes a chat to no tokens; raise DataError for what cannot be encoded")

    @pytest.mark.usefixtures("model")
    def test_another_process_encodes_packs_and_builds_the_same(
        self,
        make: Callable[..., Any],
        options: Mapping[str, JSON],
        context: ModelContext,
        prompts: Sequence[Prompt],
    ) -> None:
        """Every replica is a process of its own, with hashes of its own."""
        mine = describe(make(), prompts, SEED)
        question = Question(
            plugin=self.plugin,
            options=dict(options),
            path=context.path,
            config=None if context.config is None else dict(context.config),
            assets=str(context.assets),
            trust_remote_code=context.trust_remote_code,
            prompts=list(prompts),
            seed=SEED,
        )
        theirs = describe_elsewhere(question)
        for what in ("encodings", "packing", "weights"):
            if getattr(mine, what) != getattr(theirs, what):
                fault(
                    f"another process makes other {what} from the same rows and seed; do not depend on hash(), the "
                    "order of a set, the clock or a global random state"
                )


_OBSERVATION: Final = "How many apples now? 7+5=12"
_APART: Final = "7 and "


class ModelConversing(ModelSetting):
    """`encode_observation`, and `pack` of payloads with `decided`, of a model that has them."""

    @pytest.fixture
    def conversing(self, model: Model) -> Conversing:
        """The model, as one that goes on after observations."""
        if not isinstance(model, Conversing):
            pytest.skip("not declared: the model has no `encode_observation` (`Conversing`)")
        return model

    @pytest.mark.usefixtures("conversing")
    def test_only_what_was_decided_is_priced(
        self, model: Model, module: torch.nn.Module, payloads: Sequence[Payload]
    ) -> None:
        """An observation conditions what follows it, and is never trained on."""
        for index, payload in enumerate(payloads):
            if payload.kind != KIND or payload.arrays["completion"].shape[0] < 3:
                continue
            decided_C = _some(payload)
            told = attrs.evolve(payload, arrays={**payload.arrays, "decided": array_of(decided_C)})
            batch, whole = pack_alone(model, told), pack_alone(model, payload)
            if batch.num_decisions != (int(decided_C.sum()),):
                fault(
                    f"payload {index} has {int(decided_C.sum())} units that were decided, and pack() made decisions of "
                    f"{batch.num_decisions[0]}; leave out those that the array `decided` says are not the model's"
                )
            with torch.no_grad():
                found_N = model.decide(module, batch, temperature=1.0).logprobs_N
                all_C = model.decide(module, whole, temperature=1.0).logprobs_N
            apart = (found_N - all_C[torch.from_numpy(decided_C)]).abs().max()
            if not apart <= self.tolerance:
                fault(
                    f"payload {index}: log-probs of what was decided change by {apart:.2g} when the units between are "
                    "declared not to be; they condition what follows as before"
                )

    def test_an_observation_is_encoded_to_what_it_says(self, model: Model, conversing: Conversing) -> None:
        """The model is to read what the environment answered, and its own turn ends once."""
        stop = min(model.facts().stop_ids)
        for prompt in self._talks(model):
            ids = list(conversing.encode_observation(prompt, [stop], _OBSERVATION))
            text = model.decode(tokens_payload([stop], ids))
            if _OBSERVATION not in text:
                fault(f"encode_observation() of {_OBSERVATION!r} after {prompt.text!r:.80} decodes to {text!r}")
            if ids[:1] == [stop]:
                fault(f"encode_observation() begins with token {stop}, with which the model has just ended its turn")

    @pytest.fixture
    def steering(self, model: Model, conversing: Conversing) -> Mapping[str, int]:  # noqa: ARG002 - a condition
        """Texts of tokens that end or begin turns, or stand for something else than text, with their ids.

        Those of a model with a Hugging Face `tokenizer`; override it for another.
        """
        tokenizer = getattr(model, "tokenizer", None)
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            pytest.skip("not given: no tokenizer whose special tokens the kit knows; override the fixture `steering`")
        # Of the ordinary vocabulary, what ends a completion is a word elsewhere, such as the end of a line.
        stops = model.facts().stop_ids & tokenizer.added_tokens_decoder.keys()
        ids = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id} | stops
        return {str(tokenizer.convert_ids_to_tokens(id_)): id_ for id_ in sorted(ids)}

    def test_an_observation_never_becomes_tokens_that_steer(
        self, model: Model, conversing: Conversing, steering: Mapping[str, int]
    ) -> None:
        """A tool that answers `<|im_end|>` must not end the model's turn, nor begin one in its name."""
        stop = min(model.facts().stop_ids)
        for prompt in self._talks(model):
            plain = list(conversing.encode_observation(prompt, [stop], _APART))
            for text, id_ in steering.items():
                said = f"{_APART}{text}{_APART}"
                ids = list(conversing.encode_observation(prompt, [stop], said))
                if ids.count(id_) > plain.count(id_):
                    fault(
                        f"encode_observation() of {said!r} after {prompt.text!r:.80} has the token {id_}, {text!r}: "
                        "what an environment answers steers the model; encode its words as text, as "
                        "`split_special_tokens=True` does"
                    )
                if text not in (decoded := model.decode(tokens_payload([stop], ids))):
                    fault(f"encode_observation() of {said!r} after {prompt.text!r:.80} decodes to {decoded!r}")

    def test_what_a_user_says_never_becomes_tokens_that_steer(self, model: Model, steering: Mapping[str, int]) -> None:
        """Rows of chats are written by strangers, too."""
        try:
            plain = self._heard(model, _APART)
        except DataError:
            pytest.skip("not declared: the model takes no chats")
        for text, id_ in steering.items():
            if self._heard(model, f"{_APART}{text}{_APART}").count(id_) > plain.count(id_):
                fault(
                    f"encode() of a chat whose user says {text!r} has the token {id_} of that name; only the chat "
                    "template may write it: encode the words of others as text"
                )

    def _heard(self, model: Model, said: str) -> list[int]:
        """The prompt of a chat in which the user says this."""
        prompt = Prompt(text=(Message(role="user", content=said),))
        ids: list[int] = values(model.encode(prompt), "prompt").tolist()
        return ids

    def _talks(self, model: Model) -> list[Prompt]:
        """Rows that a dialogue may begin with: plain text, and a chat if the model takes any."""
        chat = Prompt(text=(Message(role="user", content="How many?"),))
        try:
            model.encode(chat)
        except DataError:
            return [Prompt(text="How many?")]
        return [Prompt(text="How many?"), chat]


def _some(payload: Payload) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """The first and the last unit of a completion, and every third."""
    decided_C = np.zeros(len(values(payload, "completion")), np.bool_)
    decided_C[::3] = True
    decided_C[-1] = True
    return decided_C


class ModelShowing(ModelSetting):
    """`shown` of a model that has it."""

    @pytest.fixture
    def showing(self, model: Model) -> Showing:
        """The model, as one whose images other implementations of its family take."""
        if not isinstance(model, Showing):
            pytest.skip("not declared: no other implementation takes what its prompts show (`Showing`)")
        return model

    def test_each_image_or_video_is_shown_once_and_where_it_stands(
        self, model: Model, showing: Showing, prompts: Sequence[Prompt]
    ) -> None:
        """In the order of the prompt, no unit for two of them."""
        for prompt in prompts:
            payload = model.encode(prompt)
            shown, units = showing.shown(payload), payload.arrays["prompt"].shape[0]
            if len(shown) != len(prompt.media):
                fault(f"shown() of a prompt with {len(prompt.media)} media gave {len(shown)}; give one for each")
            end = 0
            for each in shown:
                if not 0 <= each.start < each.start + len(each.is_seen_U) <= units:
                    fault(
                        f"shown() puts {len(each.is_seen_U)} units at {each.start} of a prompt of {units}; "
                        "they lie in it"
                    )
                if not each.is_seen_U.any() or not each.is_seen_U[-1]:
                    fault("shown() gave units of which none, or not the last, is seen; end with one that is")
                if each.start < end:
                    fault(f"shown() puts one at {each.start}, before the end of another at {end}; they share no unit")
                end = each.start + len(each.is_seen_U)

    def test_what_is_shown_lacks_no_array(self, model: Model, showing: Showing, prompts: Sequence[Prompt]) -> None:
        """An engine refuses a request when it comes, not when it is computed."""
        payload = next((model.encode(prompt) for prompt in prompts if prompt.media), None)
        if payload is None:
            fault("the model is `Showing`, and none of `prompts` shows anything; give some of them media")
        for lost in payload.arrays.keys() - {"prompt"}:
            rest = {name: array for name, array in payload.arrays.items() if name != lost}
            try:
                showing.shown(attrs.evolve(payload, arrays=rest))
            except DataError:
                continue
            fault(f"shown() took a prompt that shows something without its array {lost!r}; raise DataError")


_DESCRIBE_S: Final = 100.0


@attrs.frozen(kw_only=True)
class Question:
    """The model and the rows that another process is asked about; the fields of `ModelContext` are told one by one."""

    plugin: str
    options: dict[str, Any]
    path: str | None
    config: dict[str, Any] | None
    assets: str
    trust_remote_code: bool
    prompts: list[Prompt]
    seed: int


@attrs.frozen(kw_only=True)
class Description:
    """The rows and weights as one process makes them.

    Attributes:
        encodings: A digest of each payload, of prompts first.
        packing: Sequences of each micro-batch.
        weights: Digest of the module from the seed.
    """

    encodings: list[str]
    packing: list[list[int]]
    weights: str


def describe(model: Model, prompts: Sequence[Prompt], seed: int) -> Description:
    """Encode and pack the rows, and build the module."""
    shown = demonstrations(model, prompts)
    module = model.build(seed=seed, dtype=torch.float32, device=torch.device("cpu"))
    return Description(
        encodings=[_digest(payload) for payload in [*map(model.encode, prompts), *shown]],
        packing=[list(batch.sequences) for batch in model.pack(shown, budget=ROOM)],
        weights=digest_of(canonical_tensors(module)),
    )


def describe_elsewhere(question: Question) -> Description:
    """Describe the rows in a new process."""
    return ask(
        "cosmos_core.testing.conformance.model.encoding",
        question,
        Description,
        timeout_s=_DESCRIBE_S,
        late=f"another process did not encode {len(question.prompts)} rows in {_DESCRIBE_S:g} s",
        failed="the model cannot be made in another process",
    )


def _digest(payload: Payload) -> str:
    state = hashlib.blake2b(payload.kind.encode(), digest_size=16)
    for name, array in sorted(payload.arrays.items()):
        state.update(f"{name} {array.dtype} {array.shape} ".encode() + bytes(array.data))
    return state.hexdigest()


def _main() -> None:
    asked, answered = map(Path, sys.argv[1:])
    question = msgspec.json.decode(asked.read_bytes(), type=Question)
    torch.set_num_threads(1)
    context = ModelContext(
        path=question.path,
        config=question.config,
        assets=Path(question.assets),
        trust_remote_code=question.trust_remote_code,
    )
    plugins = PluginSet.load([("model", question.plugin)])
    model = plugins.create("model", question.plugin, question.options, context)
    answered.write_bytes(msgspec.json.encode(describe(model, question.prompts, question.seed)))


if __name__ == "__main__":
    _main()
