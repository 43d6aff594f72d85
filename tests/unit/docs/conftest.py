"""The documentation's own directives, as its build imports them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "docs" / "extensions"))
