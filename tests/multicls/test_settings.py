"""Settings from defaults, recipes and flags: precedence, every mistake at once with its source, help without torch."""

from __future__ import annotations

import re
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import Field, PositiveInt, model_validator
from pydantic_settings import CliPositionalArg

from finetune.settings import RunSettings
from multicls.errors import UserError
from multicls.files import REPOSITORY
from multicls.settings import RecipeOptions, Settings, _known, load_settings, parse
from pretrain.settings import PretrainSettings
from tests.processes import answers_of

DOC = """Does it.

python x.py --steps 3
deepspeed x.py

With care.
"""


class Train(Settings):
    tokens: float = Field(2e9, ge=0, description="length in tokens")
    steps: int = Field(0, ge=0, description="length in updates")
    learning_rate: float = Field(2e-5, gt=0, description="peak, 100 % of it")
    size: PositiveInt | Literal["auto"] = Field("auto", description="examples")
    fancy: bool = Field(False, description="with colours")


class Job(RecipeOptions):
    """A job."""

    alternatives = ("train.tokens", "train.steps")

    folder: CliPositionalArg[str] = Field(description="a place")
    data: str = Field("none", description="text")
    files: tuple[str, ...] = Field((), description="files to read")
    train_file: str = Field("", description="rows to train on")
    layers: list[int] | None = Field(None, description="some layers")
    weights: dict[str, float] = Field({}, description="by name")
    status: bool = Field(False, exclude=True, description="print the state")
    train: Train = Train()

    @model_validator(mode="after")
    def _fits(self) -> Job:
        if self.train.steps > 1000 and self.data == "none":
            raise ValueError("more than 1000 steps need data")
        return self


def parsed(*argv: str) -> Job:
    shortcuts = {"train.steps": "steps", "train.learning_rate": "learning_rate"}
    shortcuts["train.fancy"] = "train"  # as a group is called
    return parse(Job, argv, prog="x.py", doc=DOC, shortcuts=shortcuts)


def problems(*argv: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        parsed(*argv)
    return list(caught.value.problems)


def recipe(folder: Path, text: str, name: str = "r.yaml") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def test_values_get_their_types() -> None:
    words = "place --steps 7 --files a b,c --files 7 --layers 1 2 --weights wiki.en=2 x=0.5 --status --train.size=3"
    job = parsed(*words.split(), "--train", "true", "--learning_rate", "1e-3")
    assert (job.folder, job.files, job.layers) == ("place", ("a", "b,c", "7"), [1, 2])
    assert (job.weights, job.status) == ({"wiki.en": 2.0, "x": 0.5}, True)
    assert (job.train.steps, job.train.size, job.train.fancy) == (7, 3, True)
    assert job.train.learning_rate == 1e-3 and job.data == "none"
    assert [parsed("p", "--layers", word).layers for word in ("null", "[]")] == [None, []]


def test_defaults_then_recipes_then_flags(tmp_path: Path) -> None:
    first = recipe(tmp_path, "data: a\nlayers: [9]\ntrain: {learning_rate: 0.1, size: 1}")
    second = recipe(tmp_path, "weights: {a: 1}\ntrain: {size: 2}", "s.yaml")
    job = parsed("p", "--recipe", first, second, "--learning_rate", "0.3", "--weights", "b=2")
    assert (job.data, job.layers, job.train.size, job.train.learning_rate) == ("a", [9], 2, 0.3)
    assert job.weights == {"a": 1.0, "b": 2.0}
    train = parsed("p", "--recipe", recipe(tmp_path, "train: {tokens: 5}"), "--steps", "4").train
    assert (train.tokens, train.steps) == (0, 4), "an alternative replaces the others"


def test_all_mistakes_at_once_with_their_sources(tmp_path: Path) -> None:
    path = recipe(tmp_path, "datta: a\ntrain: {stpes: 5, learning_rate: high}")
    found = problems(
        "p", "--recipe", path, *["--steps", "x", "--train.size", "y", "--layers", "1", "z"]
    )
    starts = [
        "--layers z: ",
        "--steps x: ",
        f"{path}: train.learning_rate = high: ",
        "--train.size y: ",
        f"{path}: train.stpes: no such setting. Did you mean 'train.steps'?",
        f"{path}: datta: no such setting. Did you mean 'data'?",
    ]
    for start in starts:
        assert sum(problem.startswith(start) for problem in found) == 1, (start, found)
    assert len(found) == len(starts)
    assert problems("p", "--train.size", "aut")[0].endswith("'auto'. Did you mean 'auto'?")
    assert "for weights: " in problems("p", "--weights", "wiki")[0]
    unknown = problems("p", "--foo=1", "--stpes", "3", "--train.size", "y")
    assert unknown[:2] == [
        "--foo: no such flag. --help_all lists all flags.",
        "--stpes: no such flag. Did you mean '--steps'?",
    ]
    assert unknown[2].startswith("--train.size y: ") and len(unknown) == 3


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--lerning_rate", "1"], "'--learning_rate'"),
        (["--size", "1"], "'--train.size'"),
        (["--validation_file", "1"], "--help"),  # never --train_file
        (["stray"], "stray"),
        (["--steps", "2000"], "more than 1000 steps need data"),
        (["--steps"], "--steps"),
        (["--train.learning_rate", "nan"], "--learning_rate nan"),
        (["--layers", "1.5"], "--layers 1.5"),
        (["--recipe", "none.yaml"], "no such recipe"),
    ],
)
def test_one_mistake_names_the_thing(words: list[str], named: str) -> None:
    (problem,) = problems("p", *words)
    assert named in problem


