"""Rewards for what a world model shows: images and videos, without a person who looks at them."""
