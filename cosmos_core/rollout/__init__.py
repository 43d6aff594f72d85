"""Rollout replicas: prompt to completion to reward to report, while weights change underneath."""
