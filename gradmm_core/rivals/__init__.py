"""What others release under differential privacy, to stand beside the product in a comparison.

- `private_evolution`: texts of the model that the records vote for (Aug-PE).
"""
