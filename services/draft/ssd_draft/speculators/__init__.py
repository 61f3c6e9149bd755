"""What speculations are made with, behind one interface."""

from ssd_draft.speculators.base import Cannot, Speculator
from ssd_draft.speculators.model import ModelSpeculator
from ssd_draft.speculators.ngram import NgramSpeculator

__all__ = ["Cannot", "ModelSpeculator", "NgramSpeculator", "Speculator"]
