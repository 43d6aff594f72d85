"""Every socket of a live run and a reward service that listens, and the attacks on each."""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, get_args

import attrs
import psutil

from cosmos_core.config.job import Job
from cosmos_core.config.loading import load_job
from cosmos_core.protocols import TensorSlice
from cosmos_core.transport.addresses import split_key
from cosmos_core.transport.frames import REPLIES, REQUESTS, Fetch
from cosmos_core.transport.keys import read_key
from cosmos_core.transport.messages import DOWN, UP, Up, Watch
from cosmos_core.transport.sockets import Curve
from cosmos_core.weights import wire
from tests.following import Following
from tests.malformed_requests import GOOD, spoilt
from tests.nightly.fuzz.attackers import Answers, Place, Slow, knocks, peer, requests, strangers, without_right
from tests.nightly.fuzz.frames import Malformed, as_person, as_replica, of_payloads, of_weights, stranger
from tests.nightly.integration.reward_service import TOKEN, Serving, body


@attrs.frozen(kw_only=True, eq=False)
class Attack:
    """Something to throw at a socket: so many, of which each answer is counted. Fewer than `count` are not."""

    what: str
    count: int
    throw: Callable[[int], Answers]


@attrs.define(kw_only=True, eq=False)
class Target:
    """A socket that listens.

    Attributes:
        lets_wait: Whether slow clients may stay as long as they like: torch's own sockets (docs/security.md).
        slow: What those say first who are slow, or never read.
        drip: What they say again and again.
        answers: Of each attack, once it is over.
        num_cut: Slow clients who were cut off, and how many were not in the end.
    """

    name: str
    place: Place
    attacks: tuple[Attack, ...]
    slow: tuple[bytes, ...]
    drip: bytes = b""
    num_slow: int = 40
    lets_wait: bool = False
    answers: dict[str, Answers] = attrs.field(factory=dict)
    num_cut: tuple[int, int] = (0, 0)

    def assail(self) -> None:
        """Throw everything, while slow clients stay; then wait for these to be let go."""
        with Slow(self.place, self.slow, self.num_slow, self.drip) as slow:
            for attack in self.attacks:
                self.answers[attack.what] = attack.throw(attack.count)
            left = 0 if self.lets_wait else slow.wait_until_cut(90)
            self.num_cut = slow.num_cut, left


