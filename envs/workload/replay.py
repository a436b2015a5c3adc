"""Replay of a trace: the requests of an episode are rows of a window of the trace."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.scenario import TraceArrivals
from vllm_tenant_tuning.workload.arrivals import check_events
from vllm_tenant_tuning.workload.traces import Trace, TraceError

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class TraceReplay:
    """Arrivals of a trace, prepared for a horizon.

    A window without `window_s` ends one mean gap after the last request, so that the rate of
    the looped window is that of the trace. Every repetition of a looped window draws anew which
    requests are kept.

    Args:
        arrivals: which window of the trace is played, and how.
        trace: the trace.
        horizon_s: length of an episode in seconds.

    Raises:
        TraceError: the window holds no request, or its end cannot be told.
        ScenarioError: an episode would have more requests than fit into memory.

    Attributes:
        mean_rate_per_s: expected arrivals over the horizon, divided by the horizon.
        expected_uses: (n_rows,) float64, how often an episode is expected to play each row.
        prompt_tokens: (n_rows,) int64, of the rows of the window.
        output_tokens: (n_rows,) int64, of the rows of the window.
    """

    def __init__(self, arrivals: TraceArrivals, trace: Trace, horizon_s: float) -> None:
        self._speedup = arrivals.speedup
        self._sample_fraction = arrivals.sample_fraction
        self._starts_at_random = arrivals.start == "random"
        self._loop = arrivals.loop
        self._horizon_s = horizon_s
        self._window_s = _window_length(arrivals, trace)
        # All times below are the trace's own, counted from the beginning of the window.
        self._span_s = horizon_s * arrivals.speedup
        position_s = trace.arrival_s - arrivals.window_start_s
        inside = slice(*np.searchsorted(position_s, (0.0, self._window_s)))
        self._position_s = position_s[inside]
        self.prompt_tokens = trace.prompt_tokens[inside]
        self.output_tokens = trace.output_tokens[inside]
        if not self._position_s.size:
            raise TraceError(
                trace.file,
                None,
                f"no request from window_start_s {arrivals.window_start_s:g} on for "
                f"{self._window_s:g} s; the trace lasts {trace.arrival_s[-1]:g} s",
            )
        self.expected_uses = self._sample_fraction * self._expected_plays()
        check_events("requests", float(self.expected_uses.sum()))
        self.mean_rate_per_s = float(self.expected_uses.sum() / horizon_s)

    def sample(self, rng: np.random.Generator) -> tuple[FloatArray, IntArray]:
        """Draw an episode.

        Returns:
            Arrival times in seconds, (n,) float64 in `[0, horizon_s]` and not decreasing, and
            the row of the window behind each, (n,) int64.
        """
        n_rows = self._position_s.size
        start_s = rng.random() * self._window_s if self._starts_at_random else 0.0
        end_s = start_s + self._span_s
        plays = np.arange(self._rows_before(start_s), self._rows_before(end_s))
        if self._sample_fraction < 1:
            plays = plays[rng.random(plays.size) < self._sample_fraction]
        repetition, rows = np.divmod(plays, n_rows)
        arrival_s = (
            self._position_s[rows] + (repetition * self._window_s - start_s)
        ) / self._speedup
        return np.clip(arrival_s, 0.0, self._horizon_s), rows

    def _rows_before(self, time_s: float) -> int:
        """Rows played before a time, counted from the beginning of the first repetition."""
        if not self._loop:
            return int(np.searchsorted(self._position_s, time_s))
        repetition, rest_s = divmod(time_s, self._window_s)
        return int(repetition) * self._position_s.size + int(
            np.searchsorted(self._position_s, rest_s)
        )

    def _expected_plays(self) -> FloatArray:
        """(n_rows,) expected number of times that an episode passes each row."""
        position_s, window_s, span_s = self._position_s, self._window_s, self._span_s
        if self._loop and self._starts_at_random:
            return np.full(position_s.size, span_s / window_s)
        if self._loop:
            return np.maximum(np.ceil((span_s - position_s) / window_s), 0.0)
        if self._starts_at_random:
            # A start between position - span and position, and inside the window, sees it.
            return (position_s - np.maximum(position_s - span_s, 0.0)) / window_s
        return (position_s < span_s).astype(np.float64)


def _window_length(arrivals: TraceArrivals, trace: Trace) -> float:
    if arrivals.window_s is not None:
        return arrivals.window_s
    last_s = float(trace.arrival_s[-1])
    if last_s == 0:
        raise TraceError(
            trace.file, None, "all its requests come at one time; a window_s is needed"
        )
    return max(last_s - arrivals.window_start_s, 0.0) + last_s / (len(trace) - 1)
