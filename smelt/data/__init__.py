"""Datasets: readers (CSV, JSON, Parquet, images, arrays), splits and labels."""
