"""Conversations of several turns: agent loops, tool calls, and the token ids that join turns."""
