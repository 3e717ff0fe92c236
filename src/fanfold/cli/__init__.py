"""The command line: prints what the rooms below compute."""

from fanfold.cli.app import main as main
