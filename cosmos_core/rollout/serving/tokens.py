"""What engines of tokens have in common beside what all have: how a prompt of token ids is checked and enters."""

from __future__ import annotations

import abc

from cosmos_core.protocols import Conditioning, Request
from cosmos_core.rollout.serving.engine import ServedEngine
from cosmos_core.rollout.serving.flight import ServedHandle
from cosmos_core.rollout.serving.requests import check_request, condition
from cosmos_core.rollout.serving.sequence import Sequence, TokenFlight, prompt_ids


class TokenEngine(ServedEngine[Sequence]):
    """Generates tokens."""

    @property
    @abc.abstractmethod
    def _vocabulary(self) -> int:
        """Token ids below it can be in a prompt."""

    def _admit(self, request: Request) -> TokenFlight:
        conditioning = self._check(request)
        return TokenFlight(request, ServedHandle(request), 0, prompt_ids(request.prompt).tolist(), conditioning)

    def _check(self, request: Request) -> Conditioning | None:
        """How a request's prompt enters; EngineError if it cannot be generated."""
        check_request(request, context_length=self._context.context_length, vocabulary=self._vocabulary)
        return condition(request.prompt, self._context.model, f"request {request.request_id!r}")
