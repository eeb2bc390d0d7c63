"""How long an artifact takes from text to text, compared fairly with the baseline."""

from smelt.evaluate.latency.comparison import VERSION, Latency, measure
from smelt.evaluate.latency.settings import LatencySettings

__all__ = ["VERSION", "Latency", "LatencySettings", "measure"]
