"""Labels of the synthetic texts: class probabilities from the model's answer and from the release.

teacher: the calibrated model, with the released probe and token rates.
labelling: the columns of labelled texts, and their figures.
release_warnings: messages about a release, logged before it is charged.
hard_rows: texts repeated with labels in proportion to their probabilities.
"""
