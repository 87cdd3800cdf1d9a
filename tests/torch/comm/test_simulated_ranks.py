"""Ranks as threads: the same exchanges as between processes, separate random numbers, and no
hang."""

from __future__ import annotations

import pytest
import torch

from steelyard.comm.simulated_ranks import SimulatedRanks


def test_simulated_collectives_equal_those_of_processes() -> None:
    together = SimulatedRanks(3)

    def work(rank: int) -> list[torch.Tensor]:
        calls = together.channel(rank).calls
        x = torch.arange(6.0) + 10 * rank
        inside = x.clone()
        calls["_c10d_functional.all_reduce_.default"](inside, "sum", "")
        rows = (torch.arange(3.0) + 10 * rank).view(3, 1)
        return [
            calls["_c10d_functional.all_reduce.default"](x, "sum", ""),
            inside,
            calls["_c10d_functional.reduce_scatter_tensor.default"](x, "sum", 3, ""),
            calls["steelyard.all_gather"](x[:1], 3, ""),
            calls["_c10d_functional.all_to_all_single.default"](rows, [1] * 3, [1] * 3, ""),
        ]

    total = 3 * torch.arange(6.0) + 30
    for rank, (summed, inside, scattered, gathered, handed) in enumerate(together.run(work)):
        assert torch.equal(summed, total)
        assert torch.equal(inside, total)
        assert torch.equal(scattered, total.chunk(3)[rank])
        assert gathered.tolist() == [0, 10, 20]
        assert handed.flatten().tolist() == [rank, 10 + rank, 20 + rank]


def test_each_simulated_rank_draws_its_own_random_numbers() -> None:
    torch.manual_seed(3)
    alone = [float(torch.rand(())) for _ in range(3)]
    torch.manual_seed(3)
    together = SimulatedRanks(2)

    def work(rank: int) -> list[float]:
        found = []
        for _ in range(3):
            found.append(float(torch.rand(())))
            together.channel(rank).calls["steelyard.all_gather"](torch.zeros(1), 2, "")
        return found

    assert together.run(work) == [alone, alone]


def test_the_error_of_one_simulated_rank_is_raised() -> None:
    together = SimulatedRanks(3)

    def work(rank: int) -> None:
        gather = together.channel(rank).calls["steelyard.all_gather"]
        gather(torch.zeros(1), 3, "")
        if rank == 1:
            raise ValueError("rank 1 broke")
        gather(torch.zeros(1), 3, "")

    with pytest.raises(ValueError, match="rank 1 broke"):
        together.run(work)
