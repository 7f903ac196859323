"""Recipes: the settings of every stage, and how they are read.

settings: one validated block per stage.
recipe: all blocks of one distillation, with checks across them.
extras: packages that only some recipes need.
loading: YAML files, presets, overrides and one-line error messages.
"""