class Targets:
    """Knows an attack for each socket of a run and of a reward service."""

    def __init__(self, run: Path, following: Following, service: Serving) -> None:
        self.job: Final[Job] = load_job(run)
        self.keys: Final = {name: read_key(self.job.keys / f"{name}.key") for name in ("policy", "rollout", "operator")}
        self.following: Final = following
        self.page: Final = place_of(str(following.controller["page"]))
        self.service: Final = place_of(service.url)
        self.page_token: Final = (run / "page.token").read_text().strip()
        health = json.loads((run / "replicas" / "policy-0.json").read_text())
        self.health: Final = (health["host"], health["health_port"])

    def of(self, listening: dict[Place, int], count: int) -> list[Target]:
        """Each socket that listens, with its attacks, `count` in all; one that is not known is an error."""
        served = self._served_places(3.0)
        policy = {listening[place] for place, (name, *_) in served.items() if name == "policy-0"}
        found = []
        for place, pid in listening.items():
            if place == place_of(str(self.following.controller["address"])):
                continue
            if place == self.page:
                found.append(self._http("live page", place, self._of_page()))
            elif place == self.service:
                found.append(self._http("reward service", place, self._of_service()))
            elif place == self.health:
                found.append(self._of_health(place))
            elif place in served and served[place][1] != "store":
                found.append(self._served(*served[place]))
            else:
                assert pid in policy, f"{place} of {psutil.Process(pid).cmdline()}: nobody knows what listens there"
                noise = [random.Random(place[1]).randbytes(60) for _ in range(20)]
                attack = Attack(what="noise", count=20, throw=lambda _, at=place, said=noise: requests(at, said))
                found.append(
                    Target(
                        name="process group", place=place, attacks=(attack,), slow=(b"\0",), num_slow=4, lets_wait=True
                    )
                )
        rest = count - sum(attack.count for target in found for attack in target.attacks)
        return [self._controller(rest), *found]

    def _served_places(self, within_s: float) -> dict[Place, tuple[str, str, str]]:
        """Replica, purpose and endpoint by place; what is passed on is held for a moment only."""
        found: dict[Place, tuple[str, str, str]] = {}
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            self.following.look()
            for replica in self.following.state.replicas.values():
                passed_on = [("weights", text) for text in replica.kept.values()]
                for purpose, text in (*replica.endpoints.items(), *passed_on):
                    for endpoint in (each.partition("@")[0] for each in text.split()):
                        found[place_of(endpoint)] = (replica.name, purpose, endpoint)
        return found

    def _controller(self, count: int) -> Target:
        address, server = str(self.following.controller["address"]), self.keys["policy"].server
        run_id, names = self.job.run_id, [each.__name__ for each in get_args(Up)]
        messages = {
            "rollout": Malformed(1, as_replica(run_id), names),
            "operator": Malformed(2, as_person(run_id), names),
        }
        mark = "run-of-nobody"
        last = {"rollout": attrs.evolve(stranger(), run_id=mark), "operator": Watch(run_id=mark, after=0)}

        def say(label: str, number: int) -> Answers:
            curve = Curve(own=self.keys[label].pair, server=server)
            heard = {"last": UP.encode(last[label]), "is_last": lambda said: mark in getattr(said, "reason", "")}
            return peer(address, curve, DOWN, limited(messages[label], number), **heard)

        few = 2_000
        own = (
            Attack(what="as a replica", count=(count - 2 * few) * 3 // 4, throw=functools.partial(say, "rollout")),
            Attack(
                what="as a person",
                count=count - 2 * few - (count - 2 * few) * 3 // 4,
                throw=functools.partial(say, "operator"),
            ),
        )
        return self._zmq("controller", address, server, messages["rollout"], own=own, count=few)

    def _served(self, name: str, purpose: str, endpoint: str) -> Target:
        if purpose == "payloads":
            endpoint, _, token = endpoint.rpartition("/")
            label, sent, codec = "policy", of_payloads(token), REPLIES
            last: Any = REQUESTS.encode(Fetch(token="", request=2**40, leases=(1,)))
            names = ["Fetch", "Found", "Absent"]
        else:
            piece = TensorSlice(name="model.embed_tokens.weight", start=(0, 0), shape=(2, 3))
            label, sent, codec = "rollout", of_weights(self.job.run_id, "of before", piece), wire.CODEC
            last = wire.CODEC.encode(wire.Describe(request=2**40, run_id=self.job.run_id, version=2**40))
            names = ["Read", "Describe", "Leave", "Slices"]
        address, server = split_key(endpoint)
        messages = Malformed(place_of(endpoint)[1], sent, names)
        curve = Curve(own=self.keys[label].pair, server=server)

        def say(number: int) -> Answers:
            return peer(
                address, curve, codec, limited(messages, number), last=last, is_last=lambda said: said.request == 2**40
            )

        others = "rollout" if label == "policy" else "policy"
        barred = ((f"key of a {others}", Curve(own=self.keys[others].pair, server=server)),)
        attacks = (
            Attack(what=f"as a {label}", count=4_000, throw=say),
            Attack(what=f"as a {others}", count=200, throw=lambda number: strangers(address, barred, messages, number)),
        )
        return self._zmq(f"{purpose} of {name}", address, server, messages, own=attacks, count=400)

    def _zmq(
        self, name: str, address: str, server: str, messages: Malformed, *, own: tuple[Attack, ...], count: int
    ) -> Target:
        place, keys = place_of(address), without_right(self.keys["policy"], server)
        attacks = (
            Attack(what="handshakes", count=count, throw=lambda number: requests(place, knocks(place[1], number))),
            *own,
            Attack(
                what="keys without right", count=count, throw=lambda number: strangers(address, keys, messages, number)
            ),
        )
        return Target(name=name, place=place, attacks=attacks, slow=(b"", b"\xff", *knocks(5, 8)), drip=b"\0")

    def _of_page(self) -> dict[str, tuple[bytes, ...]]:
        bearer = b"\r\nAuthorization: Bearer " + self.page_token.encode() + b"\r\n"
        good = tuple(each.replace(b"rollout-0", b"rollout-55").replace(b"36\r\n", b"37\r\n") for each in GOOD)
        return {"": good, "token": tuple(each.replace(b"\r\n", bearer, 1) for each in good)}

    def _of_service(self) -> dict[str, tuple[bytes, ...]]:
        octets = body(9)
        head = b" HTTP/1.1\r\nHost: localhost\r\n"
        length = b"Content-Length: %d\r\n\r\n" % len(octets)
        chunked = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(octets), octets)
        form = b"Content-Type: application/x-www-form-urlencoded\r\nContent-Length: 16\r\n\r\nuuid=x&type=sees"
        good = (
            b"GET /health" + head + b"\r\n",
            b"GET /v1/enqueue?scorer=sees&kind=media" + head + b"\r\n",
            b"GET /v1/fetch?id=nothing&wait_s=0" + head + b"\r\n",
            b"POST /v1/enqueue" + head + length + octets,
            b"POST /v1/enqueue" + head + chunked,
            b"POST /v1/enqueue" + head + b"Idempotency-Key: k\r\n" + length + octets,
            b"POST /api/reward/enqueue" + head + length + octets,
            b"POST /api/reward/pull" + head + form,
        )
        bearer = b"\r\nAuthorization: Bearer " + TOKEN.encode() + b"\r\n"
        return {"": good, "token": tuple(each.replace(b"\r\n", bearer, 1) for each in good)}

    def _http(self, name: str, place: Place, good: dict[str, tuple[bytes, ...]]) -> Target:
        def throw(label: str, number: int) -> Answers:
            chance = random.Random(place[1])
            return requests(place, (spoilt(chance, good[label]) for _ in range(number)))

        attacks = (
            Attack(what="requests without token", count=5_000, throw=functools.partial(throw, "")),
            Attack(what="requests with the token", count=4_000, throw=functools.partial(throw, "token")),
        )
        # The last one asks for more than it takes in.
        slow = (b"", b"GET / HTTP/1.1\r\nX: a", good["token"][4][:-40], good["token"][0] * 3_000)
        return Target(name=name, place=place, attacks=attacks, slow=slow, drip=b"a")

    def _of_health(self, place: Place) -> Target:
        ping = b"\x00\x00\x00\x07\x92\xa4Ping\x80"
        said = [*knocks(7, 1_500), *[ping * 2_000] * 100, *[b"\xff" * 8, b"\0\0\x10\0" + bytes(4_000)] * 200]
        attack = Attack(what="noise", count=len(said), throw=lambda _: requests(place, said))
        return Target(name="health channel", place=place, attacks=(attack,), slow=(b"", ping[:5]), drip=b"")


def limited(messages: Malformed, number: int) -> Iterator[list[bytes]]:
    return itertools.islice(iter(messages), number)


def place_of(address: str) -> Place:
    host, _, port = re.sub(r"^\w+://", "", address).partition("#")[0].partition("/")[0].rpartition(":")
    return host, int(port)


def listening(processes: list[psutil.Process]) -> dict[Place, int]:
    """Every TCP socket that one of these processes listens on, and which."""
    return {
        (each.laddr.ip, each.laddr.port): process.pid
        for process in processes
        for each in process.net_connections(kind="tcp")
        if each.status == psutil.CONN_LISTEN
    }
