"""The reward service: what is seen (images, videos, latents) gets its scores over HTTP, from reward plugins."""
