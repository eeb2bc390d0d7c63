"""The store: artifacts and scores under their keys, and who holds a lock or is at work."""
