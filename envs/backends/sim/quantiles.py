"""Sorting and ranks for the windows' percentiles, compiled into the kernels that use them."""

from __future__ import annotations

from typing import Any

import numba as nb


@nb.njit(nogil=True, cache=True, inline="always")
def sort(values: Any) -> None:
    """Sort in place: by insertion where few, as windows mostly are (a library call costs more)."""
    if values.shape[0] > 32:
        values.sort()
        return
    for i in range(1, values.shape[0]):
        value = values[i]
        j = i
        while j > 0 and values[j - 1] > value:
            values[j] = values[j - 1]
            j -= 1
        values[j] = value


@nb.njit(nogil=True, cache=True, inline="always")
def rank(share: float, n: int) -> int:
    """Index of a quantile among n sorted values, as the study takes it."""
    return min(int(share * n), n - 1)
