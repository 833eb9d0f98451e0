"""What is measured on the real engine, a module each; `python -m checks.engine` runs one in a process of its own."""
