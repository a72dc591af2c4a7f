"""The parts of a report: each looks at a run and draws one thing, or says that there is nothing to show."""
