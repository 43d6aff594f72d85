"""How properties are tested: alike in each run; neither a busy machine nor a draw is a fault of what is tested."""

from hypothesis import settings

settings.register_profile("tests", deadline=None, derandomize=True, database=None)
settings.load_profile("tests")
