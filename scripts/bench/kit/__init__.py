"""What benchmarks and tests share: servers for a run, workers as processes, the scripted model server, the tables."""
