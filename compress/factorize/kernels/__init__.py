"""Convolutions as sums of thin products: Tucker-2, CP, and how many terms are more than noise."""
