"""What a run shows and records: metrics, progress, samples, log and report. A leaf: imports no other room."""
