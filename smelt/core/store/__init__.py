"""The store: artifacts and scores by key, locks and heartbeats."""
