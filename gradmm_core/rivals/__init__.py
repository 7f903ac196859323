"""Other methods that generate texts under differential privacy, to compare the product with.

- `private_evolution`: texts of the model that the records vote for (Aug-PE).
- `epsvec`: texts of the model, steered by a noisy mean of the records (EPSVec).
- `releases`: the ledger entry and the columns that they share.
"""
