"""The load of a service: requests that are not answered yet, and the bytes that they hold."""

from __future__ import annotations

from typing import Final


class Capacity:
    """Room for requests.

    Args:
        requests: Most of them.
        size_bytes: Most bytes that they hold.
    """

    def __init__(self, requests: int, size_bytes: int) -> None:
        self._requests: Final = requests
        self._size_bytes: Final = size_bytes
        self.num_requests = 0
        self.held_bytes = 0

    def take(self, size_bytes: int) -> bool:
        """Take a request on, if there is room for it."""
        if self.num_requests >= self._requests or self.held_bytes + size_bytes > self._size_bytes:
            return False
        self.num_requests += 1
        self.held_bytes += size_bytes
        return True

    def grow(self, size_bytes: int) -> bool:
        """A request that was taken on holds so many bytes more, if there is room for them."""
        if self.held_bytes + size_bytes > self._size_bytes:
            return False
        self.held_bytes += size_bytes
        return True

    def give(self, size_bytes: int) -> None:
        """A request is answered or was none."""
        self.num_requests -= 1
        self.held_bytes -= size_bytes
