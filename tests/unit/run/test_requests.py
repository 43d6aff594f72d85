"""What is asked of a run, at a controller that answers as it is told to."""

import threading
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import zmq

from cosmos_core.config.loading import save_job
from cosmos_core.control.journal import Journal
from cosmos_core.control.machine.events import Commanded
from cosmos_core.errors import ConfigError, ReplicaError
from cosmos_core.run import address, observer, requests
from cosmos_core.run.folder import held
from cosmos_core.transport import key_folder, keys, sockets
from cosmos_core.transport.authentication import listen
from cosmos_core.transport.key_folder import AllowList
from cosmos_core.transport.keys import ALLOWED, controller_key
from cosmos_core.transport.messages import DOWN, REQUEST, UP, Answer, Command, Drain, Profile
from cosmos_core.transport.sockets import Closing
from cosmos_service_tools.profile import _follow

DRAIN = Drain(name="rollout-1")


@pytest.fixture
def answering(monkeypatch, tmp_path):
    """Serve commands with a refusal, from the second time that each comes on; what came."""
    came, over = [], threading.Event()
    monkeypatch.setattr(requests, "_AGAIN_S", 0.05)
    keys = tmp_path / "keys"
    key_folder.ensure(keys)
    monkeypatch.setattr(requests, "load_job", lambda directory: type("Job", (), {"run_id": "demo-1", "keys": keys}))
    own, allowed = controller_key(keys).pair, AllowList(keys / ALLOWED)
    with (
        zmq.Context() as context,
        listen(context, "127.0.0.1", 0, sockets.CONTROL, own=own, allowed=allowed) as listener,
    ):
        socket = listener.socket
        monkeypatch.setattr(requests, "find_address", lambda job: sockets.address_of(socket))

        def serve(refusal):
            while not over.is_set():
                if socket.poll(20):
                    identity, data = socket.recv_multipart()
                    message = UP.decode(data)
                    if isinstance(message, Command):
                        came.append(message)
                        if len(came) > 1:
                            socket.send_multipart([identity, DOWN.encode(Answer(ident=message.ident, refusal=refusal))])

        threads = []

        def start(refusal=""):
            threads.append(threading.Thread(target=serve, args=(refusal,)))
            threads[0].start()
            return came

        yield start
        over.set()
        threads[0].join()


def test_a_pending_request_is_sent_once_a_second_until_it_is_answered():
    asked, pending = [], requests.PendingRequests()
    observer = SimpleNamespace(answers={}, ask=lambda request, ident: asked.append((request, ident)))
    ident = pending.add(DRAIN)
    for now in (10.0, 10.5, 11.5):
        pending.send(observer, now)
    assert asked == [(DRAIN, ident)] * 2
    observer.answers[ident] = ""
    pending.send(observer, 99.0)
    assert len(asked) == 2


def test_a_request_is_repeated_until_it_is_answered(answering, tmp_path):
    came = answering()
    requests.ask(tmp_path, DRAIN)
    assert len({command.ident for command in came}) == 1
    assert len(came) >= 2
    assert REQUEST.decode(came[0].request) == DRAIN


def test_a_refusal_is_an_error_with_its_reason(answering, tmp_path):
    answering("no replica rollout-1")
    with pytest.raises(ReplicaError, match="refused: no replica rollout-1"):
        requests.ask(tmp_path, DRAIN)


def test_a_folder_that_is_no_run_and_a_run_that_is_over_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="not the folder of a run"):
        requests.ask(tmp_path, DRAIN)
    monkeypatch.setattr(requests, "load_job", lambda directory: None)
    monkeypatch.setattr(requests, "find_address", lambda job: None)
    monkeypatch.setattr(requests, "absence", lambda job: "its controller is gone")
    with pytest.raises(ReplicaError, match=r"does not go on \(its controller is gone\)"):
        requests.ask(tmp_path, DRAIN)


@pytest.mark.parametrize("is_taken", [True, False])
@pytest.mark.parametrize("is_told", [True, False])
def test_a_profile_outlives_its_controller_and_ends_with_its_run(is_taken, is_told, history, job, monkeypatch):
    history.join()
    history.stop()
    history.end()
    earlier = len(history.entries)
    history.resume(0)
    history.join()
    job.directory.mkdir()
    save_job(job)
    session, asked, polls = ExitStack(), [], iter(range(99))
    request = Profile(role="policy", ranks=(0,), steps=2)

    class Told(Closing):
        """An observer of a run that was resumed, whose controller is gone for a while, and that ends then."""

        last_sequence, silence_s, answers = 0, 0.0, {}
        newest = property(lambda self: len(history.entries))
        ask = staticmethod(lambda _request, ident: asked.append(ident))
        close = session.close

        def __init__(self, *_arguments):
            session.enter_context(held(job.directory))

        def poll(self, _timeout_s):
            match next(polls):
                case 0:
                    return self.fresh(earlier)
                case 2 if is_taken:
                    history.append(Commanded(ident=asked[0], request=REQUEST.encode(request)))
                case 9:
                    history.stop()
                    history.end()
                    with Journal(job.journal) as journal:
                        for _, _, event in history.entries:
                            journal.append(event)
                        journal.commit()
                    if not is_told:
                        session.close()
                        return []
            return self.fresh()

        def fresh(self, until=None):
            found = history.entries[self.last_sequence : until]
            self.last_sequence += len(found)
            return found

    monkeypatch.setattr(observer, "Observer", Told)
    monkeypatch.setattr(requests, "address_of", lambda directory, job: "tcp://127.0.0.1:9")
    monkeypatch.setattr(address, "read_address", lambda job: None)
    monkeypatch.setattr(keys, "person_key", lambda folder, may_ask: None)
    if is_taken:
        assert _follow(job.directory, request).problems == {"policy-0": "the run ended before it had traced all"}
    else:
        with pytest.raises(ReplicaError, match="the run ended before anything was traced"):
            _follow(job.directory, request)
    assert next(polls) == 10
