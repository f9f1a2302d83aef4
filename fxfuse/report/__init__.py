"""What fxfuse did with every head it saw: ``python -m fxfuse.report SCRIPT`` prints it, ``Report`` holds it."""

from .records import GraphRecord, Report, Site

__all__ = ["GraphRecord", "Report", "Site"]
