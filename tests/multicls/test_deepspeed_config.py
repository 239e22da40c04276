"""The DeepSpeed JSON: what our settings own, what is refused, and what DeepSpeed itself checks."""

import json
from pathlib import Path
from typing import Any

import pytest

from multicls.deepspeed_config import (
    OWNED,
    check_with_deepspeed,
    complete_deepspeed_config,
    load_deepspeed_config,
)
from multicls.errors import UserError
from multicls.files import REPOSITORY

SHIPPED = sorted((REPOSITORY / "ds_configs").glob("*.json"))


def complete(config: dict[str, Any], **ours: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = {"micro_batch_size": 3, "accumulation": 2, "world_size": 4}
    return complete_deepspeed_config(
        config, **(sizes | {"max_grad_norm": 0.5, "precision": "bf16"} | ours)
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_files_serve_every_precision(path: Path, precision: str) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    completed = complete(load_deepspeed_config(path), world_size=1, precision=precision)
    assert '"auto"' not in json.dumps(completed)
    check_with_deepspeed(completed, "x.json")
    theirs = DeepSpeedConfig(completed)
    assert theirs.float16_config.enabled == (precision == "fp16")
    assert theirs.bfloat16_config.enabled == (precision == "bf16")
    sums_in_fp32 = precision == "bf16" and path.stem in ("zero2", "zero3")
    assert theirs.grad_accum_dtype == ("fp32" if sums_in_fp32 else None)
    assert theirs.zero_config.stage == int(path.stem.removeprefix("zero"))
    assert not theirs.timers_config.enabled and not theirs.zero_config.overlap_comm
    assert complete(load_deepspeed_config(path))["zero_optimization"]["overlap_comm"]


def test_auto_and_missing_values_become_ours() -> None:
    config = {"train_batch_size": "auto", "bf16": {"enabled": "auto"}}
    completed = complete(config)
    assert config == {"train_batch_size": "auto", "bf16": {"enabled": "auto"}}, "a copy"
    assert completed["train_batch_size"] == 24 and completed["gradient_accumulation_steps"] == 2
    assert completed["train_micro_batch_size_per_gpu"] == 3
    assert completed["gradient_clipping"] == 0.5
    assert (completed["bf16"], completed["fp16"]) == ({"enabled": True}, {"enabled": False})
    assert completed == complete({})
    theirs = {"zero_optimization": {"stage": 2}, "data_types": {"grad_accum_dtype": "bf16"}}
    assert complete(theirs)["data_types"] == theirs["data_types"], "a type in the file stays"


@pytest.mark.parametrize(
    ("offload", "sums"),
    [(None, True), ({}, True), ({"device": "none"}, True), ({"device": "cpu"}, False)],
)
def test_gradients_are_summed_in_fp32_unless_the_optimizer_is_offloaded(
    offload: Any, sums: bool
) -> None:
    zero = {"stage": 2, "offload_optimizer": offload}
    assert ("data_types" in complete({"zero_optimization": zero})) == sums


def test_values_of_our_settings_are_refused_with_the_setting(tmp_path: Path) -> None:
    values = dict.fromkeys((name for name in OWNED if "." not in name), 7)
    path = tmp_path / "x.json"
    path.write_text(json.dumps(values | {"bf16": {"enabled": False}, "fp16": {"enabled": 1}}))
    with pytest.raises(UserError) as caught:
        load_deepspeed_config(path)
    assert len(caught.value.problems) == len(OWNED)
    for name, problem in zip(sorted(OWNED), caught.value.problems, strict=True):
        assert problem.startswith(f"{path}: {name} = ") and OWNED[name] in problem


BAD = {
    '{"zero_optimisation": {"stage": 2}}': "Did you mean 'zero_optimization'?",
    '{"tensorboard": {}}': "tensorboard: ",
    '{"prescale_gradients": true}': "prescale_gradients: no key that works here",
    '{"bf16": 1,}': "not valid JSON",
    "[]": "is an object",
    '{"bf16": "auto"}': "bf16 = auto: must be an object",
    '{"optimizer": "auto", "scheduler": null}': "set train.learning_rate and train.warmup_ratio",
    '{"data_types": null}': "data_types = None: must be an object",
    '{"zero_optimization": {"stage": 2, "overlap_com": true}}': "overlap_com",
    '{"zero_optimization": {"stage": 4}}': "stage",
    '{"zero_optimization": {"stage": "2"}}': "stage = '2': must be a number",
    '{"zero_optimization": {"stage": true}}': "stage = True: must be a number",
    '{"zero_optimization": {"offload_optimizer": {"devcie": "cpu"}}}': "devcie",
    '{"bf16": {"enable": true}}': "enable",
    '{"data_types": {"grad_accum_dtype": "fp23"}}': "fp23",
    '{"bf16": {"check_grad_overflow": false}}': "a loss that is not finite would ruin the weights",
    '{"zero_optimization": {"compute_grad_norm": false}}': "compute_grad_norm = false: a loss",
    '{"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}}': "with ZeRO 1",
}


@pytest.mark.parametrize("text", BAD)
def test_bad_files(tmp_path: Path, text: str) -> None:
    """Unknown names at the top are ours to refuse; DeepSpeed checks its own groups."""
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        check_with_deepspeed(complete(load_deepspeed_config(path), world_size=1), str(path))
    assert BAD[text] in str(caught.value) and "ds.json" in str(caught.value)


def test_shipped_files_are_found_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_deepspeed_config("ds_configs/zero2.json")["zero_optimization"]["stage"] == 2
    (tmp_path / "ds_configs").mkdir()
    (tmp_path / "ds_configs" / "zero2.json").write_text("{}")
    assert load_deepspeed_config("ds_configs/zero2.json") == {}, "the user's own comes first"
    with pytest.raises(UserError, match="zero_2.json: no such file"):
        load_deepspeed_config("ds_configs/zero_2.json")
