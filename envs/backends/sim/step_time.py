"""The time of one engine step: a law of six coefficients, and its integer tables.

With p prompt tokens and n decoding sequences in a step, which read kv tokens of context, and a
pairs of a prompt token and a token it attends to::

    step_ms = base + (weights**2 + (dense * (p + n))**2)**(1/2)
              + sequence * n + kv_read * kv + prefill_attention * a

The second term is a roofline with a smooth corner: the weights are read once, or the matrix
products of the tokens take longer. Where the coefficients come from and how well they hold is in
docs/engine_validation.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.profile import StepTimeCoefficients

ROOFLINE_EXPONENT: Final = 2

_PS_PER_MS: Final = 1e9
_FS_PER_MS: Final = 1e12


@dataclass(frozen=True)
class StepTables:
    """The step time in integers, so that sums of equal steps are exact.

    With a2 the sum over prompt chunks of ``tokens * (2 * computed_before + tokens + 1)``::

        step_ps = dense_ps[p + n] + sequence_ps[n] + kv_ps[n] * kv + prefill_pair_fs * a2 // 1000

    Attributes:
        dense_ps: (max_num_batched_tokens + 1,) int64, picoseconds for this many tokens.
        sequence_ps: (max_num_seqs + 1,) int64, picoseconds for this many decoding sequences.
        kv_ps: (max_num_seqs + 1,) int64, picoseconds a token of context, with this many
            decoding sequences.
        prefill_pair_fs: femtoseconds per unit of a2, which counts every pair twice.
    """

    dense_ps: npt.NDArray[np.int64]
    sequence_ps: npt.NDArray[np.int64]
    kv_ps: npt.NDArray[np.int64]
    prefill_pair_fs: int


def step_time_ms(
    coefficients: StepTimeCoefficients,
    prefill_tokens: npt.ArrayLike,
    decode_seqs: npt.ArrayLike,
    kv_tokens: npt.ArrayLike,
    attention_pairs: npt.ArrayLike,
) -> npt.NDArray[np.float64]:
    """Step times in milliseconds; the arguments are arrays that broadcast against each other.

    Args:
        coefficients: of the law.
        prefill_tokens: prompt tokens in the step, p.
        decode_seqs: sequences that decode one token each, n.
        kv_tokens: context tokens that these sequences read, kv.
        attention_pairs: sum over prompt chunks of tokens x mean context, a.
    """
    n = np.asarray(decode_seqs, np.float64)
    return np.asarray(
        _dense_ms(coefficients, np.asarray(prefill_tokens, np.float64) + n)
        + coefficients.sequence_ms * n
        + coefficients.kv_read_ms_per_token * np.asarray(kv_tokens, np.float64)
        + coefficients.prefill_attention_ms_per_pair * np.asarray(attention_pairs, np.float64)
    )


def step_tables(
    coefficients: StepTimeCoefficients, max_num_batched_tokens: int, max_num_seqs: int
) -> StepTables:
    """Tabulate the law for the steps that a scheduler of these limits can form."""
    tokens = np.arange(max_num_batched_tokens + 1, dtype=np.float64)
    sequences = np.arange(max_num_seqs + 1, dtype=np.float64)
    dense_ps = _PS_PER_MS * _dense_ms(coefficients, tokens)
    sequence_ps = _PS_PER_MS * coefficients.sequence_ms * sequences
    kv_ps = np.full(sequences.size, _PS_PER_MS * coefficients.kv_read_ms_per_token)
    pair_fs = _FS_PER_MS * coefficients.prefill_attention_ms_per_pair / 2
    return StepTables(
        dense_ps=_integers(dense_ps),
        sequence_ps=_integers(sequence_ps),
        kv_ps=_integers(kv_ps),
        prefill_pair_fs=round(pair_fs),
    )


def _dense_ms(
    coefficients: StepTimeCoefficients, tokens: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    compute_ms = coefficients.dense_ms_per_token * tokens
    roofline_ms = (coefficients.weights_ms**ROOFLINE_EXPONENT + compute_ms**ROOFLINE_EXPONENT) ** (
        1 / ROOFLINE_EXPONENT
    )
    return np.asarray(coefficients.base_ms + roofline_ms)


def _integers(values: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    return np.rint(values).astype(np.int64)
