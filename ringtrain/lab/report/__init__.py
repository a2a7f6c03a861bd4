"""`ringtrain report`: runs as one HTML page or Markdown.

cli:            the command, and its sections
runs:           `ringtrain runs`: the runs of a folder, the newest first
run_folder:     reads a run folder, also of a killed run
curves:         curves, and what a step's time went into
time_use:       where the time of a run went, and what it has cost
postmortem:     all ranks' journals as one table, with a verdict
html:           tables and charts as one HTML file, or Markdown
charts:         lines and stacked bars as SVG by matplotlib
"""
