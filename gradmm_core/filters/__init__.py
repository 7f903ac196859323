"""Filters that keep some of the generated texts: the columns `kept` and `reason` hold their decisions.

label_filter: drop texts that few-shot classification and the probe assign to another class.
loss_selection: keep the texts of each class that match best.
subset_selection: the matching loss of a set of texts, and the choice of a subset.
category_balance: lower the mean losses of the worse classes to that of the best.
rows: the kept rows of a filter's table, and its figures.
"""
