from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from multicls.ds_config import OWNED, REFUSED, SCHEMA, check_with_deepspeed, load_ds_config, resolve_ds_config
from multicls.errors import UserError
from multicls.files import REPOSITORY

SHIPPED = sorted((REPOSITORY / "ds_configs").glob("*.json"))
OURS: dict[str, Any] = {
    "where": "x.json",
    "micro_batch_size": 3,
    "accumulation": 2,
    "world_size": 4,
    "gradient_clipping": 0.5,
    "precision": "bf16",
}
ONE_RANK = OURS | {"world_size": 1}


def problems(config: dict[str, Any], **ours: Any) -> list[str]:
    with pytest.raises(UserError) as caught:
        resolve_ds_config(config, **(OURS | ours))
    return list(caught.value.problems)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_files_resolve_completely(path: Path) -> None:
    resolved = resolve_ds_config(load_ds_config(path), **OURS)
    assert '"auto"' not in json.dumps(resolved)
    stage, *offload = path.stem.removeprefix("zero").split("_")
    assert resolved["zero_optimization"]["stage"] == int(stage)
    assert ("offload_optimizer" in resolved["zero_optimization"]) == (offload == ["offload"])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_files_serve_every_precision(path: Path, precision: str) -> None:
    """Shows that fp16 and bf16 need no files of their own: DeepSpeed's own loss scaling is dynamic."""
    from deepspeed.runtime.config import DeepSpeedConfig

    theirs = DeepSpeedConfig(
        resolve_ds_config(load_ds_config(path), **(OURS | {"world_size": 1, "precision": precision}))
    )
    assert (theirs.float16_config.enabled, theirs.bfloat16_config.enabled) == (precision == "fp16", precision == "bf16")
    if precision == "fp16":
        scaling = theirs.float16_config.dynamic_loss_scale_args()
        assert theirs.float16_config.loss_scale == 0 and scaling["init_scale"] == 2**16 and scaling["min_scale"] == 1
    if "offload" in path.stem:
        assert theirs.zero_config.offload_optimizer.device == "cpu"


def test_auto_becomes_our_values() -> None:
    resolved = resolve_ds_config(
        {**dict.fromkeys(("train_batch_size", "gradient_clipping"), "auto"), "bf16": {"enabled": "auto"}}, **OURS
    )
    assert resolved["train_batch_size"] == 24
    assert resolved["train_micro_batch_size_per_gpu"] == 3
    assert resolved["gradient_accumulation_steps"] == 2
    assert resolved["gradient_clipping"] == 0.5
    assert resolved["bf16"] == {"enabled": True}
    assert resolved["fp16"] == {"enabled": False}


def test_values_left_out_equal_or_null_do_as_well() -> None:
    auto = resolve_ds_config({}, **OURS)
    equal = {"train_batch_size": 24, "gradient_clipping": 0.5, "bf16": {"enabled": True}, "fp16": None}
    assert resolve_ds_config(equal, **OURS) == auto


def test_the_given_dict_stays_as_it_is() -> None:
    config = load_ds_config("ds_configs/zero2.json")
    before = json.dumps(config)
    resolve_ds_config(config, **OURS)
    assert json.dumps(config) == before


