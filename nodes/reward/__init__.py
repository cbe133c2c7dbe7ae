"""Rewards: from responses to a score a sample, and from scores to rewards a token."""
