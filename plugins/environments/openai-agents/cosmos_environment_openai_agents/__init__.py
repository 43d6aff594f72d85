"""Agents of the OpenAI Agents SDK, as agents of cosmos-core."""
