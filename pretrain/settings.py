"""Settings of a pretraining run and what follows from them. Defaults: the paper's for BERT-base (arXiv:2210.05043)."""

import math
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, PositiveInt, model_validator

from multicls.errors import UserError
from multicls.labels import LabelledSettings
from multicls.settings import RecipeOptions, Settings

if TYPE_CHECKING:
    from data_prep.examples import ExampleStream

# Muennighoff et al. 2023 (arXiv:2305.16264): after about 40 passes over the same text a model learns nothing more.
MANY_PASSES = 40
FEW_TOKENS = 50_000  # our own limit: about 16 steps of the paper's batch
MICRO_BATCH_TOKENS = 32768  # most tokens of a forward pass, padding included, if its size is "auto"


class ModelSettings(Settings):
    """The model and the checkpoint that it starts from."""

    checkpoint: str = Field(description="Hub id or folder of an encoder's checkpoint, or 'sample'")
    revision: str | None = Field(None, description="branch, tag or commit of a Hub id")
    random_weights: bool = Field(False, description="use only the checkpoint's shape and tokenizer")
    num_facets: int = Field(5, ge=0, description="K, the extra CLS tokens; 0: [CLS] alone")
    facet_layers: list[int] | None = Field(
        None, description="linear layers follow these layers; null: the model's default; []: none"
    )
    mcqt_lambda: float = Field(0.1, ge=0, le=1, description="weight of the best facet pair in MCQT")
    mcqt_scale: float = Field(1.0, gt=0, description="factor of MCQT's scores; the paper's: 1")
    hard_negatives: bool = Field(True, description="three-part examples; false: two parts")
    teacher: str | None = Field(
        None, description="folder or Hub id of a SentenceTransformer, for the anchor to hold to"
    )
    num_topics: int = Field(0, ge=0, description="T, topics of the corpus in the exported model")


class DataSettings(Settings):
    """The corpus and how it becomes examples."""

    corpus: str = Field(description="the folder written by data_prep/run.py, or 'sample'")
    seq_length: int = Field(128, ge=16, description="L, tokens of a sequence with special ones")
    mlm_probability: float = Field(0.15, gt=0, lt=1, description="share of text tokens to predict")
    source_weights: dict[str, Annotated[float, Field(ge=0)]] = Field(
        {}, description="how often an epoch shows a source: '{\"books\": 2}'; 0: never; unset: 1"
    )
    validation_fraction: float = Field(
        0.01, gt=0, lt=1, description="share of documents held out; at least one"
    )
    num_workers: int = Field(1, ge=0, description="loader processes a rank; they change no number")


class ObjectiveSettings(Settings):
    """Weights of the losses; a weight of 0 switches a loss off."""

    mlm: float = Field(1.0, ge=0, description="weight of the loss: masked tokens")
    tfidf: float = Field(1.0, ge=0, description="weight of the loss: TF-IDF of each token")
    so: float = Field(1.0, ge=0, description="weight of the loss: order of a part's two segments")
    mcqt: float = Field(1.0, ge=0, description="weight of the loss: which part follows which")
    anchor: float = Field(
        0.0,
        ge=0,
        description="weight of the loss: distance of the model's own embedding from that before training, or from "
        "the teacher's",
    )

    @property
    def in_use(self) -> dict[str, float]:
        """Weights by name, without those that are 0."""
        return {name: weight for name, weight in self.model_dump().items() if weight}

    @model_validator(mode="after")
    def _something_to_learn(self) -> Self:
        if not self.in_use:
            raise ValueError("all weights are 0; there is nothing to train")
        return self


