"""Errors that a user can cause. Edges map them once: to a gRPC status or to an exit code."""

EXIT_RANK_DIED = 70  # an engine process lost a tensor-parallel rank
EXIT_NODE_LOST = 71  # likewise, another node


class SSDError(Exception):
    """Base of every error whose message is meant for a user."""


class ModelError(SSDError):
    """A model directory that cannot be served as it is."""


class ConfigError(SSDError):
    """A server option, or a combination of options, that cannot work."""


class SelfCheckError(SSDError):
    """What a loaded model computes is not what plain torch computes from the same weights."""


TOO_LONG = "CONTEXT_LENGTH_EXCEEDED"


class InputError(SSDError):
    """A request field that is wrong; names the field and the bound."""

    def __init__(self, field: str, problem: str, reason: str = "") -> None:
        """``reason``: one that programs tell apart, ``TOO_LONG`` where a context has no room."""
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem
        self.reason = reason


def too_long(field: str, context: int, requested: str) -> InputError:
    """A request that a context has no room for. It begins with the words that programs look for."""
    words = f"This model's maximum context length is {context} tokens. However, you requested"
    return InputError(field, f"{words} {requested}", TOO_LONG)
