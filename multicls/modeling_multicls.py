"""Multi-CLS BERT (arXiv:2210.05043). Travels with saved models: imports only torch, transformers and its configuration.

Shape legend: P parts, n examples in the batch, B = P * n sequences, L tokens, D hidden size, K facets (extra CLS
tokens), S = max(K, 1) embeddings of one sequence, V vocabulary, C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertModel, BertPreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPooling, ModelOutput, SequenceClassifierOutput
from transformers.models.bert.modeling_bert import BertLayer, BertLMPredictionHead, BertPredictionHeadTransform
from transformers.utils import can_return_tuple

from .configuration_multicls import MultiClsBertConfig

PRETRAINING_HEADS = [r"^cls\."]  # in a checkpoint of `MultiClsBertForPreTraining`, and not needed afterwards


class FacetLinear(nn.Module):
    """A linear map of its own for every facet, D -> D without bias: y_k = W_k h_k."""

    def __init__(self, num_facets: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_facets, hidden_size, hidden_size))

    def forward(self, hidden_BKD: Tensor, centred: bool = False) -> Tensor:
        """All facets in one batched product; `centred` subtracts the facets' mean matrix first (section 2.6)."""
        weight_KDD = self.weight - self.weight.mean(dim=0) if centred else self.weight
        return torch.einsum("bkd,ked->bke", hidden_BKD, weight_KDD)


class FacetLayerNorm(nn.Module):
    """A LayerNorm of its own for every facet."""

    def __init__(self, num_facets: int, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_facets, hidden_size))
        self.bias = nn.Parameter(torch.zeros(num_facets, hidden_size))
        self.eps = eps

    def forward(self, hidden_BKD: Tensor) -> Tensor:
        """Normalises over D, then scales and shifts by the facet's row."""
        return F.layer_norm(hidden_BKD, hidden_BKD.shape[-1:], eps=self.eps) * self.weight + self.bias


class FacetHead(nn.Module):
    """Facet embeddings c_k = LayerNorm(GELU(W_{O,k} h_k)) from the last hidden states of the facets."""

    def __init__(self, config: MultiClsBertConfig) -> None:
        super().__init__()
        self.dense = FacetLinear(config.num_embeddings_per_sequence, config.hidden_size)
        self.LayerNorm = FacetLayerNorm(
            config.num_embeddings_per_sequence, config.hidden_size, eps=config.layer_norm_eps
        )

    def forward(self, hidden_BSD: Tensor) -> Tensor:
        """(B, S, D) -> (B, S, D)."""
        return self.LayerNorm(F.gelu(self.dense(hidden_BSD)))


class FacetBertLayer(BertLayer):
    """A BERT layer whose output at the facet positions passes the inserted linear layers (section 2.5)."""

    def __init__(self, config: MultiClsBertConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx=layer_idx)
        self.num_facets = config.num_facets
        self.facets = FacetLinear(config.num_facets, config.hidden_size)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """(B, L, D) -> (B, L, D); [CLS] and text are those of the plain layer."""
        hidden_BLD = super().forward(*args, **kwargs)
        text = 1 + self.num_facets  # where the text begins; [CLS] is at 0
        return torch.cat([hidden_BLD[:, :1], self.facets(hidden_BLD[:, 1:text]), hidden_BLD[:, text:]], dim=1)


@dataclass
class MultiClsBertModelOutput(BaseModelOutputWithPooling):
    """As BERT's output, with `facet_embeddings` c_k, (B, S, D)."""

    facet_embeddings: Tensor | None = None


class McqtScores(NamedTuple):
    """Scores s(x, y) of Eq. 2, (n, 2n) each, or (n, n) and None without hard negatives (more columns if gathered).

    `forward[q]` are those of query A_q against all B, then all C; `backward[q]` those of C_q against all B, then all A.
    The target of row q is column q.
    """

    forward: Tensor
    backward: Tensor | None


@dataclass
class MultiClsBertForPreTrainingOutput(ModelOutput):
    """Output of `MultiClsBertForPreTraining`.

    Attributes:
        loss: sum of `losses`; None if none could be computed.
        losses: scalars by name: "mlm", "tfidf", "so" (where their labels were given) and "mcqt".
        last_hidden_state: (B, L, D).
        facet_embeddings: (B, S, D).
        mcqt_scores: a `McqtScores` pair.
        so_logits: (B, 2); class 1 is "swapped".
        tfidf: (B, L - K), predicted TF-IDF of [CLS] and the text: the positions 1..K of the facets are left out.
        mlm_logits: (masked, V), one row for every position with a label, in row-major order; None without labels.
    """

    loss: Tensor | None = None
    losses: dict[str, Tensor] | None = None
    last_hidden_state: Tensor | None = None
    facet_embeddings: Tensor | None = None
    mcqt_scores: tuple[Tensor, Tensor | None] | None = None
    so_logits: Tensor | None = None
    tfidf: Tensor | None = None
    mlm_logits: Tensor | None = None


