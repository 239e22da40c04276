"""How evenly embeddings fill their space, on numpy arrays (IsoBN, arXiv:2005.02178), and how alike facets are.

Shape legend: N examples, D dimensions, C rows of a classifier, K facets.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform

Array = np.ndarray[Any, np.dtype[Any]]


def explained_variance(embeddings_ND: Array) -> Array:
    """Returns EV_1, EV_2, ... (Eq. 9), (min(N, D),): the share of the k largest squared singular values.

    They are those of the centred embeddings. All are nan if the embeddings are all the same.
    """
    squares = np.linalg.svd(_centred(embeddings_ND), compute_uv=False) ** 2
    with np.errstate(invalid="ignore"):
        return np.asarray(np.cumsum(squares) / squares.sum())


def correlation(embeddings_ND: Array) -> Array:
    """Returns |Pearson| between dimensions (D, D), correlated ones side by side (Figure 5).

    The order is that of average-linkage clustering with distance 1 - |r|. A constant dimension correlates with none.
    """
    with np.errstate(invalid="ignore"):
        matrix = np.abs(np.nan_to_num(np.corrcoef(_centred(embeddings_ND), rowvar=False)))
    np.fill_diagonal(matrix, 1)
    order = leaves_list(linkage(squareform(1 - matrix, checks=False), "average"))
    return matrix[np.ix_(order, order)]


def logit_variance(embeddings_ND: Array, weight_CD: Array) -> Array:
    """Returns each principal component's share of the logits' variance, largest component first (Figure 3).

    Var_i = w_i (W^T v_i)^2 with the i-th eigenvalue and eigenvector of the embeddings' covariance; shares are averaged
    over classes. The mean of the class weights does not affect predictions, so it is subtracted first.
    """
    weight = weight_CD - weight_CD.mean(axis=0) if len(weight_CD) > 1 else weight_CD
    _, singular, directions = np.linalg.svd(_centred(embeddings_ND), full_matrices=False)
    variance = singular**2 * (weight @ directions.T) ** 2
    total = np.maximum(variance.sum(axis=1, keepdims=True), np.finfo(float).tiny)
    return np.asarray((variance / total).mean(axis=0))


def facet_similarity(facets_NKD: Array) -> Array:
    """Returns the mean cosine between each two facets of an example, (K, K)."""
    unit = facets_NKD / np.linalg.norm(facets_NKD, axis=-1, keepdims=True)
    return np.asarray(np.einsum("nid,njd->ij", unit, unit) / len(unit))


def off_diagonal_mean(matrix: Array) -> float:
    """Returns the mean of a square matrix without its diagonal."""
    return float(matrix[~np.eye(len(matrix), dtype=bool)].mean())


def _centred(embeddings_ND: Array) -> Array:
    embeddings = np.asarray(embeddings_ND, dtype=np.float64)
    return np.asarray(embeddings - embeddings.mean(axis=0))
