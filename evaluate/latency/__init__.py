"""Latency of artifacts from input to output, compared with the baseline."""

from smelt.evaluate.latency.measurement import LATENCY_VERSION, LatencyResults, TimingJob, measure_latency
from smelt.evaluate.latency.settings import LatencySettings

__all__ = ["LATENCY_VERSION", "LatencyResults", "LatencySettings", "TimingJob", "measure_latency"]
