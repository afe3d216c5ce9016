"""Safety promises, each with a small change to the code that breaks it, and the tests that must notice: ``make mutants``."""
