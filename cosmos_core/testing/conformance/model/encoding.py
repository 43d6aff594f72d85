"""Encoding: from a row to a payload, and back to text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import pytest

from cosmos_core.errors import DataError
from cosmos_core.models.tokens import KIND, values
from cosmos_core.protocols import Model, ModelCapabilities, ModelContext
from cosmos_core.testing.conformance.model import process
from cosmos_core.testing.conformance.model.setting import SEED, ModelSetting
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.types import JSON, Message, Payload, Prompt

_CHAT: Final = (Message(role="system", content="Be brief."), Message(role="user", content="How many?"))


class ModelEncoding(ModelSetting):
    """What `encode`, `encode_demonstration` and `decode` promise."""

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
        mine = process.describe(make(), prompts, SEED)
        question = process.Question(
            plugin=self.plugin,
            options=dict(options),
            path=context.path,
            config=None if context.config is None else dict(context.config),
            assets=str(context.assets),
            trust_remote_code=context.trust_remote_code,
            prompts=list(prompts),
            seed=SEED,
        )
        theirs = process.describe_elsewhere(question)
        for what in ("encodings", "packing", "weights"):
            if getattr(mine, what) != getattr(theirs, what):
                fault(
                    f"another process makes other {what} from the same rows and seed; do not depend on hash(), the "
                    "order of a set, the clock or a global random state"
                )
