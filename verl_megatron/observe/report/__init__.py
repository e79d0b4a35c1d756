"""The report of one or several runs, a single HTML file: read a run, find its alarms, write the page."""
