from __future__ import annotations

from multicls.words import duration


def test_durations() -> None:
    assert [duration(seconds) for seconds in (12.4, 65, 245, 11_520)] == ["12s", "1m05s", "4m05s", "3h12"]
