"""Rewards for thought and answer in tags."""

from cosmos_reward_reason.accuracy import AccuracyOptions, AccuracyReward
from cosmos_reward_reason.form import FormatReward
from cosmos_reward_reason.tags import Tagged, read_tags

__all__ = ["AccuracyOptions", "AccuracyReward", "FormatReward", "Tagged", "read_tags"]
