"""Problems in, batches out: prompts and their files, tokens shifted into samples, samples packed into micro-batches."""
