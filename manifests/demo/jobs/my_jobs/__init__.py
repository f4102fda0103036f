"""The jobs of the quick start are those of rowlock's own demonstration; yours would be here."""