@dataclass
class MultiClsBertClassifierOutput(SequenceClassifierOutput):
    """As BERT's classifier output, with `pooled`, the embedding that was classified, (B, D), before dropout."""

    pooled: Tensor | None = None


def mcqt_scores(queries_NSD: Tensor, candidates_MSD: Tensor, best_pair_weight: float) -> Tensor:
    """Scores of every query against every candidate (Eq. 2), in float32 at least.

    s(x, y) = lambda * max_ij cos(x_i, y_j) + (1 - lambda) * cos(sum_i x_i, sum_j y_j), no temperature.

    Args:
        queries_NSD: facet embeddings of N sequences.
        candidates_MSD: facet embeddings of M sequences.
        best_pair_weight: lambda.

    Returns:
        (N, M).
    """
    queries_NSD, candidates_MSD = _fp32(queries_NSD), _fp32(candidates_MSD)
    pairs = torch.einsum("nid,mjd->nmij", F.normalize(queries_NSD, dim=-1), F.normalize(candidates_MSD, dim=-1))
    query_sums, candidate_sums = queries_NSD.sum(dim=1), candidates_MSD.sum(dim=1)
    sums = F.normalize(query_sums, dim=-1) @ F.normalize(candidate_sums, dim=-1).T
    return best_pair_weight * pairs.amax(dim=(-1, -2)) + (1.0 - best_pair_weight) * sums


def part_scores(
    facets_BSD: Tensor, num_parts: int, best_pair_weight: float, gather: Callable[[Tensor], Tensor] | None = None
) -> McqtScores:
    """Both directions of the MCQT scores over a part-major batch (A rows, then B rows, then C rows).

    Args:
        facets_BSD: facet embeddings.
        num_parts: P.
        best_pair_weight: lambda.
        gather: makes of the rows of a part, (n, S, D), the candidates from it, (m, S, D), which begin with those rows:
            training puts those of other ranks behind them. None: the part itself.

    Raises:
        ValueError: the batch does not divide into `num_parts`.
    """
    if facets_BSD.shape[0] % num_parts:
        raise ValueError(
            f"{facets_BSD.shape[0]} sequences do not divide into {num_parts} parts: a batch is part-major, "
            f"({num_parts}n, L): all first parts, then all second parts, ..."
        )
    parts = facets_BSD.chunk(num_parts)
    first, second, *hard = [gather(part) for part in parts] if gather else parts
    if not hard:
        return McqtScores(mcqt_scores(parts[0], second, best_pair_weight), None)
    return McqtScores(
        mcqt_scores(parts[0], torch.cat([second, hard[0]]), best_pair_weight),
        mcqt_scores(parts[2], torch.cat([second, first]), best_pair_weight),
    )


def mcqt_loss(scores: McqtScores) -> Tensor:
    """MCQT loss: the cross-entropies of the directions, each a mean over queries, summed. Chance level: 2 ln(2n)."""
    targets = torch.arange(scores.forward.shape[0], device=scores.forward.device)
    losses = [F.cross_entropy(direction, targets) for direction in scores if direction is not None]
    return torch.stack(losses).sum()


class MultiClsBertPreTrainedModel(BertPreTrainedModel):
    """Weights initialisation shared by the Multi-CLS models."""

    config_class = MultiClsBertConfig
    config: MultiClsBertConfig
    base_model_prefix = "bert"

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, FacetLinear):
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
        elif isinstance(module, FacetLayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, MultiClsBertForSequenceClassification):
            init.zeros_(module.facet_bias)


class MultiClsBertModel(MultiClsBertPreTrainedModel, BertModel):
    """BERT encoder with facets; all weights of `BertModel` keep their names.

    Inputs as `BertModel`, tokenized as `[CLS] [C1] ... [CK] text [SEP]` (the tokenizer saved with the model does so).
    """

    _keys_to_ignore_on_load_unexpected = PRETRAINING_HEADS

    def __init__(self, config: MultiClsBertConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config, add_pooling_layer=add_pooling_layer)
        for layer in config.facet_layers or []:
            self.encoder.layer[layer - 1] = FacetBertLayer(config, layer_idx=layer - 1)
        self.facet_head = FacetHead(config)
        self.post_init()

    def facet_states(self, hidden_BLD: Tensor) -> Tensor:
        """(B, L, D) -> (B, S, D): the hidden states at the facets' positions ([CLS]'s if there is no facet)."""
        return hidden_BLD[:, 1 : 1 + self.config.num_facets] if self.config.num_facets else hidden_BLD[:, :1]

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> MultiClsBertModelOutput:
        """Encodes (B, L) token ids. Further arguments as `BertModel`."""
        outputs = super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **(kwargs | {"return_dict": True}),
        )
        return MultiClsBertModelOutput(
            last_hidden_state=outputs.last_hidden_state,
            pooler_output=outputs.pooler_output,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            facet_embeddings=self.facet_head(self.facet_states(outputs.last_hidden_state)),
        )


