"""The studies of a recipe.

flows: one flow for each study.
study: what they share.
rivals: the stages of the rivals.
"""
