from __future__ import annotations

from multicls.words import counted, duration, tokens_in_words


def test_durations() -> None:
    assert [duration(seconds) for seconds in (12.4, 65, 245, 11_520)] == ["12s", "1m05s", "4m05s", "3h12"]


def test_few_tokens_are_counted() -> None:
    assert [tokens_in_words(number) for number in (20_598, 99_999, 567_890)] == [
        "20,598 tokens", "99,999 tokens", "0.6 M tokens",
    ]  # fmt: skip


def test_a_number_with_its_noun() -> None:
    assert [counted(number, "row") for number in (0, 1, 1200)] == ["0 rows", "1 row", "1,200 rows"]
