"""A rank after the first: `python -m cosmos_core.rollout.embedded.ranks.follower FD`.

It speaks over an inherited socket, builds its part of the model, and does each step that it is told with the other
ranks; it ends when the socket closes or its parent dies.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, cast

import torch

from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import Model, ModelContext
from cosmos_core.replica.lifetime import die_with_parent
from cosmos_core.rollout.embedded.cache import SlotCache
from cosmos_core.rollout.embedded.ranks import mesh as ranks_mesh
from cosmos_core.rollout.embedded.ranks.messages import (
    FROM_RANK,
    TO_RANK,
    Built,
    Failed,
    Join,
    Load,
    Loaded,
    Move,
    Ready,
    Score,
    Setup,
    Step,
)
from cosmos_core.rollout.embedded.ranks.shares import Shares, build
from cosmos_core.rollout.embedded.ranks.staging import parts_in
from cosmos_core.rollout.embedded.ranks.vocabulary import Vocabulary
from cosmos_core.rollout.embedded.runner import Runner
from cosmos_core.rollout.embedded.scheduler import Plan
from cosmos_core.rollout.embedded.slots import SlotNumbers
from cosmos_core.rollout.embedded.support import adopt
from cosmos_core.rollout.serving.comparing import same_bits
from cosmos_core.rollout.serving.given import Given
from cosmos_core.rollout.serving.staging import map_staged
from cosmos_core.rollout.workers.frames import Unframer, frame
from cosmos_core.rollout.workers.life import described
from cosmos_core.types import Payload
from cosmos_core.weights.quantization import copy_exactly
from cosmos_core.weights.shards import torch_dtype

_CHUNK: Final = 1 << 16
_TEXT: Final = Payload(kind="tokens", arrays={})
"""A prompt that its token ids say all of."""


class Line:
    """What the first rank says, message by message, and what is said to it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection: Final = connection
        self._unframer: Final = Unframer()
        self._waiting: list[object] = []
        self._descriptors: list[int] = []

    def take(self) -> object:
        """The next message.

        Raises:
            EOFError: There is none to come.
        """
        while not self._waiting:
            data, descriptors, _, _ = socket.recv_fds(self._connection, _CHUNK, 1)
            if not data:
                raise EOFError
            self._descriptors += descriptors
            self._waiting += map(TO_RANK.decode, self._unframer.feed(data))
        return self._waiting.pop(0)

    def take_descriptor(self) -> int:
        """The descriptor that came with the newest message; it is the caller's to close."""
        return self._descriptors.pop(0)

    def say(self, message: object) -> None:
        """Answer."""
        self._connection.sendall(frame(FROM_RANK.encode(message)))


class Follower:
    """One rank, from its setup on."""

    def __init__(self, line: Line, setup: Setup) -> None:
        self._line: Final = line
        self._setup: Final = setup
        torch.set_num_threads(setup.threads)
        plugins = PluginSet.load([("model", setup.plugin)])
        context = ModelContext(
            path=setup.path,
            config=setup.config,
            assets=Path(setup.assets),
            trust_remote_code=setup.trust_remote_code,
        )
        self._model: Final = cast("Model", plugins.create("model", setup.plugin, setup.model_options, context))

    def join(self, join: Join) -> None:
        """Find the other ranks, build this one's part of the model, and check it with them."""
        setup = self._setup
        device, dtype = ranks_mesh.device_of(setup.device, setup.rank), torch_dtype(setup.dtype)
        store = ranks_mesh.reach_store(join.port)
        mesh = ranks_mesh.join(store, rank=setup.rank, size=setup.size, device=device)
        module, self._shares = build(self._model, seed=setup.seed, dtype=dtype, device=device, mesh=mesh)
        # Said before the first collective, which would not wait as long for a rank as the first one waits for this.
        self._line.say(Built(shares=self._shares.places))
        num_tokens = int(module.get_input_embeddings().num_embeddings)  # type: ignore[operator]
        self._runner = Runner(module, device, vocabulary=Vocabulary(num_tokens, mesh.group("tp")))
        options = setup.options
        with torch.inference_mode():
            shapes = adopt(module, self._runner, context_length=setup.context_length, verify=options.verify)
        self._cache = SlotCache(
            shapes, num_slots=setup.max_in_flight, step=options.cache_step, dtype=dtype, device=device
        )
        self._numbers = SlotNumbers(setup.max_in_flight, num_tokens, device)

    def serve(self) -> None:
        """Do what the first rank says until it says nothing more.

        Raises:
            EOFError: It is gone, or has no more to say.
        """
        with torch.inference_mode():
            while True:
                self._obey(self._line.take())

    def _obey(self, message: object) -> None:
        match message:
            case Step():
                self._step(message)
            case Move():
                self._cache.move(message.sources, message.targets, message.num_units)
            case Score():
                self._score(message)
            case Load():
                self._line.say(self._load())
            case _:
                raise AssertionError(f"{message!r} is nothing that a rank is told once it serves")

    def _step(self, told: Step) -> None:
        self._cache.fit(told.num_units, told.num_kept, longest=told.longest)
        self._numbers.follow(told.tokens, told.places)
        plan = Plan(
            sequences=[],
            num_decoding=len(told.tokens),
            pieces=told.pieces,
            piece_tokens=told.piece_tokens,
            offsets=[0] * len(told.pieces),
            forks=told.forks,
            shared=told.shared,
            drawn=[],
            logit_rows=None,
            kept=told.kept,
            num_units=told.num_units,
            longest=told.longest,
        )
        self._runner.step(plan, self._cache, self._numbers)

    def _score(self, told: Score) -> None:
        sequences = [
            Given(prompt=_TEXT, tokens=each.tokens, num_given=each.num_given, decided_N=each.decided)
            for each in told.sequences
        ]
        self._runner.score(sequences, temperature=told.temperature, budget=told.budget)

    def _load(self) -> Loaded:
        descriptor = self._line.take_descriptor()
        try:
            written = parts_in(map_staged(descriptor), self._shares.places)
        finally:
            os.close(descriptor)
        return load(self._shares, written)


def load(shares: Shares, written: Mapping[str, torch.Tensor]) -> Loaded:
    """Copy new weights in, and read back what is held then."""
    for name, source in written.items():
        copy_exactly(shares.tensors[name], source)
    wrong = next((name for name, source in written.items() if not same_bits(shares.tensors[name], source)), "")
    return Loaded(digests=shares.digests(), wrong=wrong)


def follow(connection: socket.socket) -> None:
    """Be a rank, over a connected socket, until its other end closes."""
    line = Line(connection)
    # The supervised boundary of this process: whatever ends it, the first rank hears why.
    try:
        setup = line.take()
        assert isinstance(setup, Setup)
        rank = Follower(line, setup)
        line.say(Ready())
        join = line.take()
        assert isinstance(join, Join)
        rank.join(join)
        rank.serve()
    except (EOFError, ConnectionError):
        return
    except Exception as error:
        with contextlib.suppress(OSError):
            line.say(Failed(reason=described(error)))
        raise
    finally:
        with contextlib.suppress(RuntimeError):  # the others may be gone
            ranks_mesh.leave()


def main() -> None:
    """Serve over the socket whose descriptor is the first argument of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        return
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        follow(connection)


if __name__ == "__main__":
    main()
