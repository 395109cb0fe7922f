"""What a rank must not say."""


class Violation(ValueError):
    """A rank has said what no rank of ours says. The text tells what."""
