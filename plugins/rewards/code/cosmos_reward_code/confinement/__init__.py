"""The inside of the sandbox: modules of the standard library only, imported by the process that runs a program."""
