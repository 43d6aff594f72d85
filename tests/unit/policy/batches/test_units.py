import pytest

from cosmos_core.errors import DataError
from cosmos_core.policy.batches.batch import Units, units_of
from cosmos_core.types import Array, Payload


def payload(kind, **shapes):
    arrays = {name: Array(dtype="int32", shape=shape, data=bytes(4 * shape[0])) for name, shape in shapes.items()}
    return Payload(kind=kind, arrays=arrays)


def test_tokens_are_prompt_and_completion():
    found = units_of(payload("tokens", prompt=(3,), completion=(5,)))
    assert found == Units(decisions=5, conditioning=3)
    assert found.total == 8


def test_what_others_said_is_no_decision():
    dialogue = payload("tokens", prompt=(3,), completion=(5,))
    dialogue.arrays["decided"] = Array(dtype="bool", shape=(5,), data=bytes([1, 1, 0, 0, 1]))
    assert units_of(dialogue) == Units(decisions=3, conditioning=3, others=2)
    assert units_of(dialogue).total == 8


def test_latents_are_denoising_steps():
    assert units_of(payload("latents", times=(7,), text=(4,))) == Units(decisions=7, conditioning=0)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (payload("latents"), "needs a flat array 'times', and has none"),
        (payload("tokens", prompt=(3,)), "needs a flat array 'completion', and has none"),
        (payload("tokens", prompt=(3,), completion=(1, 1)), r"'completion', and has one of shape \(1, 1\)"),
        (payload("tokens", prompt=(3,), completion=(2,), decided=(2,)), "'decided' is int32"),
        (payload("media"), "of kind 'media' has no decisions"),
    ],
)
def test_what_cannot_be_counted_is_named(wrong, said):
    with pytest.raises(DataError, match=said):
        units_of(wrong)
