"""Bugs in what becomes of prompts: leases, dispatch, batches, staleness, snapshots."""

from __future__ import annotations

from .planting import plant

MACHINE = "cosmos_core.control.machine"
LEDGER = f"{MACHINE}.ledger:Ledger"

PLANTS = (
    plant(
        "a report of any lease settles some lease",
        (
            f"{MACHINE}.core:_settle_lease",
            "replica.leases.pop(report.lease, None)",
            "replica.leases.pop(report.lease, None) or next(iter(replica.leases.values()), None)",
        ),
    ),
    plant(
        "a finished group leaves no room for another",
        (f"{MACHINE}.core:_settle_lease", "state.spare.add(replica.name)", "pass"),
    ),
    plant(
        "prompts of a lost replica are not queued again",
        (f"{MACHINE}.dispatch:lost_with", "ledger.requeue(lease.position)", "pass"),
    ),
    plant(
        "a replica is given one prompt more than it has room for",
        (
            f"{MACHINE}.dispatch:_stream",
            "most = (settings.capacity - 1) * settings.rollout_group_size",
            "most = settings.capacity * settings.rollout_group_size",
        ),
    ),
    plant(
        "prompts are given out a step too early",
        (f"{MACHINE}.dispatch:_limit", "settings.sync_max_staleness + 1 -", "settings.sync_max_staleness + 2 -"),
    ),
    plant(
        "a wave begins before all have its weights",
        (
            f"{MACHINE}.dispatch:_wave",
            "if any(name not in state.draining for names in behind for name in names):",
            "if not state.holders.get(state.target):",
        ),
    ),
    plant(
        "who drains is given prompts",
        (f"{MACHINE}.dispatch:_stream", "elif name not in state.draining:", "else:"),
    ),
    plant(
        "held-out rows are given to whoever has any weights",
        (
            f"{MACHINE}.dispatch:_evaluate",
            "state.holders.get(state.pending[0].version, set())",
            "(state.members['rollout'] - state.holders.get(-1, set()))",
        ),
    ),
    plant(
        "a batch is consumed and stays batched",
        (f"{LEDGER}.consume", "self.batched.pop(position)", "self.batched[position]"),
    ),
    plant(
        "a prompt that is released is lost",
        (f"{LEDGER}.release", "self.finished[position] = self.batched.pop(position)", "self.batched.pop(position)"),
    ),
    plant("what comes back is queued twice", (f"{LEDGER}.next", "heapq.heappop(self.queued)", "self.queued[0]")),
    plant(
        "samples of a dropped prompt are not counted",
        (f"{LEDGER}._take", "self.samples.drop(reason, len(group.samples), _units(group.samples))", "pass"),
    ),
    plant(
        "the bound on staleness is one too large",
        (
            f"{MACHINE}.batch_assembly:is_stale",
            "> state.settings.sync_max_staleness",
            "> state.settings.sync_max_staleness + 1",
        ),
        (f"{MACHINE}.dispatch:_limit", "settings.sync_max_staleness + 1 -", "settings.sync_max_staleness + 2 -"),
    ),
    plant(
        "the newest token's weights count for a sample's",
        (
            f"{MACHINE}.batch_assembly:is_stale",
            "group.oldest_version",
            "max((sample.newest_version for sample in group.samples), default=0)",
        ),
    ),
    plant(
        "what a step has made too old is kept",
        (f"{MACHINE}.progress:finish_step", "batch_assembly.drop_stale(state)", "pass"),
        (f"{MACHINE}.progress:enter_step", "batch_assembly.drop_stale(state)", "pass"),
    ),
    plant(
        "groups with too few scored samples are trained on",
        (f"{MACHINE}.batch_assembly:on_finished", "max(1, state.stage.min_group_size)", "1"),
    ),
    plant(
        "a step that failed for missing payloads is repeated with the same batch",
        (
            f"{MACHINE}.batch_assembly:on_step_failed",
            "for group in [group for group in state.ledger.finished.values() if group.lease in missing]:",
            "for group in []:",
        ),
    ),
    plant(
        "a batch is made of prompts in the order in which they came",
        (
            f"{MACHINE}.batch_assembly:form",
            "sorted(ledger.finished.values(), key=lambda group: (group.oldest_version, group.position))",
            "list(ledger.finished.values())",
        ),
        (f"{MACHINE}.batch_assembly:form", "for position in positions]", "for position in positions[::-1]]"),
    ),
    plant(
        "a step leaves no room for those in flight that will be stale",
        (f"{MACHINE}.batch_assembly:_must_wait", "(version - oldest) * size", "(version - oldest + 1) * size"),
    ),
    plant(
        "demonstrations are read once more than they are wanted",
        (f"{MACHINE}.batch_assembly:_read", "ledger.finished[position] =", "ledger.finished[max(0, position - 7)] ="),
    ),
    plant(
        "an evaluation ends one row early",
        (
            f"{MACHINE}.evaluation:settle",
            "== state.settings.evaluation_prompts",
            ">= state.settings.evaluation_prompts - 1",
        ),
    ),
    plant(
        "held-out rows of a lost replica are not queued again",
        (f"{MACHINE}.evaluation:requeue", "evaluation.queued.append(lease.row)", "pass"),
    ),
    plant(
        "a held-out loss is measured with each step",
        (f"{MACHINE}.evaluation:unmeasured", "if version not in known", "if True"),
    ),
    plant(
        "scored samples are counted as dropped",
        (f"{LEDGER}.consume", "if sample.is_scored:", "if not sample.is_scored:"),
    ),
    plant(
        "orders carry details",
        (
            f"{MACHINE}.batch_assembly:on_finished",
            'attrs.evolve(sample, detail="") if sample.detail else sample',
            "sample",
        ),
    ),
    plant(
        "a lower bound on staleness leaves what is too old",
        (f"{MACHINE}.progress:enter_step", "if changes.settle(state):", "if not changes.settle(state):"),
    ),
)
