"""Rewards from elsewhere: a language model as judge, or any HTTP service."""
