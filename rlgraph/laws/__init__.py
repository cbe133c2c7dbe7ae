"""The laws that a graph must keep, and warnings of what it likely does not mean: one file per subject.

A law is a function from a view of the graph (views.py) to an iterator of problems, and each problem says
whether it is an error or a warning. A literal tuple at the end of a file lists the laws of its subject in the
order in which they are checked. Who has the view checks them: binding, a pass, planning, or the search for
warnings.
"""
