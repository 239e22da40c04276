from __future__ import annotations

import pytest

from multicls.errors import UserError, did_you_mean, run_command


def exit_code(main: object) -> object:
    with pytest.raises(SystemExit) as caught:
        run_command(main, [])  # type: ignore[arg-type]
    return caught.value.code


def fail(error: BaseException) -> object:
    def main(argv: object) -> None:
        raise error

    return main


def test_did_you_mean_names_the_nearest() -> None:
    assert did_you_mean("zero_optimisation", ["zero_optimization", "optimizer"]) == " Did you mean 'zero_optimization'?"


def test_did_you_mean_lists_all_when_none_is_near() -> None:
    assert did_you_mean("xyz", ["beta", "alpha"]) == " Known: alpha, beta."
    assert did_you_mean("xyz", []) == ""


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (3, 3)])
def test_exit_code_is_what_main_returns(returned: int | None, code: int) -> None:
    assert exit_code(lambda argv: returned) == code


def test_user_error_prints_every_problem_once_and_exits_with_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert exit_code(fail(UserError("a = 1: too small.", "b: unknown."))) == 2
    assert capsys.readouterr().err == "error: a = 1: too small.\nerror: b: unknown.\n"


def test_only_rank_0_tells_user_errors(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert exit_code(fail(UserError("a"))) == 2
    assert capsys.readouterr().err == ""


def test_interrupt_exits_with_130() -> None:
    assert exit_code(fail(KeyboardInterrupt())) == 130


def test_a_crash_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run_command(fail(ZeroDivisionError()), [])  # type: ignore[arg-type]
