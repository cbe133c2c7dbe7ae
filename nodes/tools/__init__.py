"""Tools that a policy may call, one module a tool."""
