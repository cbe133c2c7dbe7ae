"""Conversations of several turns: agent loops, tool calls, and what joins turns, token by token."""
