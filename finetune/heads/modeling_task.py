"""An encoder, a head that makes one embedding of it, and a classifier for each task. Saved models hold this file.

Imports only torch and transformers. Shape legend: B sequences, L tokens, D hidden size, E size of the embedding, C
outputs (or choices), S marked spans.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

if int(transformers.__version__.split(".")[0]) < 5:
    raise ImportError(
        f"this model needs transformers 5, not {transformers.__version__}: pip install 'transformers>=5.17,<6'"
    )

ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"]
IGNORE_INDEX = -100  # label of a row that does not count, torch's own for classes
MULTICLS = "multicls"  # model type of Multi-CLS checkpoints
ACTIVATIONS = {"electra": nn.GELU, "distilbert": nn.ReLU}  # as published; others have tanh
# Fields of a config.json that do not belong to the encoder itself.
NOT_OF_THE_ENCODER = ("_name_or_path", "auto_map", "architectures", "dtype", "transformers_version")


class TaskModelConfig(PretrainedConfig):
    """The parts of a `TaskModel`; other fields are those of `PretrainedConfig`."""

    model_type = "encoder-with-head"
    # With these left out, a Trainer's `compute_metrics` gets the logits alone.
    keys_to_ignore_at_inference: ClassVar = ["hidden_states", "features"]

    encoder: Any = None  # its configuration, as an object or as a dictionary with `model_type`
    head: str = "cls"  # name in the `HEADS` of this file or of another one of this folder
    head_options: dict[str, Any] = field(default_factory=dict)  # that head's settings
    pooling: str = "cls"  # the head that a `PooledHead` is built on
    tasks: list[dict[str, Any]] = field(default_factory=list)  # by `finetune.tasks.Task.describe`
    dropout: float | None = None  # before the classifier; None: the encoder's own
    thresholds: list[list[float]] = field(default_factory=list)  # of several labels, by task

    def __post_init__(self, **kwargs: Any) -> None:
        encoder = self.encoder or {}
        fields = encoder if isinstance(encoder, dict) else encoder.to_dict()
        self.encoder = {name: fields[name] for name in fields if name not in NOT_OF_THE_ENCODER}
        for first in self.tasks[:1]:
            self.problem_type = self.problem_type or problem_type_of(first)
            if self.id2label is None:
                self.id2label = dict(enumerate(map(str, first["labels"] or ["score"])))
                self.label2id = {label: index for index, label in self.id2label.items()}
        super().__post_init__(**kwargs)


def problem_type_of(task: dict[str, Any]) -> ProblemType:
    """Returns the `problem_type` of a task, by which a pipeline chooses softmax, sigmoid or nothing."""
    if task.get("is_regression"):
        return "regression"
    several = task.get("multi_label")
    return "multi_label_classification" if several else "single_label_classification"


@dataclass
class TaskModelOutput(SequenceClassifierOutput):
    """The output of a `TaskModel`: BERT's, and what the classifier reads."""

    features: Tensor | None = None  # the embedding and the means over the spans, (B, E + S * D)


class IncompatibleHead(ValueError):
    """A head does not work on an encoder; the message gives the reason."""


class Head(nn.Module):
    """Makes one embedding of an encoder's hidden states.

    It may take modules of the checkpoint (`encoder.pooler`). The encoder is left without pooler and facet head, so that
    nothing is trained or saved that nothing reads.
    """

    width: int  # E, the size of the embedding
    reads_layers = False  # it needs the `layers` of `forward`
    dropout_before_classifier = True  # the paper of the head has dropout there
    counted = True  # False for a batch that only keeps a rank busy

    def __init__(self, config: TaskModelConfig, encoder: PreTrainedModel) -> None:
        super().__init__()
        self.width = int(encoder.config.hidden_size)

    def forward(self, hidden: Tensor, mask: Tensor, layers: Sequence[Tensor]) -> Tensor:
        """Returns the embedding, (B, E), from the last hidden states (B, L, D); the mask (B, L) is 1 up to the padding.

        `layers` are the output of the embeddings and of each layer, (B, L, D) each, if `reads_layers`.
        """
        raise NotImplementedError

    def select_task(self, task: int) -> None:
        """Prepares for a batch of that task; called before the encoder runs."""


class ClsHead(Head):
    """The published classifier of the encoder's type without its last layer: act(W_p h_[CLS] + b_p).

    BERT takes W_p from pretraining. RoBERTa and ELECTRA were pretrained without a pooler: as in their own fine-tuning,
    W_p is new and dropout stands before it, too. Other encoders do as RoBERTa; DistilBERT has ReLU and no such dropout.
    On a Multi-CLS checkpoint the facets are not read.
    """

    def __init__(self, config: TaskModelConfig, encoder: PreTrainedModel) -> None:
        super().__init__(config, encoder)
        base = base_encoder(encoder)
        kind = base.config.model_type
        pooler = getattr(base, "pooler", None) if kind == "bert" else None
        self.dense = pooler.dense if pooler is not None else nn.Linear(self.width, self.width)
        drops = pooler is None and kind != "distilbert"
        self.dropout = nn.Dropout(dropout_of(config) if drops else 0.0)
        self.activation: nn.Module = ACTIVATIONS.get(kind, nn.Tanh)()

    def forward(self, hidden: Tensor, mask: Tensor, layers: Sequence[Tensor]) -> Tensor:
        """Returns the embedding, (B, D)."""
        return self.activation(self.dense(self.dropout(hidden[:, 0])))


