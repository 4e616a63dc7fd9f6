"""Values that were resolved automatically, with their reasons."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Choice:
    """One resolved value and the reason for it."""

    name: str
    value: object
    reason: str

    def __str__(self) -> str:
        return f"{self.name}={self.value}  because {self.reason}"


@dataclass(slots=True)
class Notes:
    """Automatic choices and warnings of a resolution, for its user.

    Attributes:
        choices: values that were taken automatically.
        warnings: values of the user that contradict the model.
    """

    choices: list[Choice] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def chose(self, name: str, value: object, reason: str) -> None:
        """Note an automatic choice."""
        self.choices.append(Choice(name, value, reason))

    def warn(self, text: str) -> None:
        """Note a contradiction."""
        self.warnings.append(text)
