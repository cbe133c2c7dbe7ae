"""The endpoint by which agents that nobody rewrote talk to the policy, and the record of what it wrote."""
