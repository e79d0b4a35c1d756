"""Robust statistics of a curve: its own history, its level, and whether it grows.

Letters: N points of a curve, W points of a window. Curves are lists of finite numbers. A spread is the median
absolute deviation, scaled to the standard deviation of a normal distribution.
"""

from collections.abc import Sequence

import numpy as np

NORMAL = 1.4826  # standard deviations in a median absolute deviation of a normal distribution
WINDOW = 50  # points before a point that are its history
LEAST = 20  # of them, before a point is judged
SIGMAS, FACTOR = (
    10.0,
    3.0,
)  # a point above its history is so many spreads above the median, and so many times it
CALM = 5  # consecutive points below the limit that end an episode
FLOOR = 0.01  # least spread, as a share of the median: a curve may have been constant


def before_each(values: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return median and spread of the `WINDOW` points before each point, [N]; NaN where there are too few."""
    window_NW = np.lib.stride_tricks.sliding_window_view(
        np.concatenate([np.full(WINDOW, np.nan), np.asarray(values, dtype=float)[:-1]]), WINDOW
    )[: len(values)]
    median_N = np.full(len(values), np.nan)
    spread_N = median_N.copy()
    judged_NW = window_NW[LEAST:]
    median_N[LEAST:] = np.nanmedian(judged_NW, axis=1) if len(judged_NW) else []
    apart_NW = np.abs(judged_NW - median_N[LEAST:, None])
    spread_N[LEAST:] = NORMAL * np.nanmedian(apart_NW, axis=1) if len(judged_NW) else []
    return median_N, spread_N


def above_history(values: Sequence[float]) -> tuple[list[int], list[float]]:
    """Return the points that are far above their own history, and for each the median of that history.

    A point begins an episode if it is both `SIGMAS` spreads above the median before it and `FACTOR` times
    that median. The episode has all points above this limit, and ends with `CALM` points below it: a new
    level that stays is no history to be compared with.
    """
    if len(values) <= LEAST:
        return [], []
    median_N, spread_N = before_each(values)
    spread_N = np.maximum(spread_N, FLOOR * np.abs(median_N))
    limit_N = np.maximum(median_N + SIGMAS * spread_N, FACTOR * median_N)
    limit_N[~(median_N > 0)] = np.nan  # nothing is some times a median of 0
    found, usual = [], []
    limit, median, calm = float("nan"), float("nan"), CALM
    for place, value in enumerate(values):
        if calm >= CALM:  # no episode
            limit, median = float(limit_N[place]), float(median_N[place])
        if value > limit:
            found.append(place)
            usual.append(median)
            calm = 0
        else:
            calm += 1
    return found, usual


def rolling_median(values: Sequence[float], window: int) -> np.ndarray:
    """Return the median of each `window` consecutive points, [N - window + 1]; fewer points give none."""
    if len(values) < window:
        return np.empty(0)
    return np.median(np.lib.stride_tricks.sliding_window_view(np.asarray(values, float), window), axis=1)


def spread_around(values: Sequence[float], window: int) -> float:
    """Return the spread of points around the rolling median, which is the noise of one point."""
    middle = rolling_median(values, window)
    centred = np.asarray(values, float)[window // 2 :][: len(middle)]
    return float(NORMAL * np.median(np.abs(centred - middle)))


def grows_steadily(values: Sequence[float], *, parts: int) -> tuple[float, float] | None:
    """Return the median of the first and of the last of `parts` parts, if each is above the one before."""
    medians = [float(np.median(part)) for part in np.array_split(np.asarray(values, float), parts)]
    grows = all(after > before for before, after in zip(medians, medians[1:]))
    return (medians[0], medians[-1]) if grows else None
