"""Tool-call formats: their parsers, and grammars that make calls valid."""