class TrainSettings(Settings):
    """Batch, schedule and optimizer. Sizes count examples, each of three (or two) sequences."""

    seed: int = Field(1, ge=0, description="seed of weights, order of the text, masking, dropout")
    tokens: float = Field(0, ge=0, description="length of the run in text tokens")
    epochs: float = Field(0, ge=0, description="length of the run in passes over the text")
    steps: int = Field(
        0, ge=0, description="length of the run in optimizer steps; 0: none, for topics alone"
    )
    global_batch_size: PositiveInt = Field(10, description="examples of a step, over all ranks")
    micro_batch_size: PositiveInt | Literal["auto"] = Field(
        "auto", description="examples of a forward pass; auto: largest with at most 32,768 tokens"
    )
    negatives_group: PositiveInt = Field(10, description="examples that are each other's negatives")
    learning_rate: float = Field(2e-5, gt=0, description="peak learning rate")
    head_lr_factor: float = Field(
        1.0,
        gt=0,
        description="learning-rate factor of new weights: facets, heads that were missing",
    )
    warmup_ratio: float = Field(
        0.001, ge=0, lt=1, description="linear warm-up, share of the steps; then linear decay to 0"
    )
    weight_decay: float = Field(0.02, ge=0, description="decoupled; none on biases and LayerNorms")
    max_grad_norm: float = Field(1.0, gt=0, description="largest global gradient norm")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="auto: bf16 where the GPU has it, fp16 on other GPUs, fp32 on CPU"
    )
    activation_checkpointing: bool = Field(False, description="recompute layers to save memory")
    compile: bool | Literal["auto"] = Field(
        "auto",
        description="torch.compile of the encoder's layers; auto: ModernBERT's in 16 bits on a GPU",
    )
    unpad: bool | Literal["auto"] = Field(
        "auto",
        description="leave the padding out of the encoder, in 16 bits on a GPU, uncompiled; auto: where no dropout of "
        "attention is lost",
    )
    graph: bool | Literal["auto"] = Field(
        "auto", description="replay forward and backward pass as one CUDA graph; auto: on a GPU"
    )
    skip_nonfinite: int = Field(0, ge=0, description="steps with NaN or inf that may be skipped")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        lengths = sum(map(bool, (self.tokens, self.epochs, self.steps)))
        if lengths > 1 or (not lengths and "steps" not in self.model_fields_set):
            raise ValueError("set one of epochs, steps and tokens to more than 0, for the length")
        if self.unpad is True and self.compile is True:
            raise ValueError("unpad and compile exclude each other: each length would compile anew")
        group = self.negatives_group
        for name in ("global_batch_size", "micro_batch_size"):
            size = getattr(self, name)
            if size != "auto" and size % group:
                raise ValueError(
                    f"{name} = {size} is no multiple of negatives_group = {group}; "
                    f"set it to {max(group, size // group * group)}, or change negatives_group"
                )
        return self

    def passes(self, ranks: int) -> int:
        """Returns the micro-batches that a rank accumulates in a step, if their size is a number."""
        return self.global_batch_size // int(self.micro_batch_size) // ranks

    @property
    def warmup_steps(self) -> int:
        """Number of steps with rising learning rate. It needs `steps`."""
        return round(self.warmup_ratio * self.steps)


def lr_at(step: int, train: TrainSettings) -> float:
    """Returns the learning rate of optimizer step `step` (from 0): linear warm-up, then linear decay to 0.

    The peak is at step `train.warmup_steps`; no step before it has a learning rate of 0.
    """
    if step < train.warmup_steps:
        return train.learning_rate * ((step + 1) / (train.warmup_steps + 1))
    share = (train.steps - step) / max(1, train.steps - train.warmup_steps)
    return train.learning_rate * share


def _whole_or_share(interval: float) -> float:
    if interval >= 1 and interval != int(interval):
        raise ValueError("must be a whole number of steps, or a share of the run below 1")
    return int(interval) if interval >= 1 else interval


Interval = Annotated[float, Field(gt=0), AfterValidator(_whole_or_share)]


class RunSettings(Settings):
    """Output of a run: where, what and how often. Intervals are numbers of steps, or shares of the run below 1."""

    output_dir: str = Field("", description="run folder; default: runs/NAME of the last recipe")
    log_every: Interval = Field(50, description="interval of records of metrics")
    eval_every: Interval = Field(5000, description="interval of validations")
    eval_examples: PositiveInt = Field(500, description="validation examples, always the same")
    save_every: Interval = Field(10000, description="interval of checkpoints")
    keep_checkpoints: PositiveInt = Field(2, description="number of newest checkpoints to keep")
    milestone_every: PositiveInt | None = Field(None, description="interval of checkpoints to keep")
    keep_best: Literal["probe"] | None = Field(
        None, description="probe: export the step with the best probe"
    )
    time_limit: float | None = Field(None, gt=0, description="save and exit after these minutes")
    profile: PositiveInt | None = Field(
        None, description="number of steps whose trace torch.profiler writes to RUN/profile"
    )


class ProbeSettings(LabelledSettings):
    """Labelled rows that show at each validation whether the run helps. They change no weight."""

    file: str | None = Field(
        None, description="CSV, TSV, JSON lines or Parquet; null: next-passage recall, no labels"
    )


