"""The prompt template in words; `template` has it in tokens. Imports no torch, so that flows start fast."""

from __future__ import annotations

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
