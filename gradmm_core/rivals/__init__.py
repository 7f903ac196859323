"""Other methods that generate texts under differential privacy, to compare the product with.

- `private_evolution`: texts of the model that the records vote for (Aug-PE).
"""
