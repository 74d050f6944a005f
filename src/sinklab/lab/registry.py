"""Registries of the lab: formats of checkpoints, figures, studies, commands and sandboxes."""

from sinklab.core.registry import Registry

families = Registry("checkpoint family", "families")
"""Formats of checkpoints: `sinklab.lab.checkpoints.Family`."""
figures = Registry("figure", "figures")
"""Figures of run folders: `sinklab.lab.reports.figure`."""
studies = Registry("study", "studies")
"""Kinds of runs, each with a command: `sinklab.lab.studies.base.Study`."""
commands = Registry("command", "commands")
"""Commands that are no study: `sinklab.lab.cli.options.Command`."""
sandboxes = Registry("sandbox", "sandboxes")
"""Places to run programs that a model wrote."""
engines = Registry("engine", "engines")
"""Programs that compute the parts of a run on several workers; without one it is a loop."""
