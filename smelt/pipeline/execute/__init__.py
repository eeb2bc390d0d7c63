"""Run a plan: steps, scores, latency, report, the run's folder."""
