"""The tutorial for authors, followed to the letter: from an empty folder to a package that is fit to be published."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from tests.nightly.ecosystem.environment import CleanEnvironment
from tests.nightly.ecosystem.follow import follow
from tests.nightly.ecosystem.wheels import ROOT, Wheelhouse

PAGE = ROOT / "docs" / "plugins" / "tutorial.md"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tutorial_holds_to_the_letter(wheels: Wheelhouse) -> None:
    with tempfile.TemporaryDirectory(prefix="cosmos-tutorial-") as folder:
        variables = CleanEnvironment(folder=Path(folder), wheels=wheels).environment
        # The page begins where a person does: with a Python and nothing else.
        place = os.pathsep.join([str(Path(sys.base_prefix, "bin")), variables["PATH"]])
        follow(PAGE, Path(folder), {**variables, "PATH": place}, timeout_s=800.0)