def test_every_problem_is_told_at_once_with_file_key_and_value() -> None:
    found = problems(
        {
            "zero_optimisation": {"stage": 2},
            "zero_optimization": {"stage": "2", "reduce_bucket_size": "auto", "offload_param": {"max_in_cpu": "auto"}},
            "aio": {"block_sise": 1},
            "train_batch_size": 64,
            "bf16": {"enabled": False},
            "fp16": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
            "stage": 2,
        }
    )
    for beginning, hint in [
        ("zero_optimisation: no such key.", "Did you mean 'zero_optimization'?"),
        ('zero_optimization.stage = "2": give', "0 or 1 or 2 or 3"),
        ('zero_optimization.reduce_bucket_size = "auto": no setting fills this in', "take it out"),
        ('zero_optimization.offload_param.max_in_cpu = "auto": no setting fills this in', "take it out"),
        ("aio.block_sise: no such key.", "Did you mean 'block_size'?"),
        ("train_batch_size = 64: conflicts with our settings", "24 (3 examples x 2 accumulation x 4 ranks)"),
        ("bf16.enabled = false: conflicts with our settings", "train.precision"),
        ("fp16 = 1: this is a group", "{...}"),
        ("optimizer: take it out and set", "train.learning_rate"),
        ("stage: no such key.", "Did you mean 'zero_optimization.stage'?"),
    ]:
        matching = [problem for problem in found if problem.startswith(f"x.json: {beginning}")]
        assert len(matching) == 1, (beginning, found)
        assert hint in matching[0]
    assert len(found) == 10


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero_optimization": {"stage": True}}, "stage = true: give 0 or"),
        ({"zero_optimization": {"stage": 4}}, "stage = 4: give 0 or"),
        ({"zero_optimization": {"stage": "auto"}}, 'stage = "auto"'),
        ({"zero_optimization": True}, "this is a group"),
        ({"timers": {"throughput": True}}, "this is a group"),
        ({"timers": {"throuhgput": {}}}, "Did you mean 'throughput'?"),
        ({"prescale_gradients": "true"}, "give true or false"),
        ({"prescale_gradients": {"enabled": True}}, "give true or false"),
        ({"aio": {"queue_depth": 1.5}}, "give a whole number"),
        ({"steps_per_print": float("inf")}, "give a whole number"),
        ({"data_types": {"keep_in_fp32_modules": "norm"}}, "give a list"),
        ({"compile": {"deepcompile": True}}, "compile: take it out and set train.compile."),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "from stage 3 up"),
        ({"train_batch_size": True}, "give a whole number"),
        ({"gradient_clipping": "0.5"}, "give a number"),
        ({"gradient_clipping": 1.0}, "train.max_grad_norm"),
        ({"gradient_accumulation_steps": 4}, "train.global_batch_size or train.micro_batch_size"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "fp16.enabled = true: conflicts with our settings"),
        ({"bf16": {"enabled": True, "check_grad_overflow": False}}, "bf16.check_grad_overflow: "),
        ({"scheduler": {"type": "WarmupLR"}}, "train.warmup_ratio"),
        ({"checkpoint": {"tag_validation": "warn"}}, 'give "Ignore" or "Warn" or "Fail"'),
    ],
)
def test_problem(config: dict[str, Any], message: str) -> None:
    assert any(message in problem for problem in problems(config))


def test_whole_numbers_written_as_floats_are_taken() -> None:
    assert resolve_ds_config({"aio": {"block_size": 1e6}}, **OURS)
    check_with_deepspeed(
        resolve_ds_config({"zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8}}, **ONE_RANK), "x.json"
    )


def test_precision_not_known_yet_is_not_checked() -> None:
    """A launch can be refused before a GPU is looked for."""
    config = {"bf16": {"enabled": True}}
    resolve_ds_config(config, **(OURS | {"precision": None}))
    assert problems(config, precision="fp32")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,}', "not valid JSON"),
        ('{"train_batch_size": 1, "train_batch_size": 2}', "given twice"),
        ("[]", "is an object"),
        ('{"//": 3}', "a text or a list of texts"),
        ('{"bf16": {"//": ["a", {}]}}', "a text or a list of texts"),
        ('{"a": "\xff"}', "not valid JSON"),
    ],
)
def test_bad_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "ds.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=rf"ds\.json: .*{message}"):
        load_ds_config(path)


def test_comments_are_dropped_at_every_level(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"//": "why", "zero_optimization": {"//": ["because", "so"], "stage": 1, "//": ""}, "///": 2}')
    config = load_ds_config(path)
    assert config == {"zero_optimization": {"stage": 1}, "///": 2}
    assert "///: no such key." in problems(config)[0]


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Did you mean 'ds_configs/zero2\.json'"):
        load_ds_config("ds_configs/zero_2.json")
    with pytest.raises(UserError, match="this is a folder"):
        load_ds_config(tmp_path)


