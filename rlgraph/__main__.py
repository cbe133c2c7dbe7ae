from rlgraph.cli import main

main(prog_name="rlgraph")
