"""Carrying a plan out: steps, scores, times, the run's folder."""
