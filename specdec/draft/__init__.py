"""Drafters, draft-length policies, and measurements of their costs on this machine."""
