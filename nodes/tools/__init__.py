"""Tools that a policy may call, one module per tool."""
