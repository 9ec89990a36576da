"""The table of metrics, a file of rows for each subject, and the writer of a run's rows."""
