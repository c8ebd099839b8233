"""The core of all schedulers. A scheduler is one module beside this package: tables and small pure functions."""
