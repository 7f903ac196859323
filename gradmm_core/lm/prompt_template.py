"""The prompt template in words; `template` has it in tokens. Imports no torch, so that flows start fast."""

from __future__ import annotations

from gradmm.config.recipe import Recipe
from gradmm.config.settings import Settings


class PromptTemplate(Settings):
    """The settings that determine an example's tokens. Excludes instructions and class names."""

    suffix: str
    verbalisers: dict[int, str]
    max_text_tokens: int

    @property
    def labels(self) -> tuple[int, ...]:
        """Labels in the recipe's order."""
        return tuple(self.verbalisers)

    @classmethod
    def of(cls, recipe: Recipe) -> PromptTemplate:
        """Build the template from the recipe's template and the verbalisers of its classes."""
        return cls(
            suffix=recipe.template.suffix,
            verbalisers={c.label: c.verbaliser for c in recipe.classes},
            max_text_tokens=recipe.template.max_text_tokens,
        )
