"""Views of a plan and a run: pictures, a page and a timeline, all of them made from the plan's JSON.

graph, plan.json or run ─ subject ──────────┬─ drawings/                          .mmd, .dot, .svg, .png
                             │              │
                             ├─ timeline ───┼─ trace                              for ui.perfetto.dev
                             │              │
                             └─ recorded ───┴─ contents ─ page                    one HTML file
"""
