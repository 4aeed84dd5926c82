"""Text of the scheduler: tokenizer bundle, chat template, incremental decoding, stop strings."""
