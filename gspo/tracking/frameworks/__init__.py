"""The metrics of other frameworks: their names, their definitions, and which of ours they are.

A file per framework (trl.py, verl.py, ...) holds its table and nothing else. table.py explains the
fields of a table, known.py finds a run's framework by its names, and translate.py makes our rows
of a framework's records. The files of the frameworks are read by gspo.analysis.foreign_files.
"""
