"""Families of world models with a planted fault, which are run as plugins."""

from pathlib import Path

import pytest

from cosmos_core.testing import DenoisingModelConformance
from tests.nightly.kit.faulty_family import unnamed

pytestmark = pytest.mark.slow

FAMILY = (Path(__file__).parent / "diffusion_family.py").read_text()
DECISIONS = "test_decisions_equal_the_reference"
VETTED = "test_a_demonstration_can_be_vetted"
FACTS = "test_facts_say_what_a_decision_keeps"
DIFFERENT = "are not those of the reference"
TESTS = [name for name in dir(DenoisingModelConformance) if name.startswith("test_")]
BODY = """
config = {}

@pytest.fixture
def options(self):
    return {"num_frames": 3, "height": 4, "width": 4, "text": "table", "text_length": 4, "negative_prompt": "grey"}

def forward(self, module, latents, time, text):
    return module(latents, time, text)

def guided(self, velocity, negative, guidance):
    return negative + guidance * (velocity - negative)
"""


def only(*tests):
    """A class body that leaves the other tests of the kit."""
    return "".join(f"{name} = None\n" for name in TESTS if name not in tests)


OWN_VET = """
    def vet(self, prompt):
        {vet}

    def said(self, kept):"""


def changed(old, new):
    assert FAMILY.count(old) == 1, old
    return FAMILY.replace(old, new)


def vetting(line):
    """A family with a `vet` of its own."""
    return changed("\n    def said(self, kept):", OWN_VET.format(vet=line))


PLANTED = {
    "text-ignored": (
        changed("latents_B.dtype), text_BLE)", "latents_B.dtype), 0 * text_BLE)"),
        BODY,
        DECISIONS,
        DIFFERENT,
    ),
    "text-of-nobody": (
        changed(
            "    def said(self",
            "    def conditioning(self, payload):\n"
            "        return {name: each * 0 for name, each in super().conditioning(payload).items()}\n\n"
            "    def said(self",
        ),
        BODY,
        DECISIONS,
        DIFFERENT,
    ),
    "negative-ignored": (
        changed(
            "    def said(self",
            "    def negative_text(self):\n        return 0 * super().negative_text()\n\n    def said(self",
        ),
        BODY,
        DECISIONS,
        DIFFERENT,
    ),
    "guided-otherwise": (
        changed("negative_B + guidance * (", "velocity_B + guidance * ("),
        BODY,
        DECISIONS,
        DIFFERENT,
    ),
    "negative-of-no-words": (
        FAMILY,
        BODY.replace(', "negative_prompt": "grey"', ""),
        DECISIONS,
        "give options text = 'table', a negative_prompt",
    ),
    "vets-files-alone": (
        vetting(
            "from pathlib import Path; from cosmos_core.errors import DataError\n"
            "        if not Path(prompt.demonstration).is_file(): raise DataError('no file')"
        ),
        BODY,
        VETTED,
        "vet() passes a row whose demonstration is a frame too short",
    ),
    "facts-of-half": (
        changed(
            "        return kept",
            "        return {dtype: attrs.evolve(each, inner=each.inner / 2, inputs=each.inputs / 2)"
            " for dtype, each in kept.items()}",
        ),
        BODY,
        FACTS,
        "bytes for the backward pass, and it keeps",
    ),
}


@pytest.fixture(scope="module")
def outcomes(run_kit):
    modules = {"sound": FAMILY, **{name: source for name, (source, *_) in PLANTED.items()}}
    bodies = {name: body + only(test) for name, (_, body, test, _) in PLANTED.items()}
    sound = BODY + only(DECISIONS, VETTED, FACTS)
    return run_kit("model", modules, kit="DenoisingModelConformance", bodies={**bodies, "sound": sound})


def test_a_sound_family_passes(outcomes):
    results = {each.test: (each.result, each.message) for each in outcomes["sound"]}
    assert {name: results[name] for name in (DECISIONS, VETTED, FACTS)} == dict.fromkeys(
        (DECISIONS, VETTED, FACTS), ("passed", "")
    )


def test_every_fault_is_named(outcomes):
    assert unnamed(outcomes, PLANTED) == {}
