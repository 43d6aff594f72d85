"""Exit codes with which a replica's process says what is to become of its place."""

from __future__ import annotations

import os
from typing import Final

LOST: Final = os.EX_TEMPFAIL
"""It ends though nothing is wrong with the run: another one can take its place."""
REFUSED: Final = os.EX_NOPERM
"""The controller does not want it, and would not want another one in its place either."""
