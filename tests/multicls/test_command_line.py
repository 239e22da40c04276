"""Flags made from settings: every mistake is told, once, with what was meant; every command of the project."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, PositiveInt

from data_prep.settings import ShowOptions
from multicls.command_line import CommandLine, RecipeOptions, curves_line, print_summary
from multicls.errors import UserError
from multicls.files import REPOSITORY
from multicls.settings import Settings, load_settings

DOC = """Does it.

python x.py --steps 3
deepspeed x.py

With care.
"""


class Train(Settings):
    steps: PositiveInt = Field(default=10, description="updates")
    learning_rate: float = Field(default=2e-5, gt=0, description="peak, 100 % of it")
    precision: Literal["auto", "bf16"] = Field(default="auto", description="numbers")
    size: PositiveInt | Literal["auto"] = Field(default="auto", description="rows")


class Job(Settings):
    train: Train = Train()
    corpus: str = Field(description="a folder; of text")
    weight_decay: float = 0.0


class Options(RecipeOptions):
    folder: str = Field(description="a place")
    names: list[str] = Field(default=[], description="some")
    pair: tuple[str, str] | None = Field(default=None, description="two")
    jobs: Annotated[int, Field(ge=1)] = Field(default=1, description="processes")
    fast: bool = Field(default=False, description="quickly")
    hidden: int | None = None


TRAINING = {"steps": "train.steps", "learning_rate": "train.learning_rate", "size": "train.size"}
GROUPS: dict[str, Any] = {"data": ["corpus"], "training": TRAINING}
COMMAND = CommandLine("x.py", DOC, Options, positional=("folder",), groups=GROUPS, settings=Job)
COMMANDS = {
    **{f"pretrain.{name}": "COMMAND" for name in ("run", "export", "report")},
    **{f"finetune.{name}": "COMMAND" for name in ("run", "grid", "report", "predict", "submit", "analyze")},
    "multicls.convert": "COMMAND",
}


def parse(*argv: str) -> tuple[Options, Job]:
    return COMMAND.parse_with(
        argv, lambda options, flags: load_settings(Job, (), options.set, flags, COMMAND.names)
    )  # fmt: skip


def problems(*argv: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        parse(*argv)
    return list(caught.value.problems)


def test_values_get_their_types() -> None:
    words = "place --corpus c --steps 7 --names a b --names c --pair x y --fast --size=3 --hidden 4"
    options, job = parse(*words.split(), "--set", "weight_decay=-0.5")
    assert options.model_dump(exclude={"recipe", "set", "print_config", "local_rank"}) == {
        "folder": "place", "names": ["a", "b", "c"], "pair": ("x", "y"), "jobs": 1, "fast": True, "hidden": 4,
    }  # fmt: skip
    assert (job.corpus, job.train.steps, job.train.size, job.weight_decay) == ("c", 7, 3, -0.5)
    assert job.train.learning_rate == 2e-5, "not given"


def test_hyphens_and_negative_numbers() -> None:
    assert parse("p", "--corpus=c", "--learning-rate", "1e-3")[1].train.learning_rate == 1e-3
    for word in ("-1e-4", "-.5", "-inf"):
        (problem,) = problems("p", "--corpus=c", "--learning-rate", word)
        assert problem.startswith(f"--learning_rate {word}: must be ")


def test_a_negative_number_after_a_place_that_is_called_like_a_flag() -> None:
    command = CommandLine("show", "", ShowOptions, positional=("corpus", "row"))
    assert command.parse(["corpus", "-1"]).row == -1


def test_all_mistakes_at_once() -> None:
    found = problems("--jobs", "0", "--steps", "x", "--size", "y", "--foo=1", "--set", "train.precision=bf17")
    assert found == [
        "--foo: no such flag. --help lists all flags.",
        "FOLDER: missing; give a place.",
        "--jobs 0: must be at least 1.",
    ], "the settings cannot be read without the options that are required"
    assert problems("p", *("--jobs", "0", "--steps", "x", "--size", "y", "--set", "train.precision=bf17")) == [
        "--jobs 0: must be at least 1.",
        "--steps x: must be a whole number.",
        "--set: train.precision = 'bf17': must be 'auto' or 'bf16'. Did you mean 'bf16'?",
        "--size y: must be a whole number or 'auto'.",
        "--corpus: missing; give a folder.",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lerning_rate", "1"], "--lerning_rate: no such flag. Did you mean '--learning_rate 1'?"),
        (["--learning", "1"], "--learning: no such flag. Did you mean '--learning_rate 1'?"),
        (["--lr=3"], "--lr: no such flag. Did you mean '--learning_rate 3'?"),
        (["--max-steps", "5"], "--max-steps: no such flag. Did you mean '--steps 5'?"),
        (["--bf16"], "--bf16: no such flag. Did you mean '--set train.precision=bf16'?"),
        (["--weight-decay", "0.1"], "--weight-decay: no such flag. Did you mean '--set weight_decay=0.1'?"),
        (["--train.precision", "bf16"], "--train.precision: no such flag. Did you mean '--set train.precision=bf16'?"),
        (["--train", "x"], "--train: no such flag. --help lists all flags."),
        (
            ["--num_gpus", "4"],
            "--num_gpus: no such flag. It is an option of the launcher: deepspeed --num_gpus 4 x.py ...",
        ),
        (["--zzz"], "--zzz: no such flag. --help lists all flags."),
        (["stray"], "stray: not expected here; flags begin with --, and --help lists them."),
    ],
)
def test_unknown_words_tell_what_was_meant(words: list[str], message: str) -> None:
    assert problems("p", "--corpus", "c", *words) == [message]


def test_a_flag_without_its_value() -> None:
    assert problems("p", "--corpus") == ["--corpus: give a value after it. --help lists all flags."]
    assert problems("p", "--pair", "x") == ["--pair: give 2 values after it. --help lists all flags."]
    assert problems("p", "--fast=yes") == ["--fast: takes no value. --help lists all flags."]


def test_help_has_groups_defaults_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse("--help")
    text = capsys.readouterr().out
    assert left.value.code == 0 and "hidden" not in text and "local_rank" not in text
    assert text.startswith("usage: x.py FOLDER [options]\n\nDoes it.\n\nWith care.\n\ncommon:\n")
    assert text.endswith("examples:\n  python x.py --steps 3\n  deepspeed x.py\n")
    assert "\ntraining:\n" in text and "(default: 2e-05)" in text and "100 % of it" in text and "--size N|auto" in text


def test_recipes_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from finetune.run import COMMAND as FINETUNE
    from pretrain.run import COMMAND as PRETRAIN

    def recipes(command: CommandLine[Any], *names: str) -> list[str]:
        found: list[str] = command.parse([word for name in names for word in ("--recipe", name)]).recipe
        return found

    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("train: {steps: 1}")
    given = ["base", "large.yaml", "pretrain/recipes/k1.yaml", "mine.yaml"]
    shipped = [f"pretrain/recipes/{name}.yaml" for name in ("base", "large", "k1")]
    assert recipes(PRETRAIN, *given) == [*shipped, "mine.yaml"]
    for command, name, message in (
        (
            PRETRAIN,
            "bas",
            "--recipe bas: no such recipe. Did you mean 'base'? Recipes by name:\n  base              Multi",
        ),
        (PRETRAIN, "ds_configs/zero2.json", "give the JSON of DeepSpeed with --config"),
        (PRETRAIN, "pretrain/recipes", "no such recipe"),
        (FINETUNE, "quick", "--recipe quick: this recipe is for finetune/grid.py."),
    ):
        with pytest.raises(UserError) as caught:
            recipes(command, name)
        assert message in str(caught.value)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_visible_flag_of_a_command_has_words(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = importlib.import_module(name).COMMAND
    with pytest.raises(SystemExit):
        command.parse(["--help"])
    text = capsys.readouterr().out
    assert "examples:" in text and all(len(line) <= 120 for line in text.splitlines())
    assert {flag for flag in command.flags if f"--{flag}" not in text and flag.upper() not in text} <= {
        "local_rank",
        "since",
    }


@pytest.mark.parametrize("file", [f"{name.replace('.', '/')}.py" for name in COMMANDS] + ["data_prep/run.py"])
def test_help_imports_no_framework(file: str) -> None:
    code = f"import sys, runpy; sys.argv = [{file!r}, '--help']\ntry: runpy.run_path({file!r}, run_name='__main__')\n"
    code += "except SystemExit: print({'torch', 'transformers', 'deepspeed', 'datasets', 'pandas'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert done.stdout.endswith("\nset()\n")


def test_curves_are_shown_where_there_are_any(tmp_path: Path) -> None:
    run = tmp_path / "my run"
    assert curves_line(run) == []
    (run / "tb").mkdir(parents=True)
    assert curves_line(run) == [("curves", f"tensorboard --logdir '{run / 'tb'}'")]


def test_a_summary_is_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary([("model", Path("a/b")), ("best score", 3)], "python x.py")
    assert capsys.readouterr().out == "model:      a/b\nbest score: 3\nnext:       python x.py\n"
