"""Reward `json-schema`: the answer is JSON that a schema accepts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NoReturn

import attrs
import jsonschema
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from cosmos_core.config import option
from cosmos_core.errors import ConfigError, DataError
from cosmos_core.protocols import Completion, Provider, Reward, RewardCapabilities, RewardContext, Score, hookimpl
from cosmos_core.types import JSON, Prompt
from cosmos_reward_text.answer import inside, tag_option
from cosmos_reward_text.fences import json_in

_SHOWN_CHARACTERS: Final = 200


@attrs.frozen(kw_only=True)
class JsonSchemaOptions:
    """Options of `json-schema`."""

    schema: Mapping[str, JSON] | None = option(None, help="The schema; absent, each row's reference is one.")
    tag: str | None = tag_option()
    fenced: bool = option(
        False, help="Whether to look at the last block between lines of ``` alone: of `json`, or else of no language."
    )


class JsonSchema:
    """1 for JSON that the schema accepts, 0 for other JSON and for what is none. Nothing is fetched for a `$ref`."""

    def __init__(self, options: JsonSchemaOptions, context: RewardContext) -> None:
        self._options: Final = options
        self._name: Final = context.name
        self._fixed: Any = None
        if options.schema is not None:
            try:
                self._fixed = _validator(options.schema)
            except jsonschema.SchemaError as error:
                raise ConfigError(f"schema: it is no JSON schema: {error.message:.200}") from None

    def vet(self, prompt: Prompt) -> None:
        """Look at the reference, where it is the schema.

        Raises:
            DataError: It is no JSON schema.
        """
        self._validator(prompt)

    def score(self, completion: Completion) -> Score:
        """Validate the answer.

        Raises:
            DataError: The reference is no JSON schema, or refers to what is not in it.
        """
        validator = self._validator(completion.prompt)
        text = inside(completion.own, self._options.tag)
        if text is not None and self._options.fenced:
            text = json_in(text)
        if text is None:
            return Score(value=0.0, details={"fault": "no answer"})
        try:
            answer = json.loads(text, parse_constant=_refuse)
            fault = next((each.message for each in validator.iter_errors(answer)), "")
        except (ValueError, OverflowError, RecursionError) as error:
            fault = f"no JSON: {error}"
        except Unresolvable as error:
            raise DataError(f"reward {self._name}: the schema refers to {error.ref!r}, which is not in it") from None
        return Score(value=float(not fault), details={"fault": fault[:_SHOWN_CHARACTERS]} if fault else {})

    def _validator(self, prompt: Prompt) -> Any:
        if self._fixed is not None:
            return self._fixed
        if not isinstance(prompt.reference, Mapping) or not prompt.reference:
            raise DataError(
                f"reward {self._name}: the reference {prompt.reference!r:.200} is no JSON schema; give the dataset one "
                "as its reference, or set `schema`"
            )
        try:
            return _validator(prompt.reference)
        except jsonschema.SchemaError as error:
            raise DataError(f"reward {self._name}: the reference is no JSON schema: {error.message:.200}") from None


def _validator(schema: Mapping[str, JSON]) -> Any:
    kind = validator_for(schema, default=jsonschema.Draft202012Validator)
    kind.check_schema(schema)
    return kind(schema, registry=Registry())


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is none")


@hookimpl
def cosmos_reward() -> Provider[Reward]:
    """Provide the JSON schema."""
    return Provider(create=JsonSchema, options=JsonSchemaOptions, capabilities=RewardCapabilities())