class TfidfHead(nn.Module):
    """Predicts the scaled TF-IDF of a token: dense, GELU, LayerNorm, Linear(D, 1)."""

    def __init__(self, config: MultiClsBertConfig) -> None:
        super().__init__()
        self.transform = BertPredictionHeadTransform(config)
        self.decoder = nn.Linear(config.hidden_size, 1)

    def forward(self, hidden_BLD: Tensor) -> Tensor:
        """(B, L, D) -> (B, L)."""
        return self.decoder(self.transform(hidden_BLD)).squeeze(-1)


class MultiClsPreTrainingHeads(nn.Module):
    """The heads of pretraining; `predictions` and `seq_relationship` are those of `BertForPreTraining`."""

    def __init__(self, config: MultiClsBertConfig) -> None:
        super().__init__()
        self.predictions = BertLMPredictionHead(config)
        self.tfidf = TfidfHead(config)
        self.order_transform = nn.Linear(config.num_embeddings_per_sequence * config.hidden_size, config.hidden_size)
        self.seq_relationship = nn.Linear(config.hidden_size, 2)

    def sentence_order(self, facets_BSD: Tensor) -> Tensor:
        """(B, S, D) -> (B, 2): W2 (L_SO concat_k(h_k))."""
        return self.seq_relationship(self.order_transform(facets_BSD.flatten(1)))


