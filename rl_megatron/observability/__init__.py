"""Records and shows a run: metrics, progress, samples, log and report. A leaf: it imports no other room."""
