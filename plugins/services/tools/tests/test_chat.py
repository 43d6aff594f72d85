"""Dialogues: with a tiny model over a pipe, and with a stand-in that can be interrupted."""

import shutil
from types import SimpleNamespace

import pytest

from cosmos_core.errors import ConfigError, DataError
from cosmos_core.protocols import Sampling
from cosmos_core.types import Message
from cosmos_service_tools import dialogue
from cosmos_service_tools.answers import Part, speaking
from cosmos_service_tools.dialogue import Dialogue, talk
from cosmos_service_tools.generation import complete_prompts

LIMITS = {"temperature": 0.0, "max_units": 8, "seed": 0}


@pytest.fixture
def speaker(here):
    with speaking(here / "models/chat", plugin=None, trust_remote_code=False) as found:
        yield found


def told(parts):
    return "".join(part.text for part in parts)


def test_an_answer_in_parts_is_the_answer(speaker, here):
    options = {"plugin": None, "num_samples": 1, "output": here, "as_chat": True, "system": "Be brief."}
    ((whole,),) = complete_prompts(here / "models/chat", ["3 + 4"], max_units=40, temperature=0.0, seed=0, **options)
    turns = [Message(role="system", content="Be brief."), Message(role="user", content="3 + 4")]
    prompt = speaker.encode(turns)
    parts = list(speaker.answer(prompt, Sampling(temperature=0.0, max_units=40), 0))
    assert told(parts) == whole.removesuffix(" […]")
    assert len(parts) > 3
    assert [part.reason for part in parts[:-1]] == [""] * (len(parts) - 1)

    # It depends on the seed, part by part; and it ends before a stop, of which nothing is told.
    drawn = [told(speaker.answer(prompt, Sampling(max_units=40), seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    stop = whole[5:8]
    cut = list(speaker.answer(prompt, Sampling(temperature=0.0, max_units=40), 0, ["never", stop]))
    assert told(cut) == whole[: whole.index(stop)]
    assert cut[-1].reason == "stop"
    with pytest.raises(ConfigError, match="tokens fill the model's context of 256; shorten them"):
        list(speaker.answer(speaker.encode("3 + 4 " * 200), Sampling(), 0))


def test_what_is_piped_in_is_a_turn_a_line(cosmos, here):
    options = ("--temperature", "0", "--max-units", "8")
    said = cosmos("chat", "models/chat", *options, keys="3 + 4\n\n/reset\n3 + 4\n/exit\n3\n")
    first, again = said.splitlines()
    assert first == again

    # A model without a template, or asked to, completes each line.
    plain = cosmos("chat", "models/plain", *options, keys="3 + 4\n3 + 4\n")
    note, one, two = plain.splitlines()
    assert note.startswith(
        "Each line is completed by itself (the prompt is a chat, and the tokenizer has no chat templ"
    )
    assert one == two
    assert cosmos("chat", "models/chat", "--plain", *options, keys="3 + 4\n").splitlines()[1] == one
    with pytest.raises(DataError, match="there is no place for a system's turn"):
        cosmos("chat", "models/plain", "--system", "Be rude.", keys="3 + 4\n")
    with pytest.raises(ConfigError, match="gone: there is no such folder"):
        cosmos("chat", "gone", keys="")


def test_a_model_that_learned_from_plain_prompts_is_given_them(cosmos, plain_export):
    options = ("--temperature", "0", "--max-units", "8")
    asked, told, unknown = (
        cosmos("chat", model, *more, *options, keys="3 + 4\n").splitlines()
        for model, more in ((plain_export, ["--plain"]), (plain_export, []), ("models/chat", []))
    )
    assert told[0] == (
        "Each line is completed by itself (run mine learned from plain prompts; --template puts chats in the model's "
        "template); \\n in it is a line break."
    )
    assert asked[1:] == told[1:] != unknown
    assert cosmos("chat", plain_export, "--template", *options, keys="3 + 4\n").splitlines() == unknown
    # Nothing is said of a template where there is none.
    bare = shutil.copytree("models/plain", plain_export.with_name("bare"))
    note, said = cosmos("chat", bare, *options, keys="3 + 4\n").splitlines()
    assert (note, said) == (
        "Each line is completed by itself (run mine learned from plain prompts); \\n in it is a line break.",
        told[1],
    )


class Parrot:
    """Repeats the last turn letter by letter; of `!`, it is interrupted."""

    why_plain = ""

    def __init__(self):
        self.heard = []

    def encode(self, prompt):
        self.heard.append(prompt)
        return prompt

    def answer(self, prompt, sampling, seed):
        for letter in prompt[-1].content:
            if letter == "!":
                raise KeyboardInterrupt
            yield Part(text=letter, ids=[], logprobs=[])
        yield Part(text="", ids=[], logprobs=[], reason="stop")


def test_an_interrupted_answer_is_remembered_and_the_chat_goes_on(monkeypatch, capsys):
    parrot = Parrot()
    lines = iter(["ab!c", " ", "d", "/system t", "e"])

    def typed(prompt):
        assert prompt == "> "
        if (line := next(lines, None)) is None:
            raise KeyboardInterrupt
        return line

    monkeypatch.setattr(dialogue.sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", typed)
    talk(Dialogue(parrot, system="s", **LIMITS))
    assert capsys.readouterr().out == "ab [interrupted]\nd\ne\n\n"
    heard = [[f"{turn.role}: {turn.content}" for turn in turns] for turns in parrot.heard]
    assert ["system: s", "user: ab!c", "assistant: ab", "user: d"] in heard
    assert heard[-1] == ["system: t", "user: e"]
