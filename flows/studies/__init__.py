"""The studies of a recipe: `flows` has one flow for each, `study` the parts that they share."""
