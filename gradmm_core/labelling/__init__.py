"""Labels of the synthetic texts: class probabilities from the model's answer and from the release.

teacher: the calibrated model together with the released probe.
labelling: the columns of labelled texts, and their figures.
release_warnings: messages about a release, logged before it is charged.
hard_rows: texts repeated with labels in proportion to their probabilities.
"""
