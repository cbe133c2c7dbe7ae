"""A plan as a drawing: boxes and edges, written for mermaid or Graphviz."""
