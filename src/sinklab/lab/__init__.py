"""Both papers and what a researcher does every day: files, training, scoring, analysis, studies,
reports, commands.
"""
