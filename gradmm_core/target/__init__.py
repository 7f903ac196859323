"""The target of gradient matching: its space, its sums over records, and what is released with it.

target_space: the linear map and the centres, from public text.
features: the features of texts for the probe, scaled by public text.
record_batches: the records' vectors, each computed so that it depends on its record alone.
independent_rows: how many texts a batch may hold, such that none depends on the others.
unit_groups: the records of each unit of privacy, combined so that they are clipped together.
target_gradient: the sums of the records' clipped vectors, with noise.
checkpoint: the unfinished sums on disk.
probe: the linear probe, fitted to the released sums.
token_rates: how often texts contain each token, as vectors of norm 1 and as sums of them.
naive_bayes: the classifier of tokens, fitted to the released rates.
tables: target, moments and token sums as rows of a table.
matched_target: the target that texts match, from the released one.
preflight: the expected quality of a private target, from public quantities.
cosine: the cosine between two targets.
"""
