from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field, ValidationError, model_validator

from multicls.errors import UserError
from multicls.settings import Settings, known_keys, load_settings, to_yaml


class Train(Settings):
    steps: int = Field(10, gt=0)
    learning_rate: float = 1e-3
    fancy: bool = False


class Job(Settings):
    data: str
    train: Train = Train()
    layers: list[int] | None = None

    @model_validator(mode="after")
    def _not_too_long(self) -> Job:
        if self.train.steps > 1000:
            raise ValueError("more than 1000 steps")
        return self


def recipe(tmp_path: Path, text: str, name: str = "r.yaml") -> Path:
    (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path / name


def problems(*args: object, **kwargs: object) -> list[str]:
    with pytest.raises(UserError) as caught:
        load_settings(Job, *args, **kwargs)  # type: ignore[arg-type]
    return list(caught.value.problems)


def test_precedence_defaults_recipes_assignments_flags(tmp_path: Path) -> None:
    first = recipe(tmp_path, "data: a\ntrain: {steps: 1, learning_rate: 0.1}")
    second = recipe(tmp_path, "train: {steps: 2}", "s.yaml")
    job = load_settings(
        Job, [first, second], ["train.learning_rate=0.2", "layers=[1, 2]"], {"train.steps": 3, "data": None}
    )
    assert (job.data, job.train.steps, job.train.learning_rate, job.layers) == ("a", 3, 0.2, [1, 2])
    assert job.train.fancy is False


def test_a_dot_divides_groups_but_no_names(tmp_path: Path) -> None:
    """The names of sources and models are often those of files."""

    class Weighted(Job):
        weights: dict[str, float]

    job = load_settings(Weighted, [recipe(tmp_path, "data: a\nweights: {wiki.en: 2}\ntrain.steps: 3")])
    assert (job.weights, job.train.steps) == ({"wiki.en": 2}, 3)


def test_false_can_be_set() -> None:
    """`type=bool` flags take "False" for true; YAML values do not."""
    assert load_settings(Job, assignments=["data=a", "train.fancy=false"]).train.fancy is False


def test_all_problems_are_told_at_once_with_their_sources(tmp_path: Path) -> None:
    path = recipe(tmp_path, "data: a\ntrain: {stpes: 5, learning_rate: high}")
    found = problems([path], ["no_equals_sign", "train.fancy=[", "train.lr=1"], {"train.steps": 0})
    text = "\n".join(found)
    assert len(found) == 6
    assert f"{path}: train.stpes: no such setting. Did you mean 'train.steps'?" in text
    assert f"{path}: train.learning_rate = 'high'" in text
    assert "--steps: train.steps = 0: must be greater than 0." in text
    assert "--set no_equals_sign: write it as key=value" in text
    assert "--set train.fancy=[: the value is not valid YAML" in text
    assert "--set: train.lr: no such setting" in text


def test_key_in_the_wrong_group_is_named_with_the_right_one() -> None:
    assert "Did you mean 'train.steps'?" in problems(assignments=["data=a", "steps=3"])[0]


def test_missing_setting_tells_how_to_give_it() -> None:
    assert "--set data=" in problems()[0]


def test_rule_over_several_settings_is_told() -> None:
    assert "more than 1000 steps" in problems(assignments=["data=a", "train.steps=2000"])[0]


def test_not_a_number_is_refused() -> None:
    assert "learning_rate" in problems(assignments=["data=a", "train.learning_rate=.nan"])[0]


@pytest.mark.parametrize("text", ["- a\n- b\n", "just text"])
def test_recipe_that_is_no_mapping(tmp_path: Path, text: str) -> None:
    assert "a recipe is a mapping" in problems([recipe(tmp_path, text)])[0]


def test_recipe_that_is_no_yaml(tmp_path: Path) -> None:
    assert "not valid YAML" in problems([recipe(tmp_path, "a: [1")])[0]


def test_missing_recipe(tmp_path: Path) -> None:
    assert "no such file" in problems([tmp_path / "none.yaml"])[0]


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError):
        load_settings(Job, assignments=["data=a"]).data = "b"  # type: ignore[misc]


def test_yaml_round_trip(tmp_path: Path) -> None:
    job = load_settings(Job, assignments=["data='é: #1'", "layers=[3]", "train.learning_rate=2e-5"])
    assert load_settings(Job, [recipe(tmp_path, to_yaml(job))]) == job


def test_known_keys_has_groups_and_their_settings() -> None:
    assert known_keys(Job) == ["data", "train", "train.steps", "train.learning_rate", "train.fancy", "layers"]
