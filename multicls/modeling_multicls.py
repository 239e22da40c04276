"""Multi-CLS BERT (arXiv:2210.05043). Travels with saved models: imports only torch, transformers and its configuration.

Shape legend: G groups of n examples (the examples of a group are each other's negatives), P parts of an example,
B = P * G * n sequences, L tokens, D hidden size, K facets (extra CLS tokens), S = max(K, 1) embeddings of one sequence,
V vocabulary, C classes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, BertForMaskedLM, BertModel, BertPreTrainedModel
from transformers import initialization as init
from transformers.loss.loss_utils import ForSequenceClassificationLoss
from transformers.modeling_outputs import BaseModelOutputWithPooling, ModelOutput, SequenceClassifierOutput
from transformers.models.bert.modeling_bert import BertLayer, BertLMPredictionHead, BertPredictionHeadTransform
from transformers.utils import can_return_tuple

from .configuration_multicls import MultiClsBertConfig

PRETRAINING_HEADS = [r"^cls\."]  # weights of `MultiClsBertForPreTraining` that the other classes do not need
ALL_BUT_MLM = [r"^cls\.(?!predictions\.)", r"^bert\.pooler\."]
IGNORE_INDEX = -100  # label of positions without a target
VARLEN = "multicls_varlen"  # `attn_implementation` that leaves out the padding


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attends within each of B sequences of which only the T real tokens are there; flash attention on GPU.

    Args:
        module: Not used, like `attention_mask` and `kwargs`.
        query: (1, heads, T, head size), like `key` and `value`.
        cu_seqlens: (B + 1,) index of the first token of each sequence, and T.
        max_seqlen: An upper bound of the lengths.
        dropout: Probability of dropping an attention weight.
        scaling: Factor of the scores; None: 1 / sqrt(head size).

    Returns:
        (1, T, heads, head size), and None for the attention weights.
    """

    def ragged(values: Tensor) -> Tensor:
        rows = values[0].transpose(0, 1)
        nested: Tensor = torch.nested.nested_tensor_from_jagged(rows, cu_seqlens, min_seqlen=1, max_seqlen=max_seqlen)
        return nested.transpose(1, 2)

    query, key, value = ragged(query), ragged(key), ragged(value)
    attended = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, scale=scaling)
    return attended.transpose(1, 2).values()[None], None


AttentionInterface.register(VARLEN, varlen_attention)


class FacetLinear(nn.Module):
    """One linear map D -> D without bias for each facet: y_k = W_k h_k."""

    def __init__(self, num_facets: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_facets, hidden_size, hidden_size))

    def forward(self, hidden_BKD: Tensor, centred: bool = False) -> Tensor:
        """Maps (B, K, D) to (B, K, D); `centred` subtracts the mean of the K matrices first (section 2.6)."""
        weight_KDD = self.weight - self.weight.mean(dim=0) if centred else self.weight
        return torch.einsum("bkd,ked->bke", hidden_BKD, weight_KDD)


class FacetLayerNorm(nn.Module):
    """One LayerNorm for each facet."""

    def __init__(self, num_facets: int, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_facets, hidden_size))
        self.bias = nn.Parameter(torch.zeros(num_facets, hidden_size))
        self.eps = eps

    def forward(self, hidden_BKD: Tensor) -> Tensor:
        """Normalises (B, K, D) over D, then scales and shifts with the facet's weights."""
        return F.layer_norm(hidden_BKD, hidden_BKD.shape[-1:], eps=self.eps) * self.weight + self.bias


class FacetHead(nn.Module):
    """Facet embeddings c_k = LayerNorm(GELU(W_{O,k} h_k)) from the last hidden states of the facets."""

    def __init__(self, config: MultiClsBertConfig) -> None:
        super().__init__()
        shape = config.num_embeddings_per_sequence, config.hidden_size
        self.dense = FacetLinear(*shape)
        self.LayerNorm = FacetLayerNorm(*shape, eps=config.layer_norm_eps)

    def forward(self, hidden_BSD: Tensor) -> Tensor:
        """Returns (B, S, D) from (B, S, D)."""
        return self.LayerNorm(F.gelu(self.dense(hidden_BSD)))


