"""The protocol's values and decisions: pure, without input or output, clock, chance or database."""
