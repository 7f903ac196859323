"""Other methods that generate texts under differential privacy, to compare the product with.

- `private_evolution`: texts of the model that the records vote for (Aug-PE).
- `epsvec`: texts of the model, steered by a noisy mean of the records (EPSVec).
- `few_shot`: texts that the model writes after examples from noisy sums of its answers to records (DP few-shot).
- `dp_adapters`: texts that the model writes after DP-SGD on adapters of its weights.
- `class_shares`: soft labels weighted by the classes' shares of the records.
- `releases`: the ledger entry, the noisy parts and the columns that they share.
- `texts`: how a changed model writes its texts.
"""
