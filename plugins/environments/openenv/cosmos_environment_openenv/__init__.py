"""The environment `openenv`: dialogues with OpenEnv servers, over their WebSocket protocol."""
