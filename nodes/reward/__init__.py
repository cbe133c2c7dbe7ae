"""Rewards: from responses to a score per sample, and from scores to rewards per token."""
