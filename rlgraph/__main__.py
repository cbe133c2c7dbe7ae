from rlgraph.cli.main import main

main(prog_name="rlgraph")
