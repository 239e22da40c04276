"""The runs of test_ranks.py: on two ranks all cases in one launch, and alone with as many micro-batches."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from finetune.run import run
from finetune.settings import FinetuneSettings
from multicls.distributed import leave_deepspeed
from multicls.ds_config import load_ds_config
from tests.finetune.heads.test_isobn import normalise_on_rank
from tests.finetune.train.test_snapshots import Killed, assert_same, train

CASES: dict[str, tuple[str, dict[str, object]]] = {  # name -> DeepSpeed file, settings
    "no config": ("", {}),
    "zero0": ("zero0", {}),
    "zero1": ("zero1", {}),
    "zero2": ("zero2", {"selection": "holdout"}),
    "zero3": ("zero3", {"save_model": True}),
    "accumulated": ("zero2", {"train": {"micro_batch_size": 1}}),
    "isobn": ("zero0", {"head": "isobn", "train_size": 16}),  # its statistics are of whole batches
    "cln": ("zero1", {"head": "cln", "task": "sst2,stsb"}),
}


def settings_of(name: str, model: str, data_dir: str, output_dir: str, several: bool) -> FinetuneSettings:
    """17 rows and batches of 4: the last batch of an epoch has fewer rows than there are ranks."""
    file, changes = CASES[name]
    values = {"model": model, "data_dir": data_dir, "output_dir": output_dir, "task": "sst2", "head": "cls"}
    values |= {"train_size": 17, "max_length": 24}  # type: ignore[dict-item]
    train = {"max_steps": 10, "eval_every": 5, "learning_rate": 3e-3}
    if name == "isobn":
        values["model"] += "_without_dropout"
        train["micro_batch_size"] = 4
    if several and file:
        values["config"] = f"ds_configs/{file}.json"
    elif not several and name != "isobn":
        train["micro_batch_size"] = 2
    extra = changes.get("train", {})
    assert isinstance(extra, dict)
    return FinetuneSettings.model_validate({**values, **changes, "train": {**train, **extra}})


def resume(model: str, folder: Path, file: str) -> None:
    """A run that ends at its fourth evaluation goes on with the same numbers under a ZeRO stage."""
    ds_config = (file, load_ds_config(file))
    folder /= Path(file).stem
    expected = train(Path(model), None, steps=10, ds_config=ds_config)
    try:
        train(Path(model), folder, kill_at=4, steps=10, ds_config=ds_config)
    except Killed:
        print(f"{file} ended on rank {os.environ['RANK']}", flush=True)
    assert [path.name for path in folder.glob("step_*")] == ["step_6"], "old steps are removed"
    assert_same(train(Path(model), folder, steps=10, ds_config=ds_config), expected)
    print(f"{file} resumed on rank {os.environ['RANK']}", flush=True)


if __name__ == "__main__":
    model, data_dir, output_dir = sys.argv[1:]
    for name in CASES:
        run(settings_of(name, model, data_dir, f"{output_dir}/{name}", several=True))
        assert run(settings_of(name, model, data_dir, f"{output_dir}/{name}", several=True)), "already finished"
        print(f"{name} done on rank {os.environ['RANK']}", flush=True)
    normalise_on_rank(int(os.environ["RANK"]), Path(output_dir))
    for stage in (0, 2, 3):  # stages 1 and 2 are one optimizer
        resume(model, Path(output_dir) / "snapshots", f"ds_configs/zero{stage}.json")
    leave_deepspeed()
