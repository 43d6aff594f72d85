"""Bugs in weight versions: publication, targets, digests, the tree of those that pass them on."""

from __future__ import annotations

from .planting import plant

MACHINE = "cosmos_core.control.machine"
PUBLICATION = f"{MACHINE}.publication"

PLANTS = (
    plant(
        "the digest of loaded weights is not checked",
        (f"{PUBLICATION}:on_loaded", "if known.digest != report.digest:", "if False:"),
    ),
    plant(
        "a version is a target before its step is done",
        (f"{PUBLICATION}:retarget", "if state.target < v <= newest and", "if state.target < v and"),
    ),
    plant(
        "replicas go on to newer weights while old ones are evaluated",
        (f"{PUBLICATION}:retarget", "newest = min(newest, state.pending[0].version)", "pass"),
    ),
    plant(
        "a policy replica that is gone is still read from",
        (f"{PUBLICATION}:drop_source", "known.sources.discard(name)", "pass"),
    ),
    plant(
        "weights of a step that only a lost replica had applied are kept",
        (f"{PUBLICATION}:drop_source", "v > state.step and not known.sources", "False"),
    ),
    plant(
        "weights that nobody can serve any more are not published again",
        (f"{PUBLICATION}:retarget", "elif state.publish < state.step and", "elif False and"),
    ),
    plant(
        "a refused replica passes on what it has",
        (f"{PUBLICATION}:_refuse", "replica.kept.clear()", "pass"),
        (f"{MACHINE}.relays:_is_afar", "or replica.is_doubted or", "or"),
        (f"{MACHINE}.invariants:_relays", "replica.is_doubted or", ""),
    ),
    plant(
        "a refused replica goes on with its old weights",
        (f"{PUBLICATION}:_refuse", "state.hold(replica, -1)", "pass"),
    ),
    plant(
        "a version is forgotten that replicas still pass on",
        (f"{PUBLICATION}:_forget", "del replica.kept[version]", "pass"),
    ),
    plant(
        "readers of a lost replica are given no other to read from",
        (f"{MACHINE}.relays:follow", "_put(state, state.replicas[orphan])", "pass"),
    ),
    plant(
        "the policy publishes nothing at the start",
        (f"{PUBLICATION}:due_at_start", "return state.step if", "return -1 if"),
    ),
    plant(
        "whoever waits for a parent that is behind is given nothing",
        (
            f"{MACHINE}.directives:Offers.target",
            "if newest in parent.kept:",
            "if parent.kept.pop(newest, ''):",
        ),
    ),
    plant(
        "a version is forgotten that may be being loaded",
        (f"{PUBLICATION}:_forget", "else oldest + 1", "else oldest + 2"),
    ),
    plant(
        "a new pace is counted from a later step",
        (f"{MACHINE}.changes:_settled", "max(0, max(", "max(1, max("),
    ),
)
