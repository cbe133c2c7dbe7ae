"""The version of rlgraph, which plans, runs and pages carry."""

VERSION = "0.1.0"
