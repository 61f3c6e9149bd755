"""Tensor parallelism over several nodes: how nodes find a leader, prove themselves and follow it.

The leader's engine process has rank 0. On every other node one process (``member.py``) holds one
authenticated connection to it and starts that node's ranks. The connection carries the set-up, the
store on which ranks find each other, the steps as raw integers, and heartbeats. Activations travel
between ranks, by NCCL or gloo, in the clear: a cluster's network must be private.
"""
