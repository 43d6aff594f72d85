"""Rewards for the form of a text: exact match, regular expressions, tags, length, JSON schema."""
