"""The program: settings, runs as folders, their report, the command line, the demo."""
