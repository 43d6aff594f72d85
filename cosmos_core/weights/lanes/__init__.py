"""Lanes: how the bytes of an answered read get from a publisher to a receiver.

Requests and answers always travel over ZeroMQ, so that the planner, the window, deadlines and the turn to other
publishers are the same on every lane. Of an answer to `wire.Read`, the slices follow as frames (`zmq`), or come through
a process group of the two (`gloo`, `nccl`).
"""