class MultiClsBertForPreTraining(MultiClsBertPreTrainedModel):
    """Multi-CLS BERT with the heads of its four objectives: MLM, TF-IDF, sentence order (SO) and MCQT.

    `from_pretrained` also starts from any BERT checkpoint (see `multicls.initialize.from_bert`, which reports what was
    found in it); its MLM head is kept, and its next-sentence classifier starts the sentence-order classifier.
    """

    _tied_weights_keys = {  # noqa: RUF012 (the base class's form)
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }

    def __init__(self, config: MultiClsBertConfig) -> None:
        super().__init__(config)
        self.bert = MultiClsBertModel(config)
        self.cls = MultiClsPreTrainingHeads(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        """The MLM decoder, tied to the word embeddings."""
        return self.cls.predictions.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replaces the MLM decoder (when the vocabulary grows)."""
        self.cls.predictions.decoder = new_embeddings
        self.cls.predictions.bias = new_embeddings.bias

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        tfidf_labels: Tensor | None = None,
        so_labels: Tensor | None = None,
        normalizers: dict[str, Tensor | float] | None = None,
        gather: Callable[[Tensor], Tensor] | None = None,
        **kwargs: Any,
    ) -> MultiClsBertForPreTrainingOutput:
        """The objectives over a part-major batch: B = P * n rows, all first parts, then all second parts, ...

        Args:
            input_ids: (B, L), `[CLS] [C1..CK] run [SEP] run [SEP]`, padded.
            attention_mask: (B, L), 0 on padding.
            token_type_ids: (B, L), 0 up to the first [SEP], 1 for the second run and its [SEP].
            labels: (B, L) masked-LM targets, -100 elsewhere. The MLM head is computed at the labelled positions only.
            tfidf_labels: (B, L - K) targets in 0..10: as `tfidf` of the output, without the facets' positions. The loss
                is the mean over unpadded positions.
            so_labels: (B,) 1 = the runs are swapped, 0 = in order, -100 = a part of one run.
            normalizers: what to divide the summed MLM, TF-IDF and SO losses by, if not by their numbers of terms in
                this very batch: training passes its share of the whole optimizer step.
            gather: adds candidates to MCQT, as in `part_scores`.
            **kwargs: as `BertModel`.

        Raises:
            ValueError: B is no multiple of the number of parts.
        """
        outputs = self.bert(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            **(kwargs | {"return_dict": True, "use_cache": False}),
        )
        hidden_BLD = outputs.last_hidden_state
        tfidf_BT = self.cls.tfidf(self._without_facets(hidden_BLD))
        so_logits = self.cls.sentence_order(self.bert.facet_states(hidden_BLD))
        scores = part_scores(outputs.facet_embeddings, self.config.num_parts, self.config.mcqt_lambda, gather)

        mlm_logits, losses = None, {"mcqt": mcqt_loss(scores)}
        count = (normalizers or {}).get
        if labels is not None:
            mlm_logits = self.cls.predictions(hidden_BLD[labels != -100])
            losses["mlm"] = _cross_entropy(mlm_logits, labels[labels != -100], count("mlm"))
        if tfidf_labels is not None:
            losses["tfidf"] = _mean(self._squared_errors(tfidf_BT, tfidf_labels, attention_mask), count("tfidf"))
        if so_labels is not None:
            runs = so_labels != -100
            losses["so"] = _cross_entropy(so_logits[runs], so_labels[runs], count("so"))
        return MultiClsBertForPreTrainingOutput(
            loss=torch.stack(list(losses.values())).sum(),
            losses=losses,
            last_hidden_state=hidden_BLD,
            facet_embeddings=outputs.facet_embeddings,
            mcqt_scores=scores,
            so_logits=so_logits,
            tfidf=tfidf_BT,
            mlm_logits=mlm_logits,
        )

    def _squared_errors(self, tfidf_BT: Tensor, tfidf_labels: Tensor, attention_mask: Tensor | None) -> Tensor:
        """TF-IDF errors at the real (unpadded) positions that are no facets, flat."""
        errors = (_fp32(tfidf_BT) - tfidf_labels).square()
        if attention_mask is None:
            return errors.flatten()
        return errors[self._without_facets(attention_mask).bool()]

    def _without_facets(self, values: Tensor) -> Tensor:
        """(B, L, ...) -> (B, T, ...), T = L - K: the [CLS] and the text behind the facets."""
        return torch.cat([values[:, :1], values[:, 1 + self.config.num_facets :]], dim=1)


def _fp32(values: Tensor) -> Tensor:
    """16-bit values in float32, others as they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _cross_entropy(logits: Tensor, labels: Tensor, count: Tensor | float | None) -> Tensor:
    """Of (N, C) logits in float32: the mean over N, or the sum over `count`."""
    return _mean(F.cross_entropy(_fp32(logits), labels, reduction="none"), count)


def _mean(terms: Tensor, count: Tensor | float | None) -> Tensor:
    """The mean of the terms, or their sum over `count` where that is given."""
    return terms.sum() / (max(terms.numel(), 1) if count is None else count)


class MultiClsBertForSequenceClassification(MultiClsBertPreTrainedModel):
    """A classifier on the pooled facets (`config.classifier_pooling`).

    "multicls" is the re-parameterised pooling of section 2.6, which keeps the facets from learning the same weights:
    c = sum_k (W_{O,k} - mean_k' W_{O,k'}) h_k + b_k, W_{O,k} from pretraining, b_k from 0; no GELU, no LayerNorm.
    With a single embedding (K <= 1) there is nothing to centre: c = W_{O,1} h_1 + b_1.
    """

    _keys_to_ignore_on_load_unexpected = PRETRAINING_HEADS

    def __init__(self, config: MultiClsBertConfig) -> None:
        super().__init__(config)
        self.num_labels = int(config.num_labels or 2)
        self.bert = MultiClsBertModel(config)
        self.facet_bias = nn.Parameter(torch.zeros(config.num_embeddings_per_sequence, config.hidden_size))
        dropout = config.classifier_dropout
        self.dropout = nn.Dropout(config.hidden_dropout_prob if dropout is None else dropout)
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    def pool(self, outputs: MultiClsBertModelOutput) -> Tensor:
        """The embedding to classify, (B, D)."""
        assert outputs.last_hidden_state is not None and outputs.pooler_output is not None
        if self.config.classifier_pooling == "cls":
            return outputs.pooler_output
        facets_BSD = self.bert.facet_states(outputs.last_hidden_state)
        centred = self.config.classifier_pooling == "multicls" and facets_BSD.shape[1] > 1
        return (self.bert.facet_head.dense(facets_BSD, centred=centred) + self.facet_bias).sum(dim=1)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> MultiClsBertClassifierOutput:
        """Classifies (B, L) token ids; `labels` (B,): class ids, or scores (MSE) when there is one label."""
        outputs = self.bert(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            **(kwargs | {"return_dict": True}),
        )
        pooled_BD = self.pool(outputs)
        logits_BC = self.classifier(self.dropout(pooled_BD))
        loss = None
        if labels is not None and self.num_labels == 1:
            loss = F.mse_loss(logits_BC.squeeze(-1).float(), labels.float())
        elif labels is not None:
            loss = F.cross_entropy(logits_BC.float(), labels)
        return MultiClsBertClassifierOutput(
            loss=loss,
            logits=logits_BC,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            pooled=pooled_BD,
        )
