"""The commands, a module for each: `gspo train ...` calls `main` of gspo.commands.train, which
reads sys.argv.

`main` is the console script `gspo`; `option_files` says where conf/ and sweeps/ are. `python
experiments/train.py` in the repository calls the same functions. This room also uses the package
`analysis`, as no other room does.
"""
