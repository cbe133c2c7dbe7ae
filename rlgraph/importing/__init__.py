"""Reads the settings of other frameworks, and writes them as edits of a shipped graph."""
