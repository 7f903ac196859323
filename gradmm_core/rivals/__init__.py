"""Other methods that generate texts under differential privacy, to compare the product with.

- `private_evolution`: texts of the model that the records vote for (Aug-PE).
- `epsvec`: texts of the model, steered by a noisy mean of the records (EPSVec).
- `few_shot`: texts that the model writes after examples from noisy sums of its answers to records (DP few-shot).
- `releases`: the ledger entry, the parts and the columns that they share.
"""
