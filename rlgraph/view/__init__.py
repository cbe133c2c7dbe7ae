"""A plan and a run to look at: pictures, a page and a timeline, all of them made from the plan's JSON.

graph, plan.json or run ─ given ─ links ────┬─ drawing ─ mermaid, dot ─ picture   .svg, .png
                             │              │
                             ├─ timeline ───┼─ counters ─ trace                   for ui.perfetto.dev
                             │              │
                             └─ recorded ───┴─ contents ─ page                    one HTML file
"""
