"""Samples of many turns: each is an episode in an environment, and each of its turns a request to the engine.

All samples of a group begin together. As long as their openings are the same, their first turn is one request, so that
the engine processes the prompt once; every later turn is a request of one sample, whose prompt is all that came before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import attrs

from cosmos_core.config.order import turn_seed
from cosmos_core.errors import DataError, EngineError
from cosmos_core.protocols import FinishReason, Generated, Request
from cosmos_core.rollout.episodes.dialogue import Dialogue, EpisodeResult
from cosmos_core.rollout.episodes.groups import Group, Sample, SamplePlayer
from cosmos_core.rollout.episodes.messages import Answered, Failed, Opened, Reply
from cosmos_core.rollout.episodes.recording import encode_turns, refuse_unseen
from cosmos_core.types import Message, Payload, Prompt, SampleStatus


@attrs.define(kw_only=True, eq=False)
class _Sample(Sample):
    """One sample on its way.

    Attributes:
        prompt: The row; of a chat, with the environment's first words.
        is_open: Whether its environment has begun, or failed to.
        words: The environment's first words, and what it shows with them.
        dialogue: What was said; None before it begins.
        request_id: Its newest request.
        details: What the environment said of the turns.
    """

    prompt: Prompt
    is_open: bool = False
    words: Message | None = None
    dialogue: Dialogue | None = None
    request_id: str = ""
    details: list[str] = attrs.field(factory=list)

    @property
    def begun(self) -> Dialogue:
        """The dialogue, once it has begun."""
        assert self.dialogue is not None
        return self.dialogue


@attrs.define(kw_only=True, eq=False)
class Episodes(SamplePlayer[_Sample]):
    """Plays the samples of requests. All methods are called on the thread on which `post` runs things."""

    def begin(
        self, request: Request, prompt: Prompt, *, longest: int, done: Callable[[list[EpisodeResult]], None]
    ) -> None:
        """Play all samples of a request, whose `max_units` bounds the model's turns together.

        A sample has at most `longest` units, prompt and observations included. `done` is called once with all samples,
        unless the request is abandoned.
        """
        group = Group[_Sample](request=request, longest=longest, done=done)
        numbers = range(request.sampling.num_samples)
        group.samples += [_Sample(index=index, group=group, prompt=prompt) for index in numbers]
        self._groups[request.request_id] = group
        for sample in group.samples:
            answer = self._posting(functools.partial(self._on_opened, sample))
            sample.episode = self.pool.open(prompt, request.seed, answer)

    def abandon(self, request_id: str) -> bool:
        """Forget a request, for whose samples nobody waits; whether it was still going on."""
        group = self._groups.pop(request_id, None)
        if group is None:
            return False
        going = [sample for sample in group.samples if sample.played is None]
        self.engine.abort([name for name in {sample.request_id for sample in going} if name])
        for sample in going:
            self.pool.forget(sample.episode)
        return True

    # -- the first turn -----------------------------------------------------------------------------------------------

    def _on_opened(self, sample: _Sample, reply: Reply) -> None:
        group = sample.group
        if self._is_over(group):
            return
        sample.is_open = True
        if isinstance(reply, Failed):
            self._conclude(sample, reply.status, reply.detail)
        elif isinstance(reply, Opened) and reply.words is not None:
            sample.words, sample.prompt = reply.words, _with_words(sample.prompt, reply.words)
        if all(each.is_open for each in group.samples):
            self._first_turns(group)

    def _first_turns(self, group: Group[_Sample]) -> None:
        going = [sample for sample in group.samples if sample.played is None]
        openings: dict[Message | None, Payload | str] = {}
        for sample in going:
            if sample.words not in openings:
                openings[sample.words] = self._opening(sample)
            opening = openings[sample.words]
            if isinstance(opening, str):
                self._conclude(sample, SampleStatus.ENVIRONMENT_FAILED, opening)
            else:
                sample.dialogue = Dialogue(opening=opening, model=self.model)
                if sample.words is not None:
                    sample.dialogue.said.append(sample.words)
        if len(openings) == 1 and len(going) == len(group.samples) and not self._is_over(group):
            self._ask_all(going)
        else:
            for sample in going:
                self._ask(sample)

    def _opening(self, sample: _Sample) -> Payload | str:
        """The payload that the dialogue begins with, or why it cannot begin."""
        row, most = sample.group.request.prompt, sample.group.longest
        if sample.words is None:
            return row
        try:
            if isinstance(sample.prompt.text, str):
                # Plain text may hold special tokens, which words may not.
                opened = Dialogue(opening=row, model=self.model)
                opened.add_observation(self._encoded(sample, (), sample.words), sample.words)
                opening = opened.so_far()
            else:
                refuse_unseen([sample.words], sees=self.sees)
                opening = self.model.encode(sample.prompt)
        except DataError as error:
            return f"the environment's first words cannot be encoded: {error}"
        size = opening.arrays["prompt"].shape[0]
        if size < most:
            return opening
        before = row.arrays["prompt"].shape[0]
        return f"the environment's first words make a prompt of {before} units one of {size}, and a sample has {most}"

    def _ask_all(self, samples: Sequence[_Sample]) -> None:
        """One request for the first turn of all samples, which share their prompt."""
        first = samples[0].group.request
        sampling = attrs.evolve(first.sampling, max_units=self._room(samples[0]))
        for sample in samples:
            sample.request_id = first.request_id
        self._ask_for(samples, attrs.evolve(first, prompt=samples[0].begun.so_far(), sampling=sampling))

    # -- each turn ----------------------------------------------------------------------------------------------------

    def _room(self, sample: _Sample) -> int:
        """Units that the next turn may have."""
        group, said = sample.group, sample.begun
        return min(group.request.sampling.max_units - said.num_decided, group.longest - said.num_units)

    def _met(self, sample: _Sample) -> str:
        """The bound of `_room` that leaves none, in words."""
        own, most = sample.begun.num_decided, sample.group.request.sampling.max_units
        if own >= most:
            return f"the model's own units, {own}, are all of the {most} (max_units) that all its turns may have"
        whole, longest = sample.begun.num_units, sample.group.longest
        return f"prompt, turns and observations, {whole} units, may have {longest} together"

    def _ask(self, sample: _Sample) -> None:
        """A request for the next turn of one sample."""
        group = sample.group
        if sample.played is not None or self._is_over(group):
            return
        turn = len(sample.begun.turns)
        sample.request_id = f"{group.request.request_id}/{sample.index}/{turn}"
        request = attrs.evolve(
            group.request,
            request_id=sample.request_id,
            prompt=sample.begun.so_far(),
            sampling=attrs.evolve(group.request.sampling, num_samples=1, max_units=self._room(sample)),
            seed=turn_seed(group.request.seed, sample.index, turn),
        )
        self._ask_for([sample], request)

    def _ask_for(self, samples: Sequence[_Sample], request: Request) -> None:
        def take(made: Sequence[Generated]) -> None:
            for sample, turn in zip(samples, made, strict=bool(made)):
                self._on_turn(sample, request.prompt, turn)

        try:
            self._submit(request, take)
        except EngineError as error:
            for sample in samples:
                self._conclude(sample, SampleStatus.ENVIRONMENT_FAILED, f"a turn cannot be generated: {error}")

    def _on_turn(self, sample: _Sample, prompt: Payload, made: Generated) -> None:
        if self._is_over(sample.group):
            return
        text = self.model.decode(made.payload)
        written = sample.begun.add_turn(made, text, prompt)
        if made.reason is not FinishReason.STOP:
            self._cut(sample, f"a turn was cut: {self._met(sample)}")
            return
        answer = self._posting(functools.partial(self._on_answered, sample, written))
        self.pool.act(sample.episode, text, answer)

    def _on_answered(self, sample: _Sample, written: Sequence[int], reply: Reply) -> None:
        if self._is_over(sample.group):
            return
        if isinstance(reply, Failed):
            self._conclude(sample, reply.status, reply.detail)
            return
        assert isinstance(reply, Answered)
        sample.begun.recording.rewards[sample.begun.turns[-1]] = reply.reward
        sample.details += [reply.detail] if reply.detail else []
        if reply.done:
            self._conclude(sample, SampleStatus.OK)
        elif len(sample.begun.turns) == self.environment.max_turns:
            self._cut(sample, f"not done after {self.environment.max_turns} turns")
        else:
            words, media, places = reply.observation or "", reply.media, reply.places
            said = Message(role=reply.role, content=words, media=media, places=places)
            self._observe(sample, written, said)

    def _observe(self, sample: _Sample, written: Sequence[int], said: Message) -> None:
        """Show the model what was answered, if there is room for it and for one more unit."""
        try:
            encoded = self._encoded(sample, written, said)
        except DataError as error:
            self._conclude(sample, SampleStatus.ENVIRONMENT_FAILED, f"the observation cannot be encoded: {error}")
            return
        size = encoded.arrays["prompt"].shape[0]
        if self._room(sample) <= 0 or sample.begun.num_units + size >= sample.group.longest:
            met = self._met(sample)
            self._cut(sample, f"no room for an observation of {size} units and a turn: {met}")
            return
        sample.begun.add_observation(encoded, said)
        self._ask(sample)

    def _encoded(self, sample: _Sample, written: Sequence[int], said: Message) -> Payload:
        return encode_turns(self.model, sample.prompt, written, [said], sees=self.sees)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _cut(self, sample: _Sample, why: str) -> None:
        self._conclude(sample, SampleStatus.TRUNCATED, why)

    def _conclude(self, sample: _Sample, status: SampleStatus, why: str = "") -> None:
        opening = sample.group.request.prompt
        dialogue = sample.dialogue or Dialogue(opening=opening, model=self.model)
        told = [*sample.details, *([why] if why else [])]
        recording, reward = dialogue.recording, sum(dialogue.recording.rewards.values())
        self._end(sample, status, told, recording, dialogue.opening, reward=reward, said=dialogue.said)


def _with_words(prompt: Prompt, words: Message) -> Prompt:
    """A chat that goes on with an environment's words, one more turn of the user; plain text stays as it is."""
    if isinstance(prompt.text, str):
        return prompt
    return attrs.evolve(prompt, text=(*prompt.text, words))