def test_recipes_that_are_no_mappings_of_groups(tmp_path: Path) -> None:
    for text in ("- a\n- b\n", "just text", "a: [1", "\0"):
        path = recipe(tmp_path, text)
        assert problems("p", "--recipe", path)[0].startswith(f"--recipe {path}: ")
    wrong = recipe(tmp_path, "train: 5")
    found = problems("x", "--recipe", wrong, "--steps", "3")
    assert any(f"{wrong}: train = 5" in line for line in found)
    assert parsed("x", "--recipe", recipe(tmp_path, "train:")).train.steps == 0, "an empty group"


def test_shipped_recipes_by_name() -> None:
    class Some(RecipeOptions):
        model: dict[str, Any] = Field({})
        objective: dict[str, Any] = Field({})

    def some(*names: str) -> Some:
        return parse(Some, ["--recipe", *names], prog="x.py", recipes="pretrain/recipes")

    assert some("k1").model["num_facets"] == 1
    with pytest.raises(UserError, match=r"Did you mean 'lambda0\d?'\?"):
        some("lamda0")


def test_print_config_is_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["p", "--data", "é: #1", "--layers", "3", "--learning_rate", "2e-7"]
    with pytest.raises(SystemExit) as left:
        parsed(*words, "--print_config", "--status")
    text = capsys.readouterr().out
    assert left.value.code == 0 and "status" not in text and "recipe" not in text
    assert load_settings(Job, [recipe(tmp_path, text)]) == parsed(*words)


def test_a_negative_value_after_a_blank_names_the_other_spelling() -> None:
    (problem,) = problems("p", "--learning_rate", "-1e-4")
    assert "expected one argument; a value that begins with - is written FLAG=VALUE." in problem


def test_help_has_groups_defaults_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parsed("--help")
    text = capsys.readouterr().out
    assert left.value.code == 0 and "local_rank" not in text and "train options" in text
    assert "--steps, --train.steps N" in text and "(default: 2e-05)" in text
    assert "100 % of it" in text and "python x.py --steps 3" in text
    assert "--weights NAME=VALUE ..." in text and "--train.size N|auto" in text and "[]" not in text


def help_of(kind: type[Settings], *words: str, capsys: Any, **options: Any) -> str:
    with pytest.raises(SystemExit):
        parse(kind, words, prog="x.py", **options)
    return str(capsys.readouterr().out)


def test_short_help_has_the_common_flags_in_their_groups(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pretraining's help fits a screen of 80 columns and describes each recipe."""
    monkeypatch.setenv("COLUMNS", "80")
    for name, kind in (("pretrain", PretrainSettings), ("finetune", RunSettings)):
        module = import_module(f"{name}.run")
        options = {"shortcuts": module.SHORTCUTS, "recipes": f"{name}/recipes", "capsys": capsys}
        options["doc"] = module.__doc__
        short = help_of(kind, "--help", common=module.HELP, **options)
        every = help_of(kind, "--help_all", common=module.HELP, **options)
        titles = re.findall("^([a-z]+):$", short, re.MULTILINE)
        assert titles == [*module.HELP, "recipes"]
        assert len(short.splitlines()) <= 45 < len(every.splitlines()), short
        assert "docs/settings.md" in short and "--train.weight_decay" not in short
        flags = {f"--{key}" for key in _known(kind) if "." in key and _known(kind)[key]}
        assert not [flag for flag in flags if flag not in every]
        assert not re.search(r"dict\[|\bstr\b|\bint\b|list\[", every)
    assert "  hire  " in short and "quick" not in every, "it is a recipe of grid.py"
    for path in REPOSITORY.glob("*/recipes/*.yaml"):
        line = path.read_text().splitlines()[0]
        assert re.match(r"# [^.?]{10,80}[.?]( |$)", line.replace("0.1", "")), path


COMMANDS = ["pretrain/run", "pretrain/export", "data_prep/run", "multicls/convert"]
FINETUNING = ("compare", "run", "grid", "report", "predict")
COMMANDS += [f"finetune/{name}" for name in FINETUNING]
QUICK = [*product(COMMANDS, [("--help", 0, ""), ("--no_such_flag", 2, "no such flag")])]
QUICK += [("pretrain/run", ("--status --output_dir nowhere", 3, "not begun"))]
QUICK += [("finetune/run", ("--model m --task rte --head x", 2, "no such head"))]


@pytest.fixture(scope="module")
def answers() -> list[str]:
    return answers_of([f"{command}.py", *words.split()] for command, (words, *_) in QUICK)


@pytest.mark.parametrize("number", range(len(QUICK)), ids=lambda number: QUICK[number][0])
def test_quick_answers_import_no_framework(answers: list[str], number: int) -> None:
    _, (_, code, text) = QUICK[number]
    assert answers[number].endswith(f"heavy: []\n{code}") and text in answers[number]