class MeanHead(Head):
    """The mean over all unpadded positions but the facets: sum_t mask_t h_t / sum_t mask_t; [CLS] and [SEP] count."""

    def __init__(self, config: TaskModelConfig, encoder: PreTrainedModel) -> None:
        super().__init__(config, encoder)
        self.without: slice = getattr(encoder.config, "facet_slice", slice(0))

    def forward(self, hidden: Tensor, mask: Tensor, layers: Sequence[Tensor]) -> Tensor:
        """Returns the embedding, (B, D)."""
        begin, end = self.without.start or 0, self.without.stop
        hidden = torch.cat([hidden[:, :begin], hidden[:, end:]], dim=1)
        mask = torch.cat([mask[:, :begin], mask[:, end:]], dim=1)
        return span_means(hidden, mask[:, None]).squeeze(1)


class MulticlsHead(Head):
    """The re-parameterised sum of the facets (Multi-CLS BERT, section 2.6).

    Embedding = sum_k (W_O,k - mean_k' W_O,k') h_k + b_k: W_O,k from pretraining and trained on, b_k from 0; no GELU, no
    LayerNorm. Centring keeps the facets from learning one and the same weight matrix. A single facet has nothing to be
    centred on: W_O,1 h_1 + b_1. The ablation `multicls_sum` does not centre: nothing keeps the facets apart.
    """

    dense: nn.Module

    def __init__(self, config: TaskModelConfig, encoder: PreTrainedModel) -> None:
        super().__init__(config, encoder)
        count = number_of_facets(encoder)
        self.facet_slice: slice = encoder.config.facet_slice
        self.centred = config.head != "multicls_sum" and count > 1
        self.dense = encoder.get_submodule("facet_head.dense")
        self.bias = nn.Parameter(torch.zeros(count, self.width))

    def forward(self, hidden: Tensor, mask: Tensor, layers: Sequence[Tensor]) -> Tensor:
        """Returns the embedding, (B, D)."""
        facets_BKD = hidden[:, self.facet_slice]
        return (self.dense(facets_BKD, centred=self.centred) + self.bias).sum(dim=1)


class FacetsHead(Head):
    """The facet embeddings of pretraining, c_k = LayerNorm(GELU(W_O,k h_k)), side by side."""

    def __init__(self, config: TaskModelConfig, encoder: PreTrainedModel) -> None:
        super().__init__(config, encoder)
        self.width *= number_of_facets(encoder)
        self.facet_slice: slice = encoder.config.facet_slice
        self.facet_head = encoder.get_submodule("facet_head")

    def forward(self, hidden: Tensor, mask: Tensor, layers: Sequence[Tensor]) -> Tensor:
        """Returns the embedding, (B, K * D)."""
        return self.facet_head(hidden[:, self.facet_slice]).flatten(1)


def number_of_facets(encoder: PreTrainedModel) -> int:
    """Returns K; without facets it raises `IncompatibleHead`."""
    if not (count := getattr(encoder.config, "num_facets", 0)):
        raise IncompatibleHead(
            "it is a checkpoint without facets to pool. Use mean or cls, or pretrain it with pretrain/run.py first, "
            "whose run.keep_best exports the model before training if no step was better."
        )
    return int(count)


class PooledHead(Head):
    """A head on top of another head, the one that `config.pooling` names."""

    def __init__(self, config: TaskModelConfig, encoder: PreTrainedModel) -> None:
        super().__init__(config, encoder)
        self.pooling = find_head(config.pooling)(config, encoder)
        self.width = self.pooling.width

    def forward(self, hidden: Tensor, mask: Tensor, layers: Sequence[Tensor]) -> Tensor:
        """Returns the embedding of the other head, (B, E)."""
        return self.pooling(hidden, mask, layers)


HEADS: dict[str, type[Head]] = {"cls": ClsHead, "mean": MeanHead, "facets": FacetsHead}
HEADS |= {"multicls": MulticlsHead, "multicls_sum": MulticlsHead}


def find_head(name: str) -> type[Head]:
    """Returns the class of a head, from `HEADS` of this file or of the file that holds it."""
    if name in HEADS:
        return HEADS[name]
    return importlib.import_module(f".{name}", __package__).HEADS[name]


def base_encoder(encoder: Any) -> PreTrainedModel:
    """Returns the encoder inside a Multi-CLS model, else the encoder itself."""
    return encoder.encoder if encoder.config.model_type == MULTICLS else encoder


