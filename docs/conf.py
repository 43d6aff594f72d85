"""Sphinx configuration."""

import sys
from pathlib import Path

from cosmos_core import __version__

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

project = "cosmos-core"
author = "The cosmos-core authors"
copyright = "the cosmos-core authors"  # noqa: A001 - Sphinx's name for it
release = __version__
extensions = [
    "myst_nb",
    "reference.gallery",
    "reference.hooks",
    "reference.kinds",
    "reference.kits",
    "reference.recipe",
]
exclude_patterns = ["_build", "extensions", "jupyter_execute"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
# The notebook is run: a cell that fails fails the build.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
html_theme = "furo"
html_title = f"cosmos-core {release}"
