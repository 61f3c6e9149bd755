"""Attention over a paged KV cache, behind one small interface."""

from ssd_engine.attention.base import AttentionBackend, AttentionPlan, QueryRun, Run, TreeRun
from ssd_engine.attention.sdpa import SdpaBackend

__all__ = ["AttentionBackend", "AttentionPlan", "QueryRun", "Run", "SdpaBackend", "TreeRun"]