class PretrainSettings(RecipeOptions):
    """All settings of `pretrain/run.py`."""

    alternatives: ClassVar[tuple[str, ...]] = ("train.tokens", "train.epochs", "train.steps")

    config: str = Field("ds_configs/zero2.json", exclude=True, description="DeepSpeed JSON")
    status: bool = Field(
        False, exclude=True, description="print the state of the run; exit code 0: finished, 3: not"
    )
    model: ModelSettings
    data: DataSettings
    objective: ObjectiveSettings = ObjectiveSettings()
    train: TrainSettings
    run: RunSettings = RunSettings()
    probe: ProbeSettings = ProbeSettings()

    @model_validator(mode="after")
    def _has_an_anchor(self) -> Self:
        is_held, teacher = self.objective.anchor > 0, self.model.teacher
        if teacher and not is_held:
            raise ValueError(
                "model.teacher: nothing follows it; set objective.anchor, for instance to 5"
            )
        if is_held and self.model.random_weights and not teacher:
            raise ValueError(
                "objective.anchor: random weights have no embedding to keep; set model.teacher, or 0"
            )
        return self

    @property
    def num_parts(self) -> int:
        """P, the consecutive sequences of an example."""
        return 3 if self.model.hard_negatives else 2

    def with_values(self, **groups: dict[str, Any]) -> Self:
        """Returns the settings with some values replaced: `with_values(train={"steps": 3})`."""
        changed = {name: getattr(self, name).model_copy(update=groups[name]) for name in groups}
        return self.model_copy(update=changed)


def resolve_micro_batch(settings: PretrainSettings, world_size: int) -> PretrainSettings:
    """Returns the settings with `train.micro_batch_size` as a number.

    Raises:
        UserError: The global batch does not divide into groups among the ranks, or a rank's share into micro-batches.
    """
    train = settings.train
    group, size = train.negatives_group, train.micro_batch_size
    groups, rest = divmod(train.global_batch_size // group, world_size)
    if rest:
        raise UserError(
            f"train.global_batch_size = {train.global_batch_size}: its groups of {group} examples "
            f"(train.negatives_group) do not divide among {world_size} ranks; set --global_batch_size to a multiple "
            f"of {group * world_size}, or launch another number of ranks."
        )
    fitting = [n * group for n in range(1, groups + 1) if groups % n == 0]
    if size == "auto":
        tokens = settings.data.seq_length * settings.num_parts
        size = max((n for n in fitting if n * tokens <= MICRO_BATCH_TOKENS), default=group)
    if size not in fitting:
        raise UserError(
            f"train.micro_batch_size = {size}: does not divide a rank's {groups * group} examples into whole groups; "
            f"set it to auto, or to one of {', '.join(map(str, fitting))}."
        )
    return settings.with_values(train={"micro_batch_size": size})


def resolve_length(
    settings: PretrainSettings, stream: "ExampleStream"
) -> tuple[PretrainSettings, list[str]]:
    """Returns the settings with steps and intervals as numbers of steps, and lines for the log.

    Raises:
        UserError: A pass over the training `stream` has fewer examples than a group of negatives.
    """
    train, examples, tokens = settings.train, stream.examples_per_epoch, stream.num_tokens
    if not (train.tokens or train.epochs or train.steps):
        return settings, [
            "length: no step; the model before training gets the topics of the corpus"
        ]
    if examples < train.negatives_group:
        raise UserError(
            f"{stream.corpus.path}: too small: its {tokens:,} training tokens give {examples} examples, and a group "
            f"of negatives needs {train.negatives_group} that differ (train.negatives_group). Prepare at least "
            f"{tokens * train.negatives_group // examples + 1:,} tokens, better a million."
        )
    wanted = (train.tokens / tokens or train.epochs) * examples  # in examples
    steps = train.steps or max(1, round(wanted / train.global_batch_size))
    passes = steps * train.global_batch_size / examples
    length = f"{passes:,.2f} passes (epochs) over {tokens:,} training tokens"
    notes = [f"length: {steps:,} steps are {length}"]
    if passes > MANY_PASSES:
        notes.append(
            f"warning: after about {MANY_PASSES} passes over the same text a model learns nothing more. Shorten the "
            "run, for instance with --epochs 3, or prepare more text."
        )
    if tokens < FEW_TOKENS:
        notes.append(f"warning: {tokens:,} training tokens are too few to improve a model")
    every = settings.run.model_dump(include={"log_every", "eval_every", "save_every"})
    every = {name: max(1, math.ceil(n * steps - 1e-9)) if n < 1 else n for name, n in every.items()}
    in_steps = {"steps": steps, "tokens": 0.0, "epochs": 0.0}
    return settings.with_values(train=in_steps, run=every), notes
