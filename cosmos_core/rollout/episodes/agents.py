"""Samples of agents: each is a session, in which a program calls the model as often as it wants to.

Agents run in worker processes and call an endpoint (`rollout.endpoint`), which asks here. A session ends with its
agent. What was recorded of it is one sample, of a document for each branch (see `recording`).
"""

from __future__ import annotations

import functools
import logging
import math
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final

import attrs
import numpy as np

from cosmos_core.config.order import turn_seed
from cosmos_core.errors import CosmosError, DataError, EngineError
from cosmos_core.models.tokens import tokens_payload
from cosmos_core.protocols import FinishReason, Generated, Request
from cosmos_core.protocols.model import MultiTurnModel
from cosmos_core.rollout.endpoint.calls import Call, CallError, Choice, Reply
from cosmos_core.rollout.endpoint.turns import read_reply, stop_in
from cosmos_core.rollout.episodes.dialogue import EpisodeResult
from cosmos_core.rollout.episodes.groups import Group, SamplePlayer
from cosmos_core.rollout.episodes.messages import Begin, Ended, Failed, is_reward
from cosmos_core.rollout.episodes.messages import Reply as WorkerReply
from cosmos_core.rollout.episodes.recording import (
    Turn,
    cut,
    encode_turns,
    follow,
    ids_of,
    names_of,
    parts_of,
    refuse_unseen,
    turn_of,
)
from cosmos_core.rollout.episodes.session import (
    Asked,
    Session,
    num_known,
    refuse,
    reply_of,
    words_before,
)
from cosmos_core.types import Prompt, SampleStatus

_LOG: Final = logging.getLogger(__name__)
_CHUNK: Final = 32
"""Units after which it is looked for texts that end a reply."""


