"""Completions that go on after what is not the model's own (`Conversing`).

Shape legend: C units of a completion, N of these that were decided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import attrs
import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from cosmos_core.errors import DataError
from cosmos_core.models.tokens import KIND, array_of, tokens_payload, values
from cosmos_core.protocols import Conversing, Model
from cosmos_core.testing.conformance.model.evaluation import pack_alone
from cosmos_core.testing.conformance.model.setting import ModelSetting
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import Message, Payload, Prompt

_OBSERVATION: Final = "How many apples now? 7+5=12"
_APART: Final = "7 and "
_CHAT: Final = (Message(role="user", content="How many?"),)


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
        chat = Prompt(text=_CHAT)
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
