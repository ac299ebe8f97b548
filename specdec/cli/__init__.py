"""The command line: one room a command, and the request that they share."""
