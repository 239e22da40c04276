"""Numbers as people read them."""

from __future__ import annotations


def tokens_in_words(number: float) -> str:
    """Returns a number of tokens as `20,598 tokens` or `0.6 M tokens`."""
    return f"{number:,.0f} tokens" if number < 100_000 else f"{number / 1e6:,.1f} M tokens"


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun, in the plural but for 1: `1 row`, `1,200 rows`."""
    return f"{number:,} {noun}" + "s" * (number != 1)


def duration(seconds: float) -> str:
    """Returns seconds as `3h12`, `4m05s` or `12s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
