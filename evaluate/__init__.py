"""Quality, latency, significance, and the report."""
