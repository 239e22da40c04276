"""Settings of a pretraining run. The defaults are the paper's for BERT-base (arXiv:2210.05043)."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PositiveInt, field_validator, model_validator

from multicls.errors import UserError
from multicls.settings import Settings

RENAMED = {  # settings of earlier versions -> what replaces them
    "triples": "train.negatives_group (examples that are each other's negatives)",
    "micro_batches": "train.global_batch_size (examples of an optimizer step: the old triples x micro_batches)",
    "gradient_clipping": "train.max_grad_norm",
    "warmup_fraction": "train.warmup_ratio",
}
LENGTHS = ("tokens", "epochs", "steps")  # settings of `TrainSettings`: one of them tells how long the run is


class ModelSettings(Settings):
    """The model and the checkpoint that it starts from."""

    checkpoint: str = Field(description="the Hub id or folder of a BERT checkpoint, or 'sample'")
    random_weights: bool = Field(False, description="use only the checkpoint's shape and tokenizer")
    num_facets: int = Field(5, ge=0, description="K, the extra CLS tokens; 0: the plain single-CLS model")
    facet_layers: list[int] | None = Field(None, description="layers followed by inserted linears; []: none")
    mcqt_lambda: float = Field(0.1, ge=0, le=1, description="weight of the best facet pair in the MCQT score")
    hard_negatives: bool = Field(True, description="three-part examples; false: two parts")

    @property
    def num_parts(self) -> int:
        """P, the consecutive sequences of an example."""
        return 3 if self.hard_negatives else 2


class DataSettings(Settings):
    """The corpus and how it becomes examples."""

    corpus: str = Field(description="the folder written by data_prep/run.py, or 'sample'")
    seq_length: int = Field(128, ge=16, description="L, tokens of a sequence, special tokens included")
    mlm_probability: float = Field(0.15, gt=0, lt=1, description="share of text tokens to predict")
    source_weights: dict[str, Annotated[float, Field(ge=0)]] = Field(
        {}, description="how often an epoch shows a source's text; 1 for those not named, 0 leaves one out"
    )
    validation_fraction: float = Field(0.01, gt=0, lt=1, description="share of documents held out; at least one")
    num_workers: int = Field(1, ge=0, description="loader processes of each rank; numbers do not depend on it")
    local_copy: str | None = Field(
        None, description="folder on a disk of each node, which the corpus is copied to once; null: no copy"
    )
    warm_up: bool = Field(
        False, description="read all shards once on each node before the first step, for slow shared disks"
    )


class ObjectiveSettings(Settings):
    """Weights of the losses; a weight of 0 switches a loss off."""

    mlm: float = Field(1.0, ge=0, description="weight of the loss: masked tokens")
    tfidf: float = Field(1.0, ge=0, description="weight of the loss: TF-IDF of each token")
    so: float = Field(1.0, ge=0, description="weight of the loss: order of the two segments of a part")
    mcqt: float = Field(1.0, ge=0, description="weight of the loss: which part follows which")

    @model_validator(mode="after")
    def _something_to_learn(self) -> ObjectiveSettings:
        if not any(self.model_dump().values()):
            raise ValueError("all weights are 0; there is nothing to train")
        return self


class TrainSettings(Settings):
    """Batch, schedule and optimizer. Sizes count examples, each of three (or two) sequences."""

    seed: int = Field(1, ge=0, description="seed of new weights, the order of the text, masking and dropout")
    tokens: float = Field(2e9, ge=0, description="length of the run in text tokens; 0: not used")
    epochs: float = Field(0, ge=0, description="length of the run in passes over the text; 0: not used")
    steps: int = Field(0, ge=0, description="length of the run in optimizer steps; 0: not used")
    global_batch_size: PositiveInt = Field(10, description="examples of an optimizer step, over all ranks")
    micro_batch_size: PositiveInt | Literal["auto"] = Field(
        "auto", description="examples of a forward pass; auto: the largest that `micro_batch_tokens` allows"
    )
    micro_batch_tokens: PositiveInt = Field(
        32768, description="most tokens of a forward pass, padding included, if micro_batch_size is auto"
    )
    negatives_group: PositiveInt = Field(10, description="examples that are each other's negatives")
    learning_rate: float = Field(2e-5, gt=0, description="peak learning rate")
    warmup_ratio: float = Field(0.001, ge=0, lt=1, description="share of steps with rising learning rate")
    weight_decay: float = Field(0.02, ge=0, description="decoupled; none on biases and LayerNorms")
    max_grad_norm: float = Field(1.0, gt=0, description="largest global gradient norm")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="auto: bf16 where the GPU has it, fp16 on other GPUs, fp32 on CPU"
    )
    gather_negatives: bool = Field(False, description="MCQT's candidates come from the groups of all ranks")
    activation_checkpointing: bool = Field(False, description="saves memory, computes the layers twice")
    compile: bool = Field(False, description="torch.compile of the encoder's layers")
    unpad: bool = Field(False, description="the encoder leaves out the padding (variable-length attention)")
    skip_nonfinite: int = Field(0, ge=0, description="steps that may go without update before the run stops")

    @model_validator(mode="before")
    @classmethod
    def _known_names_and_one_length(cls, values: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(values, dict):
            return values
        if old := [f"train.{name} is now {RENAMED[name]}" for name in RENAMED if name in values]:
            raise ValueError("; ".join(old))
        given = [values[name] for name in LENGTHS if name in values]
        if given and sum(map(bool, given)) != 1:
            raise ValueError("give one of train.tokens, train.epochs and train.steps, and 0 for the others")
        return {"tokens": 0} | values if given else values

    @model_validator(mode="after")
    def _fits_together(self) -> TrainSettings:
        if self.compile and self.unpad:
            raise ValueError("train.compile and train.unpad do not go together: each length would be compiled")
        for name in ("global_batch_size", "micro_batch_size"):
            size = getattr(self, name)
            if size != "auto" and size % self.negatives_group:
                nearest = max(1, round(size / self.negatives_group)) * self.negatives_group
                raise ValueError(
                    f"train.{name} = {size} is no multiple of train.negatives_group = {self.negatives_group}; "
                    f"give {nearest}, or another train.negatives_group"
                )
        return self


def _whole_or_share(interval: float) -> float:
    if interval >= 1 and interval != int(interval):
        raise ValueError("give a whole number of steps, or a share of the run below 1")
    return int(interval) if interval >= 1 else interval


Interval = Annotated[float, Field(gt=0), AfterValidator(_whole_or_share)]


class RunSettings(Settings):
    """Output of a run: where, what and how often. Intervals are numbers of steps, or shares of the run below 1."""

    output_dir: str | None = Field(None, description="the run folder; default: runs/<name of the recipe>")
    log_every: Interval = Field(50, description="interval of records in metrics.jsonl and TensorBoard")
    eval_every: Interval = Field(2000, description="interval of validations")
    eval_examples: PositiveInt = Field(500, description="validation examples, always the same")
    save_every: Interval = Field(10000, description="interval of checkpoints")
    keep_checkpoints: PositiveInt = Field(2, description="number of newest checkpoints to keep")
    milestone_every: PositiveInt | None = Field(None, description="checkpoints of these steps stay for good")
    time_limit: float | None = Field(None, gt=0, description="minutes after which to save and leave")
    peak_tflops: float | None = Field(None, gt=0, description="of one device, for MFU; null: known for GPUs")
    wandb_project: str | None = Field(None, description="report to Weights & Biases too (its own package)")

    @field_validator("wandb_project")
    @classmethod
    def _wandb_is_installed(cls, project: str | None) -> str | None:
        if project is not None and find_spec("wandb") is None:
            raise ValueError("the package wandb is not installed: pip install wandb, or leave the setting null")
        return project


class PretrainSettings(Settings):
    """All settings of `pretrain/run.py`."""

    model: ModelSettings
    data: DataSettings
    objective: ObjectiveSettings = ObjectiveSettings()
    train: TrainSettings = TrainSettings()
    run: RunSettings = RunSettings()


def settle_micro_batch(settings: PretrainSettings, world_size: int) -> PretrainSettings:
    """Returns the settings with `train.micro_batch_size` as a number.

    "auto" becomes the largest multiple of `train.negatives_group` that divides a rank's share of the global batch and
    has at most `train.micro_batch_tokens` tokens; one group if a single group has more.

    Raises:
        UserError: The global batch does not divide into groups among the ranks, or a rank's share into micro-batches.
    """
    train = settings.train
    group, size = train.negatives_group, train.micro_batch_size
    groups = train.global_batch_size // group
    if groups % world_size:
        ranks = " or ".join(str(n) for n in range(1, groups + 1) if groups % n == 0)
        raise UserError(
            f"train.global_batch_size = {train.global_batch_size}: its {groups} group(s) of {group} examples "
            f"(train.negatives_group) cannot be shared out among {world_size} ranks; launch {ranks} rank(s), or give "
            f"--global_batch_size a multiple of {group * world_size}."
        )
    share = train.global_batch_size // world_size
    fitting = [n for n in range(group, share + 1, group) if share % n == 0]
    if size == "auto":
        tokens = settings.data.seq_length * settings.model.num_parts
        size = max((n for n in fitting if n * tokens <= train.micro_batch_tokens), default=group)
    if size not in fitting:
        raise UserError(
            f"train.micro_batch_size = {size}: does not divide a rank's {share} examples into whole groups; give auto, "
            f"or one of {', '.join(map(str, fitting))}."
        )
    return settings.model_copy(update={"train": train.model_copy(update={"micro_batch_size": size})})


def batch_arithmetic(settings: PretrainSettings, world_size: int) -> dict[str, Any]:
    """Returns the values of a DeepSpeed JSON that our settings own, as arguments of `resolve_ds_config`."""
    train = settle_micro_batch(settings, world_size).train
    assert train.micro_batch_size != "auto"
    return {
        "micro_batch_size": train.micro_batch_size,
        "accumulation": train.global_batch_size // train.micro_batch_size // world_size,
        "world_size": world_size,
        "gradient_clipping": train.max_grad_norm,
    }
