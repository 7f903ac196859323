"""Labelled texts of a data set.

sources: files, folders, saved data sets and the hub, as tables.
columns: from a table to texts and labels, with all that is wrong with it.
shape: what a new recipe says of a data set: columns, label values and rounded sizes.
splits: splitting without coupling records.
examples: tokenised texts, samples of them and held-out splits.
"""
