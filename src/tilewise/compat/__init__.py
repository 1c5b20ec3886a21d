"""tilewise under other libraries' names. Each module imports its library and nothing here imports the modules."""
