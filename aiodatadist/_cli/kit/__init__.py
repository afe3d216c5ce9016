"""The common kit of the commands: child processes and pipes, errors, numbers, devices, text and tables."""