class FacetBertLayer(BertLayer):
    """A BERT layer that applies the inserted linear layers to its output at the facet positions (section 2.5)."""

    def __init__(self, config: MultiClsBertConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx=layer_idx)
        self.facet_slice = config.facet_slice
        self.facets = FacetLinear(config.num_facets, config.hidden_size)

    def forward(self, *args: Any, facet_positions: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Returns (B, L, D); [CLS] and text are the output of the plain layer, whose arguments it takes.

        `facet_positions`, (B * K,), is where the facets are if the sequences are packed into one, (1, T, D).
        """
        hidden_BLD = super().forward(*args, **kwargs)
        if facet_positions is not None:
            facets_BKD = hidden_BLD[0].index_select(0, facet_positions).unflatten(0, (-1, len(self.facets.weight)))
            return hidden_BLD[0].index_copy(0, facet_positions, self.facets(facets_BKD).flatten(0, 1))[None]
        before, after = hidden_BLD[:, : self.facet_slice.start], hidden_BLD[:, self.facet_slice.stop :]
        return torch.cat([before, self.facets(hidden_BLD[:, self.facet_slice]), after], dim=1)


@dataclass
class MultiClsBertModelOutput(BaseModelOutputWithPooling):
    """BERT's output with `facet_embeddings` c_k, (B, S, D)."""

    facet_embeddings: Tensor | None = None


class McqtScores(NamedTuple):
    """Scores s(x, y) of Eq. 2 in both directions; the target of query q of a group is column q.

    Attributes:
        forward: (G * n, 2n); row q scores A_q against all B, then all C of its group; (G * n, n) without C.
        backward: (G * n, 2n); row q scores C_q against all B, then all A; None without C.
    """

    forward: Tensor
    backward: Tensor | None


@dataclass
class MultiClsBertForPreTrainingOutput(ModelOutput):
    """Output of `MultiClsBertForPreTraining`.

    Attributes:
        loss: Sum of `losses`; None if there are none.
        losses: Scalars by name: "mlm", "tfidf", "so" (where their labels were given) and "mcqt" (with `mcqt_scores`).
        last_hidden_state: (B, L, D).
        facet_embeddings: (B, S, D).
        mcqt_scores: A `McqtScores` pair; None if the batch does not divide into parts.
        so_logits: (B, 2); class 1 is "swapped".
        tfidf: (B, L - K), predicted TF-IDF of [CLS] and the text; the facet positions 1..K are left out.
        mlm_logits: (M, V), one row for each labelled position in row-major order; without labels (B, L, V).
        hidden_states: (B, L, D) after the embeddings and after each layer, if asked for.
        attentions: (B, heads, L, L) of each layer, if asked for.
    """

    loss: Tensor | None = None
    losses: dict[str, Tensor] | None = None
    last_hidden_state: Tensor | None = None
    facet_embeddings: Tensor | None = None
    mcqt_scores: tuple[Tensor, Tensor | None] | None = None
    so_logits: Tensor | None = None
    tfidf: Tensor | None = None
    mlm_logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass
class MultiClsBertClassifierOutput(SequenceClassifierOutput):
    """BERT's classifier output with `pooled`, (B, D): the embedding before dropout that was classified."""

    pooled: Tensor | None = None


def mcqt_scores(queries_nSD: Tensor, candidates_mSD: Tensor, best_pair_weight: float) -> Tensor:
    """Scores each query against each candidate (Eq. 2), in float32 at least (TF32 where torch is told to use it).

    s(x, y) = lambda * max_ij cos(x_i, y_j) + (1 - lambda) * cos(sum_i x_i, sum_j y_j), no temperature.

    Args:
        queries_nSD: (..., n, S, D) facet embeddings of n sequences.
        candidates_mSD: (..., m, S, D) facet embeddings of m sequences.
        best_pair_weight: lambda.

    Returns:
        (..., n, m).
    """
    queries_nSD, candidates_mSD = _fp32(queries_nSD), _fp32(candidates_mSD)
    unit_queries, unit_candidates = F.normalize(queries_nSD, dim=-1), F.normalize(candidates_mSD, dim=-1)
    pairs = unit_queries.flatten(-3, -2) @ unit_candidates.flatten(-3, -2).mT  # (..., n * S, m * S)
    best = pairs.unflatten(-1, candidates_mSD.shape[-3:-1]).unflatten(-3, queries_nSD.shape[-3:-1]).amax(dim=(-1, -3))
    query_sums, candidate_sums = queries_nSD.sum(dim=-2), candidates_mSD.sum(dim=-2)
    sums = F.normalize(query_sums, dim=-1) @ F.normalize(candidate_sums, dim=-1).mT
    return best_pair_weight * best + (1.0 - best_pair_weight) * sums


def part_scores(
    facets_BSD: Tensor,
    num_parts: int,
    best_pair_weight: float,
    group_size: int | None = None,
    gather: Callable[[Tensor], Tensor] | None = None,
) -> McqtScores:
    """Scores the parts of a part-major batch (all A, then all B, then all C), group by group in one batched product.

    Args:
        facets_BSD: facet embeddings; within a part the examples of a group are neighbours.
        num_parts: P.
        best_pair_weight: lambda.
        group_size: n, the examples that are each other's negatives; None: all examples are one group.
        gather: Maps one part's embeddings (G, n, S, D) to its candidates (G, m, S, D); the first n are the input.
            Training adds the embeddings of other ranks. None: the candidates are the input.

    Raises:
        ValueError: The batch does not divide into `num_parts` parts, or a part not into groups of `group_size`.
    """
    examples, rest = divmod(facets_BSD.shape[0], num_parts)
    if rest:
        raise ValueError(
            f"{facets_BSD.shape[0]} sequences do not divide into {num_parts} parts: a batch is part-major, "
            f"({num_parts}n, L): all first parts, then all second parts, ..."
        )
    size = group_size or examples
    if examples % size:
        raise ValueError(f"{examples} examples do not divide into groups of {size}")
    parts = facets_BSD.unflatten(0, (num_parts, examples // size, size)).unbind()
    first, second, *hard = [gather(part) for part in parts] if gather else parts
    if not hard:
        return McqtScores(mcqt_scores(parts[0], second, best_pair_weight).flatten(0, 1), None)
    queries = torch.stack([parts[0], parts[2]])
    candidates = torch.stack([torch.cat([second, hard[0]], dim=1), torch.cat([second, first], dim=1)])
    return McqtScores(*mcqt_scores(queries, candidates, best_pair_weight).flatten(1, 2).unbind())


def mcqt_loss(scores: McqtScores, group_size: int | None = None) -> Tensor:
    """Returns the MCQT loss: both directions' mean cross-entropies over queries, summed. Chance level: 2 ln(2n).

    Arguments are the output of `part_scores` and the `group_size` that it was given.
    """
    targets = torch.arange(len(scores.forward), device=scores.forward.device)
    if group_size is not None:
        targets = targets % group_size
    directions = [direction for direction in scores if direction is not None]
    return F.cross_entropy(torch.cat(directions), targets.repeat(len(directions))) * len(directions)


class MultiClsBertPreTrainedModel(BertPreTrainedModel):
    """Base class of the Multi-CLS models: initialises their weights."""

    config_class = MultiClsBertConfig
    config: MultiClsBertConfig
    base_model_prefix = "bert"
    _no_split_modules = ["BertEmbeddings", "BertLayer", "FacetBertLayer"]  # noqa: RUF012 (the base class's form)
    accepts_loss_kwargs = False  # the losses are means over a batch: a Trainer divides them by its accumulation steps

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

    Its inputs are those of `BertModel`, tokenized as `[CLS] [C1] ... [CK] text [SEP]` by the tokenizer saved with it.
    """

    _keys_to_ignore_on_load_unexpected = PRETRAINING_HEADS

    def __init__(self, config: MultiClsBertConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config, add_pooling_layer=add_pooling_layer)
        for layer in config.facet_layers or []:
            self.encoder.layer[layer - 1] = FacetBertLayer(config, layer_idx=layer - 1)
        self.facet_head = FacetHead(config)
        self.checks_input = True  # until it has warned
        self.post_init()

    def facet_states(self, hidden_BLD: Tensor) -> Tensor:
        """Returns (B, S, D): the hidden states at the facet positions, or of [CLS] if there are no facets."""
        return hidden_BLD[:, self.config.facet_slice] if self.config.num_facets else hidden_BLD[:, :1]

    def embed_sentences(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Returns one embedding of each sequence, (B, D), by `config.sentence_embedding`.

        "mean" is the mean of the last hidden states of [CLS], the text and [SEP]. "facets" is the sum of the facet
        embeddings, whose cosine is the second term of the MCQT score (Eq. 2).
        """
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
        outputs = self(**inputs, return_dict=True)
        if self.config.sentence_embedding == "facets":
            return outputs.facet_embeddings.sum(dim=1)
        weights_BL = torch.ones_like(input_ids) if attention_mask is None else attention_mask.clone()
        weights_BL[:, self.config.facet_slice] = 0
        hidden_BLD = outputs.last_hidden_state
        means_BD = torch.einsum("bl,bld->bd", weights_BL.to(_fp32(hidden_BLD).dtype), _fp32(hidden_BLD))
        return (means_BD / weights_BL.sum(dim=1, keepdim=True)).to(hidden_BLD.dtype)

    def similarity(self, queries_nSD: Tensor, candidates_mSD: Tensor) -> Tensor:
        """Returns the MCQT scores (n, m) of facet embeddings with the lambda of pretraining, see `mcqt_scores`."""
        return mcqt_scores(queries_nSD, candidates_mSD, self.config.mcqt_lambda)

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
        """Encodes (B, L) token ids. Further arguments as `BertModel`.

        With `attn_implementation="multicls_varlen"` the layers compute the tokens of `attention_mask` alone, and there
        are no `hidden_states` and `attentions`.
        """
        kwargs |= {"return_dict": True}
        self._check_input(input_ids, inputs_embeds)
        if self.config._attn_implementation == VARLEN:
            assert input_ids is not None
            return self._forward_packed(input_ids, attention_mask, token_type_ids, **kwargs)
        outputs = super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        return MultiClsBertModelOutput(
            last_hidden_state=outputs.last_hidden_state,
            pooler_output=outputs.pooler_output,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            facet_embeddings=self.facet_head(self.facet_states(outputs.last_hidden_state)),
        )

    def _check_input(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> None:
        """Warns once of input that another tokenizer has made, or that is padded on the left.

        In training, and on a GPU, only the first batch is looked at: the host has to wait for its values.

        Raises:
            ValueError: The sequences are too short to hold [CLS] and the facets.
        """
        given, facets = inputs_embeds if input_ids is None else input_ids, self.config.num_facets
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or given is None or given.is_meta:
            return
        if given.shape[1] <= facets:
            raise ValueError(
                f"an input of {given.shape[1]} tokens has no room for [CLS] and {facets} facets; use the tokenizer "
                "that was saved with the model"
            )
        if input_ids is None or not self.checks_input:
            return
        problem, found_BK = "", input_ids[:, self.config.facet_slice]
        padding, facet_ids = self.config.pad_token_id, self.config.facet_ids
        if padding is not None and input_ids[:, 0].eq(padding).any():
            problem = "is padded on the left; set tokenizer.padding_side = 'right'"
        elif facet_ids and found_BK.ne(found_BK.new_tensor(facet_ids)).any():
            problem = f"lacks the facets (ids {facet_ids}) after [CLS]; use the tokenizer that was saved with the model"
        if problem:
            warnings.warn(f"the outputs are not those of the trained model: the input {problem}", stacklevel=2)
        self.checks_input = input_ids.is_cpu and not self.training and not problem

    def _forward_packed(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        token_positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> MultiClsBertModelOutput:
        """Encodes the T real tokens as one sequence and puts the hidden states back in place, zeros on the padding.

        Args:
            input_ids: (B, L), padded on the right; `attention_mask` and `token_type_ids` likewise.
            token_positions: (T,) indices of the real tokens in the flattened (B * L) batch, ascending. Found from
                `attention_mask` if not given, which makes the host wait for the device.
            cu_seqlens: (B + 1,) index of the first real token of each sequence, and T.
        """
        rows, length = input_ids.shape
        if token_positions is None or cu_seqlens is None:
            real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            token_positions = real.flatten().nonzero().squeeze(1)
            cu_seqlens = F.pad(real.sum(dim=1).cumsum(0), (1, 0))
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        at = self.config.facet_slice
        facets = torch.arange(at.start, at.stop, device=input_ids.device)
        outputs = super().forward(
            input_ids=input_ids.flatten()[token_positions][None],
            token_type_ids=types.flatten()[token_positions][None],
            position_ids=(token_positions % length)[None],
            cu_seqlens=cu_seqlens,
            max_seqlen=length,
            facet_positions=(cu_seqlens[:-1, None] + facets).flatten(),
            **kwargs,
        )
        packed_TD = outputs.last_hidden_state[0]
        empty = packed_TD.new_zeros(rows * length, packed_TD.shape[1])
        hidden_BLD = empty.index_copy(0, token_positions, packed_TD).unflatten(0, (rows, length))
        return MultiClsBertModelOutput(
            last_hidden_state=hidden_BLD,
            pooler_output=None if self.pooler is None else self.pooler(hidden_BLD),
            facet_embeddings=self.facet_head(self.facet_states(hidden_BLD)),
        )


class TfidfHead(nn.Module):
    """Predicts the scaled TF-IDF of a token: dense, GELU, LayerNorm, Linear(D, 1)."""

    def __init__(self, config: MultiClsBertConfig) -> None:
        super().__init__()
        self.transform = BertPredictionHeadTransform(config)
        self.decoder = nn.Linear(config.hidden_size, 1)

    def forward(self, hidden_BLD: Tensor) -> Tensor:
        """Returns (B, L) from (B, L, D)."""
        return self.decoder(self.transform(hidden_BLD)).squeeze(-1)


class MultiClsPreTrainingHeads(nn.Module):
    """The pretraining heads; `predictions` and `seq_relationship` have the shapes of `BertForPreTraining`."""

    def __init__(self, config: MultiClsBertConfig) -> None:
        super().__init__()
        self.predictions = BertLMPredictionHead(config)
        self.tfidf = TfidfHead(config)
        self.order_transform = nn.Linear(config.num_embeddings_per_sequence * config.hidden_size, config.hidden_size)
        self.seq_relationship = nn.Linear(config.hidden_size, 2)

    def sentence_order(self, facets_BSD: Tensor) -> Tensor:
        """Returns the order logits (B, 2) from (B, S, D): W2 (L_SO concat_k(h_k))."""
        return self.seq_relationship(self.order_transform(facets_BSD.flatten(1)))


class MultiClsBertForMaskedLM(MultiClsBertPreTrainedModel, BertForMaskedLM):
    """BERT's masked-LM model on an encoder with facets; logits (B, L, V), `labels` (B, L) with -100 elsewhere.

    Its weights are the encoder and the MLM head of `MultiClsBertForPreTraining`.
    """

    _keys_to_ignore_on_load_unexpected = ALL_BUT_MLM

    def __init__(self, config: MultiClsBertConfig) -> None:
        super().__init__(config)
        self.bert = MultiClsBertModel(config, add_pooling_layer=False)
        self.post_init()


class MultiClsBertForPreTraining(MultiClsBertPreTrainedModel):
    """Multi-CLS BERT with the heads of its four objectives: MLM, TF-IDF, sentence order (SO) and MCQT.

    `from_pretrained` also starts from any BERT checkpoint (see `multicls.from_bert.from_bert`, which reports what was
    found in it); its MLM head is kept, and its next-sentence classifier starts the sentence-order classifier.
    """

    _tied_weights_keys = BertForMaskedLM._tied_weights_keys

    def __init__(self, config: MultiClsBertConfig) -> None:
        super().__init__(config)
        self.bert = MultiClsBertModel(config)
        self.cls = MultiClsPreTrainingHeads(config)
        self.post_init()

    get_output_embeddings = BertForMaskedLM.get_output_embeddings
    set_output_embeddings = BertForMaskedLM.set_output_embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        tfidf_labels: Tensor | None = None,
        so_labels: Tensor | None = None,
        masked_positions: Tensor | None = None,
        group_size: int | None = None,
        normalizers: Mapping[str, Tensor | float] | None = None,
        gather: Callable[[Tensor], Tensor] | None = None,
        **kwargs: Any,
    ) -> MultiClsBertForPreTrainingOutput:
        """Computes the heads of all objectives, and the losses of those whose labels are given.

        MCQT needs no labels but a part-major batch: all first parts, then all second parts, ... It is left out where B
        does not divide into parts.

        Args:
            input_ids: (B, L), `[CLS] [C1..CK] segment [SEP] segment [SEP]`, padded.
            attention_mask: (B, L), 0 on padding.
            token_type_ids: (B, L), 0 up to the first [SEP], 1 for the second segment and its [SEP].
            labels: (B, L) masked-LM targets, -100 elsewhere. With them the MLM head is computed where they are, only.
            tfidf_labels: (B, L - K) targets in 0..10, without the facet positions. The loss is the mean over unpadded
                positions.
            so_labels: (B,) 1 = the segments are swapped, 0 = in order, -100 = the part has one segment.
            masked_positions: (M,) indices of the labelled positions in the flattened (B * L) batch, ascending. Found
                from `labels` if not given, which makes the host wait for the device.
            group_size: n, the examples that are each other's negatives in MCQT; None: all examples are one group.
            normalizers: Divisors of the summed "mlm", "tfidf" and "so" losses, instead of their numbers of terms in
                this batch. Training passes the batch's share of the whole optimizer step.
            gather: Adds candidates to MCQT, see `part_scores`.
            **kwargs: Arguments of `BertModel`.

        Raises:
            ValueError: `group_size` or `gather` is given, and B does not divide into the parts and groups.
        """
        encoded = self.bert(
            input_ids=input_ids,
            attention_mask=self._encoder_mask(attention_mask),
            token_type_ids=token_type_ids,
            **(kwargs | {"return_dict": True, "use_cache": False}),
        )
        if labels is not None and masked_positions is None:
            masked_positions = (labels.flatten() != IGNORE_INDEX).nonzero().squeeze(1)
        heads = self._heads(encoded, masked_positions, group_size, gather)
        losses, count = {}, (normalizers or {}).get
        if heads["mcqt_scores"] is not None:
            losses["mcqt"] = mcqt_loss(heads["mcqt_scores"], group_size)
        if labels is not None and masked_positions is not None:
            losses["mlm"] = _cross_entropy(heads["mlm_logits"], _pick(labels, masked_positions), count("mlm"))
        if tfidf_labels is not None:
            losses["tfidf"] = self._tfidf_loss(heads["tfidf"], tfidf_labels, attention_mask, count("tfidf"))
        if so_labels is not None:
            losses["so"] = _cross_entropy(heads["so_logits"], so_labels, count("so"))
        total = torch.stack(list(losses.values())).sum() if losses else None
        return MultiClsBertForPreTrainingOutput(loss=total, losses=losses, **heads)

    def _heads(
        self,
        encoded: MultiClsBertModelOutput,
        masked_positions: Tensor | None,
        group_size: int | None,
        gather: Callable[[Tensor], Tensor] | None,
    ) -> dict[str, Any]:
        """Returns the fields of the output but the losses. Arguments and errors are those of `forward`."""
        hidden_BLD, facets_BSD, parts = encoded.last_hidden_state, encoded.facet_embeddings, self.config.num_parts
        assert hidden_BLD is not None and facets_BSD is not None
        scores = None
        if group_size or gather or len(facets_BSD) % parts == 0:
            scores = part_scores(facets_BSD, parts, self.config.mcqt_lambda, group_size, gather)
        mlm_hidden = hidden_BLD if masked_positions is None else _pick(hidden_BLD, masked_positions)
        return {
            "last_hidden_state": hidden_BLD,
            "facet_embeddings": facets_BSD,
            "mcqt_scores": scores,
            "so_logits": self.cls.sentence_order(self.bert.facet_states(hidden_BLD)),
            "tfidf": self.cls.tfidf(self._without_facets(hidden_BLD)),
            "mlm_logits": self.cls.predictions(mlm_hidden),
            "hidden_states": encoded.hidden_states,
            "attentions": encoded.attentions,
        }

    def _encoder_mask(self, attention_mask: Tensor | None) -> Tensor | None:
        """Returns the mask in the form that the attention takes, (B, 1, 1, L).

        transformers would look at the values first, to drop a mask without padding, and so wait for the device.
        """
        if attention_mask is None or attention_mask.ndim != 2 or self.config._attn_implementation != "sdpa":
            return attention_mask
        return attention_mask[:, None, None, :].bool()

    def _tfidf_loss(
        self, tfidf_BT: Tensor, tfidf_labels: Tensor, attention_mask: Tensor | None, count: Tensor | float | None
    ) -> Tensor:
        """Returns the squared error at the unpadded positions without facets: their mean, or their sum over `count`."""
        errors = (_fp32(tfidf_BT) - tfidf_labels).square()
        if attention_mask is None:
            return errors.mean() if count is None else errors.sum() / count
        real = self._without_facets(attention_mask).bool()
        return errors.where(real, 0.0).sum() / (real.sum().clamp(min=1) if count is None else count)

    def _without_facets(self, values: Tensor) -> Tensor:
        """Returns (B, T, ...) from (B, L, ...), T = L - K: [CLS] and the text after the facets."""
        at = self.config.facet_slice
        return torch.cat([values[:, : at.start], values[:, at.stop :]], dim=1)


def _fp32(values: Tensor) -> Tensor:
    """Returns 16-bit values in float32, others unchanged."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _pick(values_BL: Tensor, positions_M: Tensor) -> Tensor:
    """Returns (M, ...) from (B, L, ...): the values at positions of the flattened (B * L) batch."""
    return values_BL.flatten(0, 1).index_select(0, positions_M)


def _cross_entropy(logits: Tensor, labels: Tensor, count: Tensor | float | None) -> Tensor:
    """Returns the summed cross-entropy of (N, C) logits over `count`, by default over the number of real labels."""
    loss = F.cross_entropy(_fp32(logits), labels, ignore_index=IGNORE_INDEX, reduction="sum")
    return loss / ((labels != IGNORE_INDEX).sum().clamp(min=1) if count is None else count)


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
        """Returns the embedding to classify, (B, D)."""
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
        """Classifies (B, L) token ids.

        `config.problem_type` says what `labels` are, as for `BertForSequenceClassification`: "regression" (B,) or
        (B, C) numbers, "single_label_classification" (B,) class ids, "multi_label_classification" (B, C) zeros and
        ones. If it is None, the first labels decide.
        """
        outputs = self.bert(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            **(kwargs | {"return_dict": True}),
        )
        pooled_BD = self.pool(outputs)
        logits_BC = self.classifier(self.dropout(pooled_BD))
        loss = None
        if labels is not None:
            loss = ForSequenceClassificationLoss(labels, _fp32(logits_BC), self.config)
        return MultiClsBertClassifierOutput(
            loss=loss,
            logits=logits_BC,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            pooled=pooled_BD,
        )
