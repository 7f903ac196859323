"""Gradients of the response loss, and how a gradient is compared with the target.

head_gradient: per-example gradients of the output head in closed form, their clipping and their sums.
full_gradient: per-example gradients of all parameters by autograd, the paper's ablation.
mean_gradient: the mean gradient of many texts with respect to all parameters.
matching_loss: the loss between a gradient and the target, from inner products and norms.
"""
