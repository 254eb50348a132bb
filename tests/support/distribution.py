"""Compares counts of sampled tokens with the probabilities that they should have."""

from __future__ import annotations

import math
from collections import Counter

import torch


def assert_distribution(counts: Counter[int], probabilities: torch.Tensor) -> None:
    """Asserts chi-squared over tokens expected at least five times, the rest pooled; 5 standard deviations."""
    total = sum(counts.values())
    assert all(probabilities[token] > 0 for token in counts)
    expected = probabilities.double() * total
    observed = torch.zeros(len(probabilities), dtype=torch.float64)
    for token, count in counts.items():
        observed[token] = count
    common = expected >= 5
    pairs = [*zip(observed[common].tolist(), expected[common].tolist(), strict=True)]
    pairs.append((observed[~common].sum().item(), expected[~common].sum().item()))
    statistic = sum((found - wanted) ** 2 / wanted for found, wanted in pairs if wanted > 0)
    freedom = len(pairs) - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom) + 10, (statistic, freedom)
