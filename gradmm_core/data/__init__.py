"""Labelled texts of a data set.

splits: reading and splitting, without coupling records.
examples: tokenised texts, samples of them and held-out splits.
"""
