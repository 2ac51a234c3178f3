"""The commands of `kernel-fun`, one module each.

A command module has `HELP`, `arguments(parser)` and `run(args, screen)`, which draws on the screen as
it goes and returns its exit status and what `--json` prints.
"""
