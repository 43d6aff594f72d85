"""Weights from policy to rollout replicas: snapshots, slices planned between shard maps, digests.

`publisher` and `receiver` are the two ends; `digest` attests what arrived.
"""
