"""Samples of many turns: each is an episode in an environment, and each of its turns a request to the engine.

All samples of a group begin together. As long as their openings are the same, their first turn is one request, so that
the engine processes the prompt once; every later turn is a request of one sample, whose prompt is all that came before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import attrs

from cosmos_core.config.order import turn_seed
from cosmos_core.config.schema import EnvironmentConfig
from cosmos_core.errors import DataError, EngineError
from cosmos_core.protocols import (
    EnvironmentCapabilities,
    FinishReason,
    Generated,
    Handle,
    Model,
    Request,
    RolloutEngine,
)
from cosmos_core.rollout.episodes.dialogue import Dialogue, EpisodeResult
from cosmos_core.rollout.episodes.messages import Answered, Failed, Opened, Reply
from cosmos_core.rollout.episodes.pool import EnvironmentPool
from cosmos_core.rollout.episodes.recording import encode_turns, refuse_unseen
from cosmos_core.transport.bounds import DETAIL
from cosmos_core.types import Message, Payload, Prompt, SampleStatus


@attrs.define(kw_only=True, eq=False)
class _Sample:
    """One sample on its way.

    Attributes:
        index: Place in the group.
        prompt: The row; of a chat, with the environment's first words.
        words: The environment's first words, and what it shows with them.
        dialogue: What was said; None before it begins.
        episode: Its number in the pool.
        request_id: Its newest request.
        details: What the environment said of the turns.
        played: How it came out; None while it goes on.
    """

    index: int
    prompt: Prompt
    words: Message | None = None
    dialogue: Dialogue | None = None
    episode: int = -1
    request_id: str = ""
    details: list[str] = attrs.field(factory=list)
    played: EpisodeResult | None = None


@attrs.define(kw_only=True, eq=False)
class _Group:
    """The samples of one request, as a single turn would be.

    A sample may have `longest` units, prompt included. `waits` are those whose environment has not begun; `is_over`
    says that `done` was called, or the group is abandoned.
    """

    request: Request
    prompt: Prompt
    longest: int
    done: Callable[[list[EpisodeResult]], None]
    samples: list[_Sample]
    waits: int
    is_over: bool = False


@attrs.define(kw_only=True, eq=False)
class Episodes:
    """Plays the samples of requests. All methods are called on the thread on which `post` runs things.

    Attributes:
        environment: The recipe's.
        capabilities: Of the environment.
        model: Decodes turns and encodes observations: a `MultiTurnModel`, as planning has checked.
        engine: Generates turns.
        pool: Has the environments.
        version: Gives the version of the weights that are loaded.
        post: Runs what follows an answer on the one thread of all episodes.
        sees: Whether turns may show images.
    """

    environment: EnvironmentConfig
    capabilities: EnvironmentCapabilities
    model: Model
    engine: RolloutEngine
    pool: EnvironmentPool
    version: Callable[[], int]
    post: Callable[[Callable[[], None]], None]
    sees: bool = False
    _groups: dict[str, _Group] = attrs.field(factory=dict, init=False)

    def begin(
        self, request: Request, prompt: Prompt, *, longest: int, done: Callable[[list[EpisodeResult]], None]
    ) -> None:
        """Play all samples of a request, whose `max_units` bounds the model's turns together.

        A sample has at most `longest` units, prompt and observations included. `done` is called once with all samples,
        unless the request is abandoned.
        """
        number = request.sampling.num_samples
        samples = [_Sample(index=index, prompt=prompt) for index in range(number)]
        group = _Group(request=request, prompt=prompt, longest=longest, done=done, samples=samples, waits=number)
        self._groups[request.request_id] = group
        for sample in samples:
            answer = self._posting(functools.partial(self._on_opened, group, sample))
            sample.episode = self.pool.open(prompt, request.seed, answer)

    def abandon(self, request_id: str) -> bool:
        """Forget a request, for whose samples nobody waits; whether it was still going on."""
        group = self._groups.pop(request_id, None)
        if group is None:
            return False
        group.is_over = True
        going = [sample for sample in group.samples if sample.played is None]
        self.engine.abort([name for name in {sample.request_id for sample in going} if name])
        for sample in going:
            self.pool.forget(sample.episode)
        return True

    def _posting(self, event: Callable[[Reply], None]) -> Callable[[Reply], None]:
        return lambda reply: self.post(functools.partial(event, reply))

    # -- the first turn -----------------------------------------------------------------------------------------------

    def _on_opened(self, group: _Group, sample: _Sample, reply: Reply) -> None:
        if group.is_over:
            return
        group.waits -= 1
        if isinstance(reply, Failed):
            self._fail(group, sample, reply)
        elif isinstance(reply, Opened) and reply.words is not None:
            sample.words, sample.prompt = reply.words, _with_words(sample.prompt, reply.words)
        if not group.waits:
            self._first_turns(group)

    def _first_turns(self, group: _Group) -> None:
        going = [sample for sample in group.samples if sample.played is None]
        openings: dict[Message | None, Payload | str] = {}
        for sample in going:
            if sample.words not in openings:
                openings[sample.words] = self._opening(group, sample)
            opening = openings[sample.words]
            if isinstance(opening, str):
                self._end(group, sample, SampleStatus.ENVIRONMENT_FAILED, opening)
            else:
                sample.dialogue = Dialogue(opening=opening, model=self.model)
                if sample.words is not None:
                    sample.dialogue.said.append(sample.words)
        if len(openings) == 1 and len(going) == len(group.samples) and not group.is_over:
            self._ask_all(group, going)
        else:
            for sample in going:
                self._ask(group, sample)

    def _opening(self, group: _Group, sample: _Sample) -> Payload | str:
        """The payload that the dialogue begins with, or why it cannot begin."""
        row = group.request.prompt
        if sample.words is None:
            return row
        try:
            if sample.prompt is group.prompt:
                # Plain text may hold special tokens, which words may not.
                opened = Dialogue(opening=row, model=self.model)
                opened.add_observation(self._encoded(sample, (), sample.words), sample.words)
                opening = opened.so_far()
            else:
                refuse_unseen([sample.words], sees=self.sees)
                opening = self.model.encode(sample.prompt)
        except DataError as error:
            return f"the environment's first words cannot be encoded: {error}"
        size, most = opening.arrays["prompt"].shape[0], group.longest
        if size < most:
            return opening
        before = row.arrays["prompt"].shape[0]
        return f"the environment's first words make a prompt of {before} units one of {size}, and a sample has {most}"

    def _ask_all(self, group: _Group, samples: Sequence[_Sample]) -> None:
        """One request for the first turn of all samples, which share their prompt."""
        dialogue = samples[0].dialogue
        assert dialogue is not None
        sampling = attrs.evolve(group.request.sampling, max_units=self._room(group, dialogue))
        for sample in samples:
            sample.request_id = group.request.request_id
        request = attrs.evolve(group.request, prompt=dialogue.so_far(), sampling=sampling)
        self._submit(request, lambda made: self._on_turns(group, samples, made))

    # -- each turn ----------------------------------------------------------------------------------------------------

    def _room(self, group: _Group, dialogue: Dialogue) -> int:
        """Units that the next turn may have."""
        return min(group.request.sampling.max_units - dialogue.num_decided, group.longest - dialogue.num_units)

    def _met(self, group: _Group, dialogue: Dialogue) -> str:
        """The bound of `_room` that leaves none, in words."""
        own, most = dialogue.num_decided, group.request.sampling.max_units
        if own >= most:
            return f"the model's own units, {own}, are all of the {most} that its turns together may have"
        return f"prompt, turns and observations, {dialogue.num_units} units, may have {group.longest} together"

    def _ask(self, group: _Group, sample: _Sample) -> None:
        """A request for the next turn of one sample."""
        if sample.played is not None or group.is_over:
            return
        dialogue = sample.dialogue
        assert dialogue is not None
        turn = len(dialogue.turns)
        sample.request_id = f"{group.request.request_id}/{sample.index}/{turn}"
        request = attrs.evolve(
            group.request,
            request_id=sample.request_id,
            prompt=dialogue.so_far(),
            sampling=attrs.evolve(group.request.sampling, num_samples=1, max_units=self._room(group, dialogue)),
            seed=turn_seed(group.request.seed, sample.index, turn),
        )
        self._submit(request, lambda made: self._on_turn(group, sample, made[0]))

    def _submit(self, request: Request, then: Callable[[list[Generated]], None]) -> None:
        def take(handle: Handle) -> None:
            try:
                made = handle.result(0)
            except EngineError:
                return  # the engine as a whole failed: its health() says so
            then(made)

        for handle in self.engine.submit([request]):
            handle.add_done_callback(lambda handle: self.post(functools.partial(take, handle)))

    def _on_turns(self, group: _Group, samples: Sequence[_Sample], made: Sequence[Generated]) -> None:
        for sample, turn in zip(samples, made, strict=True):
            self._on_turn(group, sample, turn)

    def _on_turn(self, group: _Group, sample: _Sample, made: Generated) -> None:
        if group.is_over:
            return
        assert sample.dialogue is not None
        text = self.model.decode(made.payload)
        written = sample.dialogue.add_turn(made, text)
        if made.reason is not FinishReason.STOP:
            self._cut(group, sample, f"a turn was cut: {self._met(group, sample.dialogue)}")
            return
        answer = self._posting(functools.partial(self._on_answered, group, sample, written))
        self.pool.act(sample.episode, text, answer)

    def _on_answered(self, group: _Group, sample: _Sample, written: Sequence[int], reply: Reply) -> None:
        if group.is_over:
            return
        if isinstance(reply, Failed):
            self._fail(group, sample, reply)
            return
        assert isinstance(reply, Answered)
        assert sample.dialogue is not None
        sample.dialogue.recording.rewards[sample.dialogue.turns[-1]] = reply.reward
        sample.details += [reply.detail] if reply.detail else []
        if reply.done:
            self._end(group, sample, SampleStatus.OK)
        elif len(sample.dialogue.turns) == self.environment.max_turns:
            self._cut(group, sample, f"not done after {self.environment.max_turns} turns")
        else:
            words, media, places = reply.observation or "", reply.media, reply.places
            said = Message(role=reply.role, content=words, media=media, places=places)
            self._observe(group, sample, written, said)

    def _observe(self, group: _Group, sample: _Sample, written: Sequence[int], said: Message) -> None:
        """Show the model what was answered, if there is room for it and for one more unit."""
        assert sample.dialogue is not None
        try:
            encoded = self._encoded(sample, written, said)
        except DataError as error:
            self._end(group, sample, SampleStatus.ENVIRONMENT_FAILED, f"the observation cannot be encoded: {error}")
            return
        size = encoded.arrays["prompt"].shape[0]
        if self._room(group, sample.dialogue) <= 0 or sample.dialogue.num_units + size >= group.longest:
            met = self._met(group, sample.dialogue)
            self._cut(group, sample, f"no room for an observation of {size} units and a turn: {met}")
            return
        sample.dialogue.add_observation(encoded, said)
        try:
            self._ask(group, sample)
        except EngineError as error:
            self._end(group, sample, SampleStatus.ENVIRONMENT_FAILED, f"the observation cannot be shown: {error}")

    def _encoded(self, sample: _Sample, written: Sequence[int], said: Message) -> Payload:
        return encode_turns(self.model, sample.prompt, written, [said], sees=self.sees)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _fail(self, group: _Group, sample: _Sample, failed: Failed) -> None:
        self._end(group, sample, failed.status, failed.detail)

    def _cut(self, group: _Group, sample: _Sample, why: str) -> None:
        self._end(group, sample, SampleStatus.TRUNCATED, why)

    def _end(self, group: _Group, sample: _Sample, status: SampleStatus, why: str = "") -> None:
        self.pool.forget(sample.episode)
        dialogue = sample.dialogue or Dialogue(opening=group.request.prompt, model=self.model)
        reason = FinishReason.STOP if status is SampleStatus.OK else FinishReason.LENGTH
        name = self.environment.label
        told = [*sample.details, *([why] if why else [])]
        sample.played = EpisodeResult(
            generated=dialogue.generated(reason, self.version(), self.environment.weight),
            status=status,
            reward=sum(dialogue.recording.rewards.values()) if self.capabilities.rewards else None,
            detail=f"{name}: {'; '.join(told)}"[:DETAIL] if told else "",
            said=tuple(dialogue.said),
        )
        played = [each.played for each in group.samples if each.played is not None]
        if len(played) == len(group.samples):
            group.is_over = True
            del self._groups[group.request.request_id]
            group.done(played)


def _with_words(prompt: Prompt, words: Message) -> Prompt:
    """A chat that goes on with an environment's words, one more turn of the user; plain text stays as it is."""
    if isinstance(prompt.text, str):
        return prompt
    return attrs.evolve(prompt, text=(*prompt.text, words))
