from __future__ import annotations

import os
import sys
from typing import NoReturn

import pytest

from multicls.errors import UserError, did_you_mean, run_command
from multicls.files import REPOSITORY
from tests.processes import completed

LIMIT = 60  # seconds of a command; its child would keep it for 600
COMMAND = """
import multiprocessing, signal, sys, time
from multicls.errors import run_command

def main(argv):
    def outlive(ready):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ready.set()
        time.sleep(600)

    context = multiprocessing.get_context("fork")
    ready = context.Event()
    context.Process(target=outlive, args=(ready,), daemon=True).start()
    ready.wait()
    {statement}

run_command(main)
"""


@pytest.fixture(autouse=True)
def no_end_of_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> NoReturn:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)


def exit_code(main: object) -> object:
    with pytest.raises(SystemExit) as caught:
        run_command(main, [])  # type: ignore[arg-type]
    return caught.value.code


def fail(error: BaseException) -> object:
    def main(argv: object) -> None:
        raise error

    return main


def test_did_you_mean_names_the_nearest_or_lists_all() -> None:
    known = ["zero_optimization", "optimizer"]
    assert did_you_mean("zero_optimisation", known) == " Did you mean 'zero_optimization'?"
    assert did_you_mean("xyz", ["beta", "alpha"]) == " Known: alpha, beta."
    assert did_you_mean("xyz", ["alpha"], listed=False) == did_you_mean("xyz", []) == ""


def test_exit_code_is_what_main_returns() -> None:
    assert [exit_code(lambda argv, code=code: code) for code in (None, 0, 3)] == [0, 0, 3]


def test_one_rank_of_a_node_reports_user_errors(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for local_rank, printed in (("0", "error: a\nerror: b\n"), ("1", "")):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        assert exit_code(fail(UserError("a", "b"))) == 2
        assert capsys.readouterr().err == printed
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert exit_code(fail(UserError("Caught UserError in DataLoader worker process 0."))) == 2
    assert "DataLoader worker" in capsys.readouterr().err


def test_only_a_crash_has_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # torch's puts the rank before
    assert exit_code(fail(FloatingPointError("it"))) == 1
    assert capsys.readouterr().err == "error: it\n"
    assert exit_code(fail(ZeroDivisionError("it"))) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("Traceback") and printed.endswith("ZeroDivisionError: it\n")


FATES = {
    "print('printed')": 0,
    "print('printed'); sys.exit(2)": 2,
    "print('printed'); raise MemoryError": 1,
    "print('printed'); raise KeyboardInterrupt": 130,
}


@pytest.mark.parametrize("streams", ["", "<&- >&- 2>&-"])
@pytest.mark.parametrize("statement", FATES)
def test_no_child_process_keeps_a_command(statement: str, streams: str) -> None:
    """With its streams or without them."""
    command = ["bash", "-c", f'exec "$0" -c "$1" {streams}', sys.executable]
    done = completed([*command, COMMAND.format(statement=statement)], cwd=REPOSITORY, timeout=LIMIT)
    printed = "" if streams else "printed\n"
    assert (done.returncode, done.stdout) == (FATES[statement], printed), done.stderr
