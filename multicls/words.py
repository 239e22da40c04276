"""Numbers as people read them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Returns seconds as `3h12`, `4m05s` or `12s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
