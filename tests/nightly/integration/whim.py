"""A reward that is a whim of the completion's bytes, so that every group has something to learn from the start."""

SOURCE = """
from cosmos_core.protocols import Provider, hookimpl

class Whim:
    def __init__(self, options, context):
        pass

    def score(self, completion):
        return float(sum(completion.text.encode()) % 2)

@hookimpl
def cosmos_reward():
    return Provider(create=Whim)
"""
