"""cosmos-core: asynchronous post-training of language, vision-language and world models.

Importing this package imports neither torch nor any plugin; each process imports what its role needs.
"""

from typing import Final

__version__: Final = "0.1.0"
