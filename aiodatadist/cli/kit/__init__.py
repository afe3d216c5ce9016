"""What the commands share: child processes and pipes, errors, numbers, devices, text and tables."""
