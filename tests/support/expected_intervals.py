"""Student's interval of a score from its resamples, by scipy's functions."""

import math

import numpy as np
from scipy.special import expit, logit
from scipy.stats import t


def student_interval(value, resampled, n, limits=(0, 100), degrees=None):
    """Return the 95 % interval by the delta method: on the logit between two limits, the log above one."""
    low, high = limits
    error = np.std(resampled, ddof=1) * math.sqrt(n / (n - 1))
    half = t.ppf(0.975, n - 1 if degrees is None else degrees) * error
    if math.isinf(low):
        return value - half, value + half
    if math.isinf(high):
        return tuple(low + np.exp(np.log(value - low) + np.array([-1, 1]) * half / (value - low)))
    share = (value - low) / (high - low)
    derivative = 1 / (share * (1 - share))
    bounds = expit(logit(share) + np.array([-1, 1]) * half / (high - low) * derivative)
    return tuple(low + (high - low) * bounds)