@attrs.define(kw_only=True, eq=False)
class Agents(SamplePlayer[Session]):
    """Has agents do the tasks of requests, and answers their calls.

    `begin` and `abandon` are called on the thread on which `post` runs things; `call`, `reward` and `refused` on any.

    Attributes:
        name: The name of the model.
        url: Where the endpoint listens.
        counts: How often what happened, for gauges.
    """

    name: str
    url: str = ""
    counts: dict[str, int] = attrs.field(init=False)
    _sessions: dict[str, Session] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.counts = dict.fromkeys(("agent_calls", "agent_calls_refused", "tool_calls_malformed", "branches"), 0)

    @property
    def _multi_turn(self) -> MultiTurnModel:
        assert isinstance(self.model, MultiTurnModel)
        return self.model

    # -- groups -------------------------------------------------------------------------------------------------------

    def begin(
        self, request: Request, prompt: Prompt, *, longest: int, done: Callable[[list[EpisodeResult]], None]
    ) -> None:
        """Have agents do the task of a request, one for each of its samples.

        `max_units` of the request bounds the model's units of a session together, and `longest` those of a document.
        `done` is called once with all samples, unless the request is abandoned.
        """
        group = Group[Session](request=request, longest=longest, done=done)
        self._groups[request.request_id] = group
        for index in range(request.sampling.num_samples):
            session = Session(name=secrets.token_hex(16), index=index, group=group)
            group.samples.append(session)
            self._sessions[session.name] = session
            begin = Begin(
                episode=-1,
                prompt=prompt,
                seed=request.seed,
                base_url=f"{self.url}/s/{session.name}/v1",
                key=session.name,
                model=self.name,
            )
            session.episode = self.pool.begin(begin, self._posting(functools.partial(self._on_ended, session)))

    def abandon(self, request_id: str) -> bool:
        """Forget a request, for whose samples nobody waits; whether it was still going on."""
        group = self._groups.pop(request_id, None)
        if group is None:
            return False
        for session in group.samples:
            if session.played is None:
                self._close(session, "the run needs it no more")
                self.pool.forget(session.episode)
        return True

    def _close(self, session: Session, why: str) -> None:
        """Let nothing be called for a session any more."""
        self._sessions.pop(session.name, None)
        self.engine.abort(list(session.waiting))
        for future in session.waiting.values():
            refuse(future, CallError(410, f"the session is over: {why}", code="session_over"))
        session.waiting.clear()

    def _on_ended(self, session: Session, reply: WorkerReply) -> None:
        if session.played is not None or self._is_over(session.group):
            return
        self._close(session, "its agent has ended")
        if isinstance(reply, Ended) and reply.reward is not None:
            session.final = reply.reward
        recording = session.recording
        status, why = self._outcome(session, reply)
        num_documents = len(recording.documents())
        self.counts["branches"] += max(num_documents - 1, 0)
        told = [f"{session.num_calls} call{'' if session.num_calls == 1 else 's'}"]
        told += [f"{num_documents} branches"] if num_documents > 1 else []
        told += session.malformed[:1] if len(session.malformed) < 2 else [f"{len(session.malformed)} malformed calls"]
        told += [why] if why else []
        text = self._text(recording.turns[-1].path) if recording.turns else ""
        opening, said = session.group.request.prompt, recording.said()
        self._end(session, status, told, recording, opening, reward=session.reward, said=said, text=text)

    def _outcome(self, session: Session, reply: WorkerReply) -> tuple[SampleStatus, str]:
        """The end of a session, and why it is that."""
        failed = SampleStatus.ENVIRONMENT_FAILED
        if isinstance(reply, Failed) and (reply.status is not failed or not session.limit):
            return reply.status, reply.detail
        if not session.recording.turns:
            more = f": {session.limit}" if session.limit else ""
            return failed, f"the agent ended without a reply of the model{more}"
        if self.environment.weight != 0.0 and session.reward is None:
            more = f", after {session.limit}" if session.limit else ""
            return failed, f"the agent ended without a reward{more}, and environment.weight counts it"
        if session.limit:
            return SampleStatus.TRUNCATED, session.limit
        return SampleStatus.OK, ""

    def _text(self, path: Sequence[Turn]) -> str:
        """The text of a document after its prompt."""
        return self._decoded(ids_of(path)[len(path[0].given) :])

    def _decoded(self, ids: np.ndarray) -> str:
        return self.model.decode(tokens_payload((), ids))

    # -- calls, from any thread ---------------------------------------------------------------------------------------

    @property
    def names(self) -> Sequence[str]:
        """The names under which the model is served."""
        return (self.name, *(name for name in self.environment.agent.names if name != "*"))

    def call(self, session: str, call: Call) -> Future[Reply]:
        """Answer a call for a session; see `rollout.endpoint.server.Sessions`."""
        future: Future[Reply] = Future()
        self.post(lambda: self._refusing(future, lambda: self._call(session, call, future)))
        return future

    def reward(self, session: str, value: Any, reply: Any = None) -> Future[None]:
        """Take the reward of a session; see `rollout.endpoint.server.Sessions`."""
        future: Future[None] = Future()

        def take() -> None:
            known = self._known(session)
            if not is_reward(value):
                raise CallError(400, f"reward: {value!r:.80} is no finite number", param="reward")
            if reply is None:
                known.final = float(value)
            else:
                known.recording.rewards[reply_of(known, reply, param="reply")[0]] = float(value)
            if future.set_running_or_notify_cancel():
                future.set_result(None)

        self.post(lambda: self._refusing(future, take))
        return future

    def refused(self) -> None:
        """Count a request that was refused."""
        self.post(lambda: self._count("agent_calls_refused", 1))

    def _count(self, what: str, number: int) -> None:
        self.counts[what] += number

    def _refusing(self, future: Future[Any], do: Callable[[], None]) -> None:
        try:
            do()
        except CallError as error:
            refuse(future, error)
        except DataError as error:
            refuse(future, CallError(400, str(error), param="messages"))
        except CosmosError:
            raise
        except Exception as error:  # noqa: BLE001 - one call's, whatever it is: all others go on
            _LOG.exception("a call of an agent failed")
            refuse(future, CallError(500, f"the call failed: {type(error).__name__}: {error}"))

    # -- calls, on the thread of all sessions -------------------------------------------------------------------------

    def _known(self, name: str) -> Session:
        session = self._sessions.get(name)
        if session is None:
            words = "no such session: it is over, or was never begun; call at the base URL that the agent is given"
            raise CallError(401, words, code="invalid_session")
        return session

    def _call(self, name: str, call: Call, future: Future[Reply]) -> None:
        if future.cancelled():
            return
        session = self._known(name)
        names = self.environment.agent.names
        if call.model not in ("", *self.names) and "*" not in names:
            served = ", ".join(map(repr, self.names))
            words = f"the model {call.model!r} is not served, but {served}; environment.agent.names lists others"
            raise CallError(404, words, code="model_not_found", param="model")
        if session.num_calls + call.num_choices > (most := self.environment.max_turns):
            raise self._met(session, f"all {most} calls (environment.max_turns) were made", code="max_turns")
        asked = self._asked(session, call, future)
        session.num_calls += call.num_choices
        self._count("agent_calls", 1)
        if call.stops or session.group.request.sampling.temperature == 0.0:  # engines draw the likeliest once
            for place in range(call.num_choices):
                self._ask(asked, place, [])
        else:
            self._ask(asked, 0, [], number=call.num_choices)

    def _asked(self, session: Session, call: Call, future: Future[Reply]) -> Asked:
        """Find what a call goes on from, and encode what is new.

        Raises:
            CallError: A limit of the session is met, or the call goes on from nothing.
            DataError: The messages cannot be encoded.
        """
        past = reply_of(session, call.previous, param="previous_response_id")[1] if call.previous else ()
        messages = call.history(past)
        names = names_of(messages, call.tools)
        before, size = session.recording.find(messages, names)
        refuse_unseen(messages, sees=self.sees)
        if before is None:
            given = self.model.encode(Prompt(text=messages, tools=call.tools))
        else:
            prompt = Prompt(text=messages[: size - 1], tools=call.tools)
            given = encode_turns(self.model, prompt, words_before(before), messages[size:], sees=self.sees)
        path = [] if before is None else before.path
        asked = Asked(
            session=session,
            call=call,
            messages=messages,
            before=before,
            given=given,
            prompt=follow([*parts_of(path), given], self.model),
            future=future,
        )
        size, group = asked.num_prompt, session.group
        most, decided = group.request.sampling.max_units, session.recording.num_decided
        if (own := most - decided) < call.num_choices:
            what = f"the model's own units, {decided}, are all of the {most} (max_units) that all its turns may have"
            raise self._met(session, what, code="context_length_exceeded")
        if size >= group.longest:
            what = f"a prompt of {size} units, and the model's context and training bound both to {group.longest}"
            raise self._met(session, what, code="context_length_exceeded")
        asked.most = min(own // call.num_choices, group.longest - size, call.max_units or most)
        return asked

    @staticmethod
    def _met(session: Session, limit: str, *, code: str) -> CallError:
        """A limit of a session, of which the first that it meets is told."""
        session.limit = session.limit or limit
        return CallError(400, limit, code=code, param="messages")

    def _ask(self, asked: Asked, place: int, made: list[Turn], number: int = 1) -> None:
        """Ask the engine for replies, from `place` on, or for more of one of which the turns `made` are there."""
        session, request = asked.session, asked.session.group.request
        own = [tokens_payload(turn.made) for turn in made]
        rest = asked.most - sum(len(turn.made) for turn in made)
        sampling = attrs.evolve(
            request.sampling, num_samples=number, max_units=min(rest, _CHUNK) if asked.call.stops else rest
        )
        more = attrs.evolve(
            request,
            request_id=f"{request.request_id}/{session.index}/{session.num_requests}",
            prompt=follow([asked.prompt, *own], self.model),
            sampling=sampling,
            seed=turn_seed(request.seed, session.index, session.num_requests),
        )
        session.num_requests += 1
        session.waiting[more.request_id] = asked.future
        asked.future.add_done_callback(lambda future: self._given_up(future, more.request_id))
        if asked.future.cancelled():
            return

        def take(made_more: Sequence[Generated]) -> None:
            session.waiting.pop(more.request_id, None)
            if session.played is None and not asked.future.done():
                for index, each in enumerate(made_more):
                    self._refusing(asked.future, functools.partial(self._take, asked, place + index, made, more, each))

        try:
            self._submit(more, take)
        except EngineError as error:
            session.waiting.pop(more.request_id)
            raise CallError(400, f"this cannot be generated from: {error}", param="messages") from error

    def _given_up(self, future: Future[Reply], request_id: str) -> None:
        """The client has left; this may be any thread."""
        if future.cancelled():
            self.engine.abort([request_id])

    def _take(self, asked: Asked, place: int, made: list[Turn], request: Request, generated: Generated) -> None:
        """Take in a reply, or a part of one that is looked through for texts that end it."""
        before = made[-1] if made else asked.before
        given = tokens_payload(()) if made else asked.given
        turn = turn_of(generated, request.prompt, before, given)
        made = [*made, turn]
        ids = ids_of(made)[len(made[0].given) :]
        is_stopped = generated.reason is FinishReason.STOP
        if size := stop_in(self._decoded, ids, len(turn.made), asked.call.stops):
            is_stopped = True
            made[-1] = cut(turn, len(turn.made) - (len(ids) - size))
            ids = ids[:size]
        if is_stopped or len(ids) >= asked.most:
            self._conclude(asked, place, made, ids, is_stopped=is_stopped)
        else:
            self._ask(asked, place, [*made[:-1], attrs.evolve(turn, ends=False)])

    def _conclude(self, asked: Asked, place: int, made: list[Turn], ids: np.ndarray, *, is_stopped: bool) -> None:
        session, call = asked.session, asked.call
        read = read_reply(self._multi_turn, self._decoded, call, asked.messages, ids)
        self._count("tool_calls_malformed", len(read.malformed))
        session.malformed += read.malformed
        message = read.message
        if not is_stopped and asked.most < (call.max_units or math.inf):
            session.limit = (
                session.limit or f"a reply was cut after {len(ids)} units, all that the session had room for"
            )
        reason = "tool_calls" if message.tool_calls else "stop" if is_stopped else "length"
        history = names_of([*asked.messages, message], call.tools)[-1]
        new = asked.messages[num_known(asked.before) :]
        made[-1] = attrs.evolve(made[-1], messages=(*new, message), history=history)
        for index in range(1, len(made)):
            made[index] = attrs.evolve(made[index], before=made[index - 1])
        choice = Choice(message=message, reason=reason, num_units=len(ids), logprobs=self._logprobs(call, made))
        asked.choices[place] = (choice, made)
        if len(asked.choices) == call.num_choices:
            self._deliver(asked)

    def _deliver(self, asked: Asked) -> None:
        """Record all choices, and give them to the client, unless it has left."""
        if not asked.future.set_running_or_notify_cancel():
            return
        session, chosen = asked.session, [asked.choices[place] for place in sorted(asked.choices)]
        for _, made in chosen:
            for turn in made:
                session.recording.add(turn)
        reply = Reply(
            id=secrets.token_hex(12),
            model=asked.call.model or self.name,
            created=int(time.time()),
            choices=tuple(choice for choice, _ in chosen),
            num_prompt_units=asked.num_prompt,
        )
        # Instructions are of one call.
        said = (*asked.messages[bool(asked.call.instructions) :], chosen[0][0].message)
        session.replies[reply.id] = (chosen[0][1][-1], said)
        asked.future.set_result(reply)

    def _logprobs(self, call: Call, made: Sequence[Turn]) -> list[tuple[str, float]]:
        if not call.with_logprobs:
            return []
        values = [np.frombuffer(turn.recorded["logprobs"].data, np.float32) for turn in made]
        ids = np.concatenate([turn.made for turn in made])
        return [(self._decoded(ids[i : i + 1]), float(v)) for i, v in enumerate(np.concatenate(values))]
