"""Whether and how long a forward is held back for branches. Pure functions of measured times."""

from ssd_engine.speculation.fan_out import expected_tokens

LONGEST_WAIT = 1.0  # seconds, whatever is measured
PATIENCE = 3.0  # times the usual delay


def worthwhile_wait(
    alpha: float,  # acceptance of what is waited for
    depth: int,  # tokens that are waited for
    plain_seconds: float,  # a forward without speculation
    verify_seconds: float,  # a forward with one
    usual_seconds: float | None,  # from an outcome to its branch; None: not known yet
) -> float:
    """Seconds up to which waiting yields more tokens per second than going on; 0: do not wait.

    All rows of the next forward have missed. Going on gives 1 / plain; waiting w gives
    E / (w + verify). They are equal at the result.
    """
    if not plain_seconds:
        return 0.0
    even = expected_tokens(alpha, depth) * plain_seconds - verify_seconds
    if even <= 0.0 or (usual_seconds is not None and usual_seconds >= even):
        return 0.0
    patience = even if usual_seconds is None else PATIENCE * usual_seconds
    return min(even, patience, LONGEST_WAIT)