class TaskModel(PreTrainedModel):
    """An encoder with a head, and a linear classifier for each task.

    Logits = W dropout([pooled; mean over span 1; mean over span 2]) + b, the means of the last hidden states. A choice
    is a sequence with one output. Without an `encoder` its weights are drawn anew.
    """

    config_class = TaskModelConfig
    base_model_prefix = "encoder"
    supports_gradient_checkpointing = True
    # The loss is a mean over the batch: a Trainer divides it by its accumulation steps.
    accepts_loss_kwargs = False

    def __init__(self, config: TaskModelConfig, encoder: PreTrainedModel | None = None) -> None:
        super().__init__(config)
        self.encoder = encoder or AutoModel.from_config(AutoConfig.for_model(**config.encoder))
        self.head = find_head(config.head)(config, self.encoder)
        base: Any = base_encoder(self.encoder)
        base.pooler = None
        if getattr(self.encoder, "facet_head", None) is not None:
            self.encoder.facet_head = nn.Identity()
        hidden_size = int(self.encoder.config.hidden_size)
        dropout = dropout_of(config) if self.head.dropout_before_classifier else 0.0
        self.dropout = nn.Dropout(dropout)
        self.classifiers = nn.ModuleList(
            nn.Linear(self.head.width + task["num_spans"] * hidden_size, task["num_labels"])
            for task in config.tasks
        )
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        spans: Tensor | None = None,
        labels: Tensor | None = None,
        task: int = 0,
        counted: bool = True,
        **kwargs: Any,
    ) -> TaskModelOutput:
        """Classifies sequences of one task, number `task` of `config.tasks`; `kwargs` are the encoder's.

        Args:
            input_ids: (B, L); of a choice task (B * C, L), a row's choices together.
            attention_mask: (B, L), 1 up to the padding, which is on the right.
            spans: (B, S, L) bool, the tokens of each marked span, for tasks that mark spans.
            labels: (B,) class ids, or numbers for regression; (B, C) zeros and ones for a multi-label task.
            counted: False for a batch that only keeps a rank busy.

        Returns:
            `loss`, the mean over rows (and classes, in a multi-label task), if labels are passed; `logits`
            (B, num_labels), or (B, C) in a choice task; and what `TaskModelOutput` names.
        """
        self.head.select_task(task)
        self.head.counted = counted
        if getattr(base_encoder(self.encoder).config, "type_vocab_size", 0) > 1:
            kwargs["token_type_ids"] = token_type_ids
        if self.head.reads_layers:
            kwargs["output_hidden_states"] = True
        kwargs["return_dict"] = True
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        hidden_BLD = states.last_hidden_state
        if attention_mask is None:
            attention_mask = torch.ones_like(hidden_BLD[..., 0], dtype=torch.long)
        features = self.head(hidden_BLD, attention_mask, states.hidden_states or ())
        if spans is not None:
            features = torch.cat([features, span_means(hidden_BLD, spans).flatten(1)], dim=-1)
        logits = self.classifiers[task](self.dropout(features))
        if choices := self.config.tasks[task]["num_choices"]:
            logits = logits.view(-1, choices)
        loss = None
        if labels is not None:
            total = loss_sum(problem_type_of(self.config.tasks[task]), logits.float(), labels)
            loss = total / labels.ne(IGNORE_INDEX).sum()
        return TaskModelOutput(
            loss=loss,
            logits=logits,
            hidden_states=states.hidden_states,
            attentions=states.attentions,
            features=features,
        )


def loss_sum(problem: ProblemType, logits_BC: Tensor, labels: Tensor) -> Tensor:
    """Returns the sum of the losses of all labels that are not `IGNORE_INDEX`: squared errors or cross-entropies.

    Outputs are in float32. Labels are (B,), or (B, C) with several a row, when each has a binary cross-entropy.
    """
    if problem == "single_label_classification":
        losses = F.cross_entropy(logits_BC, labels, reduction="none")
    elif problem == "regression":
        losses = (logits_BC.view(labels.shape) - labels.float()).square()
    else:
        losses = F.binary_cross_entropy_with_logits(logits_BC, labels.float(), reduction="none")
    return losses.masked_fill(labels == IGNORE_INDEX, 0.0).sum()


def span_means(hidden_BLD: Tensor, spans_BSL: Tensor) -> Tensor:
    """Returns the mean over the positions of each span, (B, S, D); 0 for a span that truncation has cut off."""
    weights_BSL = spans_BSL.to(hidden_BLD.dtype)
    return weights_BSL @ hidden_BLD / weights_BSL.sum(dim=-1, keepdim=True).clamp(min=1)


def dropout_of(config: TaskModelConfig) -> float:
    """Returns the dropout before the classifier: the settings', else the checkpoint's."""
    names = ("classifier_dropout", "seq_classif_dropout", "hidden_dropout_prob", "dropout")
    encoders = (config.encoder, config.encoder.get("encoder") or {})
    candidates = (config.dropout, *(encoder.get(name) for encoder in encoders for name in names))
    return float(next((value for value in candidates if isinstance(value, (int, float))), 0.1))


AutoConfig.register(TaskModelConfig.model_type, TaskModelConfig, exist_ok=True)
transformers.AutoModelForSequenceClassification.register(TaskModelConfig, TaskModel, exist_ok=True)