class Asked(dict[str, Any]):
    """A dict that notes the keys that it is asked for; copies note in the same place."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.names: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.names.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.names.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        return self


def test_top_level_keys_are_those_deepspeed_reads() -> None:
    from deepspeed.runtime import config as deepspeed_config

    asked = Asked({"train_batch_size": 1})
    deepspeed_config.DeepSpeedConfig(asked)
    removed = set(getattr(deepspeed_config, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", {}))
    known = SCHEMA.keys() | {name for name in REFUSED if "." not in name}
    assert asked.names - removed - known == set(), "DeepSpeed reads keys that ds_config.py does not know"
    assert SCHEMA.keys() - asked.names == set(), "ds_config.py lets keys through that DeepSpeed does not read"


def test_keys_of_unchecked_groups_are_those_deepspeed_reads() -> None:
    """The groups that DeepSpeed reads key by key, so that it does not notice a misspelt one."""
    from deepspeed.runtime import config as deepspeed_config

    groups = ("aio", "activation_checkpointing", "flops_profiler", "checkpoint", "data_types")
    asked = {name: Asked({"use_gds": False}) for name in groups}
    deepspeed_config.DeepSpeedConfig({"train_batch_size": 1, **asked})
    for name in groups:
        refused = {key.rpartition(".")[2] for key in REFUSED if key.startswith(f"{name}.")}
        assert asked[name].names == SCHEMA[name].keys() | refused, name


def refused(config: dict[str, Any]) -> list[str]:
    with pytest.raises(UserError) as caught:
        check_with_deepspeed(resolve_ds_config(config, **ONE_RANK), "x.json")
    return list(caught.value.problems)


def test_deepspeed_checks_its_own_groups() -> None:
    found = refused(
        {
            "zero_optimization": {
                "stage": 2,
                "overlap_com": True,
                "reduce_bucket_size": 1.5,
                "offload_optimizer": {"devcie": "cpu"},
            },
            "bf16": {"enable": True},
            "comms_logger": {"prof_ops": 3},
            "timers": {"throughput": {"enabled": "perhaps"}},
        }
    )
    for beginning, hint in [
        ("zero_optimization.overlap_com: no such key.", "Did you mean 'overlap_comm'?"),
        ("zero_optimization.reduce_bucket_size = 1.5: ", "valid integer"),
        ("zero_optimization.offload_optimizer.devcie: no such key.", "Did you mean 'device'?"),
        ("bf16.enable: no such key.", "Did you mean 'enabled'?"),
        ("comms_logger.prof_ops = 3: ", "valid list"),
        ('timers.throughput.enabled = "perhaps": ', "valid boolean"),
    ]:
        matching = [problem for problem in found if problem.startswith(f"x.json: {beginning}")]
        assert len(matching) == 1, (beginning, found)
        assert hint in matching[0]
    assert len(found) == 6


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
            "x.json: zero_optimization: Partial offloading only supported for ZeRO Stage 3.",
        ),
        ({"bf16": {"bf16_optimizer_states": True}}, "x.json: DeepSpeed refuses it: bf16_optimizer_states is only"),
        (
            {"zero_optimization": {"stage": 1, "quite_another_name": 1}},
            "x.json: zero_optimization.quite_another_name: no such key. See https://www.deepspeed.ai/",
        ),
    ],
)
def test_deepspeed_checks_what_goes_together(config: dict[str, Any], message: str) -> None:
    (problem,) = refused(config)
    assert problem.startswith(message)


def test_keys_of_deepspeed_need_no_list_of_ours() -> None:
    """A key that DeepSpeed's own models know passes, also one that a later DeepSpeed adds."""
    config = {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 10, "zero_hpz_partition_size": 1}}
    check_with_deepspeed(resolve_ds_config(config, **ONE_RANK), "x.json")


def test_the_throughput_timer_is_off_unless_the_json_asks_for_it() -> None:
    def timer(config: dict[str, Any]) -> Any:
        return resolve_ds_config(config, **OURS)["timers"]["throughput"]

    assert timer({}) == timer({"timers": {}}) == {"enabled": False}
    assert timer({"timers": {"throughput": {"synchronized": False}}}) == {"synchronized": False, "enabled": False}
    assert timer({"timers": {"throughput": {"enabled": True}}}) == {"enabled": True}


def test_messages_name_the_settings_of_the_caller() -> None:
    owners = {**OWNED, "gradient_clipping": "train.clip"}
    assert "or change train.clip." in problems({"gradient_clipping": 1.0}, owners=owners)[0]


def test_deepspeed_takes_what_we_make_of_it() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    ours = OURS | {"world_size": 1}
    theirs = DeepSpeedConfig(resolve_ds_config(load_ds_config("ds_configs/zero2.json"), **ours))
    assert (theirs.train_batch_size, theirs.gradient_accumulation_steps, theirs.gradient_clipping) == (6, 2, 0.5)
    assert theirs.bfloat16_config.enabled
    assert not theirs.float16_config.enabled
    assert theirs.zero_optimization_stage == 2


def test_owned_keys_are_in_the_schema() -> None:
    for name in OWNED:
        group, _, key = name.rpartition(".")
        assert key in (SCHEMA[group] if group else SCHEMA)


def test_shipped_files_pass_deepspeed() -> None:
    for path in SHIPPED:
        check_with_deepspeed(resolve_ds_config(load_ds_config(path), **ONE_RANK), path.name)
