"""What every process of a run did and when, on one clock: spans in memory, a trace in the run's folder."""
