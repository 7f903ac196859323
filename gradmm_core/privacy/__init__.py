"""The private release: the sensitivity of its sums, its noise, and the count of all releases.

sensitivity: the division of the clipping norm among the parts of a record's vector, and the probe's size under it.
clipped_sum: the clipped sums that a release consists of.
mechanism: the Gaussian mechanism, its calibration and its samplers.
release_plan: the mechanism and the settings of one release, derived from a recipe.
guarantee: the guarantee as reports state it.
ledger: all releases from one data set, and their budget.
row_digests: the records that a ledger counts, whatever their data are called.
ledger_store: the ledger's lines in a file or an object store.
"""
