"""Read samples: CSV, JSON, Parquet and plain text files, and data sets of the hub."""
