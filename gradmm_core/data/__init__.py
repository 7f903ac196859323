"""Labelled texts of a data set.

sources: files, folders, saved data sets and the hub, as tables.
columns: from a table to texts and labels, with all that is wrong with it.
splits: splitting without coupling records.
examples: tokenised texts, samples of them and held-out splits.
"""
