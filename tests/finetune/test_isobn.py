"""IsoBN against numbers of the authors' public code (tests/fixtures/isobn_a), and where statistics go wrong easily."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from finetune.heads.isobn import IsotropicBatchNorm

FIXTURE = Path(__file__).parents[1] / "fixtures" / "isobn_a.safetensors"


def rows(count: int, dim: int = 6, seed: int = 0) -> Tensor:
    """Returns correlated dimensions of very different spread, far from 0."""
    generator = torch.Generator().manual_seed(seed)
    drawn, mixing = (torch.randn(n, dim, generator=generator) for n in (count, dim))
    return drawn @ mixing * torch.logspace(-2, 1, dim) + 1


def test_equals_the_authors_code() -> None:
    with safe_open(FIXTURE, "pt") as file:
        given = {name: file.get_tensor(name) for name in file.offset_keys()}
        options = {name: float(file.metadata()[name]) for name in ("momentum", "epsilon", "beta")}
    norm = IsotropicBatchNorm(given["batches"].shape[-1], **options)
    for batch, expected in zip(given["batches"], given["train_out"], strict=True):
        torch.testing.assert_close(norm(batch), expected, rtol=1e-5, atol=1e-5)
    evaluated = norm.eval()(given["batches"][0])
    torch.testing.assert_close(evaluated, given["eval_out"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norm.sigma, given["moving_std"])
    torch.testing.assert_close(norm.Sigma, given["moving_cov"])


@pytest.mark.parametrize("beta", [0.25, 0.5, 1.0])
def test_is_the_formula_written_out(beta: float) -> None:
    """Eq. 5 to 7 by loops in float64, with the paper's alpha and epsilon, over two batches."""
    norm, sigma = IsotropicBatchNorm(6, beta=beta), torch.zeros(6).double()
    Sigma = torch.zeros(6, 6).double()
    for seed in (1, 2):
        h = rows(9, seed=seed)
        output = norm(h)
        centred = h.double() - h.double().mean(0)
        sigma += 0.95 * (centred.square().mean(0).sqrt() - sigma)
        Sigma += 0.95 * (centred.T @ centred / 9 - Sigma)
    theta = torch.zeros(6).double()
    for i in range(6):
        correlations = [abs(float(Sigma[i, j] / (sigma[i] * sigma[j]))) for j in range(6)]
        gamma = sum(min(correlation, 1.0) ** 2 for correlation in correlations)
        assert gamma > 1.2, "the rows are correlated"
        theta[i] = (sigma[i] * gamma + 0.1) ** -beta
    v = Sigma.diagonal()
    bar = theta * (v.sum() / (v * theta**2).sum()).sqrt()
    torch.testing.assert_close(output, (bar * h).float(), rtol=1e-4, atol=1e-5)


def test_statistics_take_no_gradient_and_evaluation_does_not_move_them() -> None:
    norm, h = IsotropicBatchNorm(6), rows(8).requires_grad_()
    norm(h).sum().backward()
    torch.testing.assert_close(h.grad, norm.scale().expand(8, 6))
    assert not list(norm.parameters()) and not norm.sigma.requires_grad
    before = norm.sigma.clone()
    one, many = norm.eval()(rows(1, seed=4)), norm(torch.cat([rows(1, seed=4), rows(7, seed=5)]))
    assert torch.equal(one, many[:1]) and torch.equal(norm.sigma, before)


def test_batches_without_spread_give_numbers() -> None:
    norm, one = IsotropicBatchNorm(6), rows(1)
    assert torch.equal(norm(one), one), "nothing is known yet"
    norm(rows(8))
    before = norm.Sigma.clone()
    assert norm(one).isfinite().all() and torch.equal(norm.Sigma, before), "one row tells no spread"
    dead = rows(8)
    dead[:, 2] = 1.0
    output = IsotropicBatchNorm(6)(dead.requires_grad_())
    output.sum().backward()
    assert output.isfinite().all() and dead.grad is not None and dead.grad.isfinite().all()
    assert IsotropicBatchNorm(6)(torch.ones(4, 6)).isfinite().all()


def test_statistics_stay_in_float32(tmp_path: Path) -> None:
    plain, cast = IsotropicBatchNorm(6), nn.Sequential(IsotropicBatchNorm(6)).bfloat16()
    h = rows(16).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        output = cast(h)
    plain(h.float())
    norm: Any = cast[0]
    assert output.dtype == torch.bfloat16 and norm.sigma.dtype == norm.Sigma.dtype == torch.float32
    assert torch.equal(norm.Sigma, plain.Sigma), "not computed in bf16"
    norm.half().to("meta").to_empty(device="cpu").load_state_dict(plain.state_dict())
    assert norm.Sigma.dtype == torch.float32 and torch.equal(norm.eval()(h), plain.eval()(h))


def test_rows_that_do_not_count_move_nothing() -> None:
    """Ranks without rows repeat some, which are scaled as in evaluation."""
    norm = IsotropicBatchNorm(6)
    norm(rows(8))
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    evaluated = norm.eval()(rows(5, seed=1))
    torch.testing.assert_close(norm.train()(rows(5, seed=1), counted=False), evaluated)
    for name, buffer in norm.named_buffers():
        assert torch.equal(buffer, before[name])


def normalise(share: slice, counted: bool = True) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Returns a share of 9 rows as scaled, twice, and the statistics after one more row."""
    norm = IsotropicBatchNorm(6)
    found = [norm(rows(9, seed=seed)[share]) for seed in (1, 2)]
    norm(rows(1), counted=counted)
    return found, norm.state_dict()


def normalise_on_rank(rank: int, folder: Path) -> None:
    """Saves the results of one of two ranks with unequal shares: 3 and 6 of 9 rows, then 1 and none of one row."""
    results = normalise(slice(0, 3) if rank == 0 else slice(3, 9), counted=rank == 0)
    torch.save(results, folder / f"isobn_{rank}.pt")


def assert_ranks_are_one_batch(folder: Path) -> None:
    """Compares what both ranks have saved with one rank that has all rows."""
    (first, state), (second, other) = (torch.load(folder / f"isobn_{rank}.pt") for rank in (0, 1))
    expected, single = normalise(slice(0, 9))
    for *shares, whole in zip(first, second, expected, strict=True):
        torch.testing.assert_close(torch.cat(shares), whole, rtol=1e-3, atol=1e-3)
    for name, value in single.items():
        torch.testing.assert_close(state[name], value)
        assert torch.equal(state[name], other[name])
