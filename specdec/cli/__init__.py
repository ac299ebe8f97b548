"""The command line: one module per command, and the request dataclass that they share."""
